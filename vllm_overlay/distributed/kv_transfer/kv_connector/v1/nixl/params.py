# SPDX-License-Identifier: Apache-2.0
"""All releases: what `kv_transfer_params` must look like for NIXL; clients send them.

Their form is what a prefill server hands out (`NixlConnectorScheduler.request_finished`):
`remote_engine_id`, `remote_request_id`, `remote_host`, `remote_port`, `tp_size` say whom to talk
to, `remote_block_ids` (one list of block numbers for each KV-cache group) what to read. Whom to
talk to is enough to tell the prefill server that it may free its blocks.
"""

from __future__ import annotations

import re
from array import array
from typing import Any, NamedTuple

MAX_RANKS = 1024
"""Of a peer. Every one that a worker reads from costs a handshake, so a number that no deployment
has must not start a million of them."""

MAX_BLOCK_ID = 2**31 - 1
"""Block numbers are 32-bit in vLLM's block tables."""

MAX_DEPTH = 300
"""Levels of lists and objects inside a field. Other connectors than NIXL may have a use for what is
deep, but where vLLM copies or pickles it, Python 3.11 gives up at less than 480."""

MAX_SHOWN = 200
"""Characters that are shown of what a client chose."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""A field's name that may be repeated in an answer and in the log."""

_OF_TRANSFER = frozenset({"tp_size", "dcp_size", "pp_size", "transfer_mode"})
"""What a prefill server hands out beside names that begin with do_remote_ and remote_."""

_LATER_NUMBERS = "dcp_size", "pp_size", "remote_registration_generation"

_OF_OTHERS = frozenset({"remote_prefiller", "remote_decoder", "remote_kv_source"})
"""Names of that kind which the offloading connector reads, for a tier on peers (from 0.27.0 on)."""

_PULLING = ("NixlConnector", "NixlPullConnector")

MAX_ID_LENGTH = 4096
"""Characters in an id; a prefill server's request id may hold one that its client chose."""


class Problem(NamedTuple):
    """A field that cannot be used, and why, in words that continue the field's name."""

    field: str
    reason: str

    def __str__(self) -> str:
        return f"kv_transfer_params{'.' * bool(self.field)}{self.field} {self.reason}"


def find_problem(params: object, *, groups: int | None = None) -> Problem | None:
    """Say what keeps blocks from being read with these parameters, if they ask for that.

    `groups` is the number of KV-cache groups of the engine that reads; None where that is not
    known, as in the API server.
    """
    if params is None:
        return None
    if not isinstance(params, dict):
        return Problem("", f"must be an object, not {_type(params)}")
    for flag in ("do_remote_prefill", "do_remote_decode"):
        if not isinstance(params.get(flag), bool | None):
            return Problem(flag, f"must be true or false, not {_type(params[flag])}")
    if not asks_for_blocks(params):
        return None
    return _place_problem(params) or _blocks_problem(params, groups) or _tokens_problem(params)


def of_transfer(name: str) -> bool:
    """Whether a NIXL scheduler's `request_finished` names this field, on any release."""
    if name in _OF_OTHERS:
        return False
    return name.startswith(("do_remote_", "remote_")) or name in _OF_TRANSFER


def are_for(connector: str | None, module_path: str | None) -> bool:
    """Whether parameters are for NIXL, as configured: vLLM's own class, which pulls.

    With a module path it is somebody else's class, whatever its name.
    """
    return connector in _PULLING and not module_path


def unbracketed(host: str) -> str:
    """A host without the brackets in which an address of IPv6 may stand, as vLLM takes it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def printable(text: str) -> str:
    """`text` for a line in a log or an id of ours: short, and without what moves a terminal.

    Clients choose ids, of any length and with anything in them.
    """
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_SHOWN])


def find_unsendable(params: object) -> Problem | None:
    """Say what could not be sent to the engine core, whatever connector it is meant for.

    A request that turns out to be unsendable when it is sent stays on the API server's books for
    ever. The wire carries 64-bit integers and whole characters; depth costs its encoder stack.

    This runs in the server's event loop, and a client may send a prompt's token ids along: a level
    of nesting is looked at as a whole, not value by value.
    """
    fields = params.items() if isinstance(params, dict) else [("", params)]
    for field, top in fields:
        level: list[Any] = [field, top]
        for _ in range(MAX_DEPTH):
            kinds = set(map(type, level))
            if reason := _unsendable(level, kinds):
                return Problem(_shown(field), reason)
            if not (level := _inside(level, kinds)):
                break
        else:
            return Problem(_shown(field), f"must not be nested deeper than {MAX_DEPTH} levels")
    return None


def _shown(field: object) -> str:
    """A field's name, if it can stand in a message: a client may choose any."""
    return field if isinstance(field, str) and _NAME.fullmatch(field) else ""


def _unsendable(values: list[Any], kinds: set[type]) -> str | None:
    integers = _of(int, values, kinds)
    try:
        array("q", integers)  # most integers fit, and this is the fastest look at many
    except OverflowError:
        if min(integers) < -(2**63) or max(integers) >= 2**64:
            return "must not hold integers of more than 64 bits"
    # Joining makes no whole character of two halves.
    if not _is_unicode("".join(_of(str, values, kinds))):
        return "is not valid Unicode"
    return None


def _inside(values: list[Any], kinds: set[type]) -> list[Any]:
    """What the containers among `values` hold."""
    inner: list[Any] = []
    for container in _of((dict, list, tuple), values, kinds):
        inner.extend(container)  # of an object, the keys
        if isinstance(container, dict):
            inner.extend(container.values())
    return inner


def _of(kind: type | tuple[type, ...], values: list[Any], kinds: set[type]) -> list[Any]:
    """Those of `values`, which are of `kinds`, that are of a kind."""
    chosen = {each for each in kinds if issubclass(each, kind)}
    if len(chosen) == len(kinds):
        return values
    return [value for value in values if type(value) in chosen] if chosen else []


def asks_for_blocks(params: dict[str, Any]) -> bool:
    """Whether blocks wait on a peer; a prefill server may be offered some in its turn."""
    return bool(
        params.get("do_remote_prefill")
        or (params.get("do_remote_decode") and params.get("remote_block_ids"))
    )


def without_unread(params: object, *, reads_back: bool = False) -> object:
    """Leave out the blocks that a prefill server is offered, unless it is set up to read them.

    It prefills whatever they are: a router may have left them of an answer, and most servers never
    look.
    """
    if not isinstance(params, dict) or params.get("do_remote_prefill") or reads_back:
        return params
    return {**params, "remote_block_ids": None} if asks_for_blocks(params) else params


def peer_problem(params: dict[str, Any]) -> Problem | None:
    """Say what keeps the peer from being talked to."""
    return _place_problem(params) or find_number_problem(params)


def find_number_problem(params: dict[str, Any]) -> Problem | None:
    """Say what is wrong with the numbers that peers of later releases add; `tp_size` is good.

    A worker looks at `pp_size` from 0.26.0 on, at `dcp_size` from 0.30.0 on and at the generation
    from 0.33.0 on. Where it does not, a bad one is no reason to refuse a request. Null says none,
    as a router may write it (`said`).
    """
    limits = (1, MAX_RANKS), (1, MAX_RANKS // params.get("tp_size", 1)), (0, 2**63 - 1)
    for field, (low, high) in zip(_LATER_NUMBERS, limits, strict=True):
        if params.get(field) is not None and (problem := _number_problem(params, field, low, high)):
            return problem
    return None


def said(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters without numbers that peers of later releases add and this one has not."""
    return {
        field: value
        for field, value in params.items()
        if value is not None or field not in _LATER_NUMBERS
    }


def _place_problem(params: dict[str, Any]) -> Problem | None:
    for field, limit in (
        ("remote_engine_id", MAX_ID_LENGTH),
        ("remote_request_id", MAX_ID_LENGTH),
        ("remote_host", 255),
    ):
        if problem := _text_problem(params, field, limit):
            return problem
    if problem := _number_problem(params, "remote_port", 1, 65535):
        return problem
    if "tp_size" in params:  # a prefill server without tensor parallelism need not say so
        return _number_problem(params, "tp_size", 1, MAX_RANKS)
    return None


def _blocks_problem(params: dict[str, Any], groups: int | None) -> Problem | None:
    field = "remote_block_ids"
    ids = params.get(field)
    if ids is None:
        return Problem(field, "is missing")
    if not isinstance(ids, list | tuple) or not ids:
        return Problem(field, "must be a list with one list of block numbers per KV-cache group")
    if groups is not None and len(ids) != groups:
        return Problem(field, f"has {len(ids)} KV-cache groups, this engine has {groups}")
    for group in ids:
        if not isinstance(group, list | tuple):
            return Problem(field, f"must hold lists of block numbers, not {_type(group)}")
        for block in group:
            if type(block) is not int or not 0 <= block <= MAX_BLOCK_ID:
                return Problem(field, f"must hold block numbers from 0 to {MAX_BLOCK_ID}")
        named = [block for block in group if block]  # 0 stands for no block
        if len(set(named)) < len(named):
            return Problem(field, "must not name a block twice")
    return None


def _tokens_problem(params: dict[str, Any]) -> Problem | None:
    if params.get("remote_num_tokens") is None:
        return None
    return _number_problem(params, "remote_num_tokens", 0, 2**63 - 1)


def _text_problem(params: dict[str, Any], field: str, limit: int) -> Problem | None:
    value = params.get(field)
    if value is None:
        return Problem(field, "is missing")
    if not isinstance(value, str):
        return Problem(field, f"must be a string, not {_type(value)}")
    if not 0 < len(value) <= limit:
        return Problem(field, f"must have 1 to {limit} characters, not {len(value)}")
    return None if _is_unicode(value) else Problem(field, "is not valid Unicode")


def _is_unicode(text: str) -> bool:
    """JSON can spell half a character, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number_problem(params: dict[str, Any], field: str, low: int, high: int) -> Problem | None:
    value = params.get(field)
    if field not in params:
        return Problem(field, "is missing")
    if type(value) is not int:  # a bool is an int to Python, not to a reader
        return Problem(field, f"must be an integer, not {_type(value)}")
    if not low <= value <= high:
        return Problem(field, f"must be from {low} to {high}")
    return None


def _type(value: object) -> str:
    return "null" if value is None else type(value).__name__
