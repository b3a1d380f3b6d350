# SPDX-License-Identifier: Apache-2.0
"""All releases: `kv_transfer_params` are looked at once, before the scheduler believes them.

Every request passes here, whoever made it. Parameters that cannot be used cost a line in the log:
the prompt is computed by this engine, and the peer is told that it may free its blocks wherever
the parameters are good enough for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    Problem,
    asks_for_blocks,
    find_problem,
    peer_problem,
    printable,
    said,
    without_unread,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.peers import peer_not_allowed
from vllm_overlay.logging_utils.bounded_log import BoundedLog
from vllm_overlay.plugins import is_plugins

if TYPE_CHECKING:
    import zmq
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import (
        NixlConnectorScheduler,
    )
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")
bad_params, no_such_rank = BoundedLog(logger), BoundedLog(logger)

Method = TypeVar("Method", bound=Callable[..., Any])


class Use(Enum):
    """What NIXL does with a request's parameters."""

    READ = "read the peer's blocks"
    NOTIFY = "tell the peer that it may free them"
    IGNORE = "nothing"


class CheckedParams(dict[str, Any]):
    """A request's parameters after the check; a plain dict to every other connector."""

    use: Use = Use.READ


def _use(scheduler: NixlConnectorScheduler, request: Request) -> Use:
    """What to do with the request's parameters; looks at them when it sees them first."""
    params = request.kv_transfer_params
    if params is None:
        return Use.READ  # upstream's own code deals with nothing
    if type(params) is not CheckedParams:
        if has_engine(scheduler):
            groups = len(scheduler.kv_cache_config.kv_cache_groups)
            params = check(scheduler, request, groups, find_problem, _coverage_problem)
        else:
            params = as_checked(params)
        request.kv_transfer_params = params
    return params.use


def has_engine(scheduler: object) -> bool:
    """Whether a scheduler was made by its constructor; some of vLLM's own tests do without.

    Those that do give it a cache configuration at most, not the block size of an engine.
    """
    return "block_size" in vars(scheduler)


def as_checked(params: object) -> CheckedParams:
    """Take parameters as they are; what is no object holds none, and null says no number."""
    return CheckedParams(said(params) if isinstance(params, dict) else {})


def check(
    scheduler: NixlConnectorScheduler,
    request: Request,
    groups: int,
    find: Callable[..., Problem | None],
    covers: Callable[[Any, Request, CheckedParams], Problem | None],
) -> CheckedParams:
    """Look at a request's parameters; make of bad ones what can be made of them, and say so.

    `groups` is how many KV-cache groups are transferred, `find` says what is wrong with the
    parameters as such (`find_problem`), `covers` whether they name too few blocks.
    """
    params = without_unread(request.kv_transfer_params, reads_back=reads_back(scheduler))
    checked = as_checked(params)
    _give_single_group_a_list(checked, groups)
    problem = find(checked if isinstance(params, dict) else params, groups=groups)
    stranger = None if problem else peer_not_allowed(scheduler, checked)
    problem = problem or stranger or _engine_problem(scheduler, checked)
    # A plugin may promise fewer tokens than we count, and its P send as many blocks.
    if problem is None and not is_plugins(getattr(scheduler, "get_num_new_matched_tokens", None)):
        problem = covers(scheduler, request, checked)
    if problem is not None:
        told = _disarm(scheduler, checked, groups)
        if stranger:
            count(Acted.PEER_NOT_ALLOWED)
        elif not getattr(request, "abort_immediately", False):  # else its handler has counted it
            count(Acted.PARAMS_REFUSED)
        bad_params.warning(
            "Request %s cannot use the KV blocks it was given: %s. Its prompt is computed here; "
            "%s.",
            printable(request.request_id),
            problem,
            "their owner is told to free them"
            if told
            else "their owner cannot be told and keeps them until its own timeout",
        )
    return checked


def _give_single_group_a_list(params: CheckedParams, groups: int) -> None:
    """Accept the form of releases that knew one KV-cache group only.

    Code that makes requests in this process may still use it; from a client it is refused.
    """
    ids = params.get("remote_block_ids")
    if groups == 1 and ids and isinstance(ids, list) and all(type(i) is int for i in ids):
        params["remote_block_ids"] = [ids]


def _disarm(scheduler: NixlConnectorScheduler, params: CheckedParams, groups: int) -> bool:
    """Leave of bad parameters what can still be acted upon: whom to tell, whom to prefill for.

    Returns:
        Whether the owner of the blocks will be told.
    """
    if not isinstance(params.get("do_remote_decode"), bool | None):
        params["do_remote_decode"] = False  # no role for us that anybody could rely on
    told = (
        asks_for_blocks(params)
        and (peer_problem(params) or peer_not_allowed(scheduler, params)) is None
    )
    if told:
        # A receive that reads nothing is how a worker notifies; it still looks at the groups.
        params |= {"remote_block_ids": [[] for _ in range(groups)], "remote_num_tokens": 0}
    if params.get("do_remote_decode") and not params.get("do_remote_prefill"):
        # It prefills for somebody and must go on doing so; only what it was offered is dropped.
        if not told:
            params["remote_block_ids"] = None
    else:
        params.use = Use.NOTIFY if told else Use.IGNORE
    return told


def reads_back(scheduler: object) -> bool:
    """Whether a prefill server reads what a decode server keeps: if set up to, from 0.21.0 on."""
    return bool(getattr(scheduler, "is_bidirectional_kv_xfer_enabled", False))


def _engine_problem(scheduler: NixlConnectorScheduler, params: CheckedParams) -> Problem | None:
    """What this engine would promise to read and then not read: the request would wait forever."""
    both = params.get("do_remote_decode") and params.get("do_remote_prefill")
    if both and scheduler.use_host_buffer:
        return Problem("do_remote_decode", "excludes do_remote_prefill with a host buffer")
    return None


def _coverage_problem(
    scheduler: NixlConnectorScheduler, request: Request, params: CheckedParams
) -> Problem | None:
    """Too few blocks for the prompt. A worker that reads would run into that, and stop.

    Or of a hybrid, no state: a stock P of 0.19.x names the null block in its place.
    """
    if not asks_for_blocks(params):
        return None
    if scheduler._has_mamba:
        return _state_problem(scheduler, params)
    tokens = len(request.prompt_token_ids or ())
    if not params.get("do_remote_prefill"):
        tokens = min(tokens, params.get("remote_num_tokens") or 0)
    parallel = scheduler.vllm_config.parallel_config
    return short_group(
        params,
        tokens,
        scheduler.kv_cache_config.kv_cache_groups,
        scheduler.blocks_per_sw if scheduler._is_hma_required else None,
        block_size=scheduler.block_size,
        ranks=parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size,
    )


def _state_problem(scheduler: NixlConnectorScheduler, params: CheckedParams) -> Problem | None:
    for ids, group in zip(
        params["remote_block_ids"], scheduler.kv_cache_config.kv_cache_groups, strict=True
    ):
        if isinstance(group.kv_cache_spec, MambaSpec) and ids and not any(ids):
            return Problem("remote_block_ids", "names no state")
    return None


def short_group(
    params: CheckedParams,
    tokens: int,
    groups: Sequence[KVCacheGroupSpec],
    windows: Sequence[int] | None,
    *,
    block_size: int,
    ranks: int,
) -> Problem | None:
    """The first KV-cache group for which a peer offers fewer blocks than `tokens` need.

    A peer's blocks may be smaller than ours but not larger (its handshake would fail), so it has
    at least as many. A group's blocks may be larger than `block_size` (in tokens, what the engine
    was started with): groups of small pages are given larger ones. Each of `ranks` has a share
    of the tokens. `windows` says for each group how many blocks are sent at the most, 0 for all.
    State caches (Mamba) do not go by tokens; they are not for here.
    """
    for theirs, group, window in zip(
        params["remote_block_ids"], groups, windows or [0] * len(groups), strict=True
    ):
        needed = cdiv(tokens, max(block_size, group.kv_cache_spec.block_size) * ranks)
        # Blocks outside a sliding window are never sent.
        least = min(needed, window) if window else needed
        if len(theirs) < least:
            return Problem(
                "remote_block_ids",
                f"has {len(theirs)} blocks where {tokens} tokens need {least}",
            )
    return None


def matches_only_readable(
    method: Callable[[NixlConnectorScheduler, Request, int], tuple[int, bool]],
) -> Callable[[NixlConnectorScheduler, Request, int], tuple[int, bool]]:
    """Have `get_num_new_matched_tokens` promise tokens only where blocks can be read."""

    @functools.wraps(method)
    def wrapper(
        self: NixlConnectorScheduler, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        if _use(self, request) is not Use.READ:
            return 0, False
        return method(self, request, num_computed_tokens)

    return wrapper


def skips_ignored(nothing: object) -> Callable[[Method], Method]:
    """Have a method that takes a request first return `nothing` for one that is not NIXL's."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def wrapper(
            self: NixlConnectorScheduler,
            request: Request,
            *args: Any,  # noqa: ANN401 - passed on as they are
            **kwargs: Any,  # noqa: ANN401
        ) -> object:
            if _use(self, request) is Use.IGNORE:
                return nothing
            return method(self, request, *args, **kwargs)

        return cast("Method", wrapper)

    return decorate


def answer_handshake(
    socket: zmq.Socket[bytes], identity: bytes, encoded: dict[int, bytes], rank: object
) -> None:
    """Answer a peer that asks for a rank's metadata; an empty answer fails its handshake.

    The peer's client said how many ranks there are here. Asked for one that does not exist, the
    listener must go on listening.
    """
    answer = metadata_of(encoded, rank) if isinstance(rank, int) else None
    send_metadata(socket, identity, answer, rank)


def metadata_of(encoded: Mapping[Any, bytes], rank: object) -> bytes | None:
    """Return the metadata of a rank, None if there is none.

    As stock asks, by subscript: a plugin's mapping may answer otherwise as long as P has no links.
    """
    try:
        return encoded[rank]
    except KeyError:
        return None


def send_metadata(
    socket: zmq.Socket[bytes],
    identity: bytes,
    answer: bytes | None,
    rank: object,
    *more: bytes,
) -> None:
    """Send a peer the metadata of a rank and what else the release says; empty if there is none."""
    if answer is None:
        count(Acted.NO_SUCH_RANK)
        no_such_rank.warning("A peer asked for the metadata of rank %.100r; there is none.", rank)
    socket.send_multipart((identity, b"", answer or b"", *more))
