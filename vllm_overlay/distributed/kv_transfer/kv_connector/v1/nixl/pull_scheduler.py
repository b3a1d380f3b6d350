# SPDX-License-Identifier: Apache-2.0
"""From 0.24.0 on: the check of `kv_transfer_params` where pull and push are two classes.

What is done with the outcome is the same as before and stays in
`vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.scheduler`. Other than there, a request's
blocks may be fewer than its prompt fills: some KV-cache groups are never transferred or have blocks
of their own size, decode-context ranks share a prompt's blocks among them, and the last tokens of
a prompt may be left to the decode server. And parameters may say more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.logger import init_logger
from vllm.v1 import kv_cache_interface

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import scheduler as shared
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.older import (
    pulls,
    transfer_groups,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    Problem,
    asks_for_blocks,
    find_number_problem,
    find_problem,
    printable,
    without_unread,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.peers import peer_not_allowed
from vllm_overlay.logging_utils.bounded_log import BoundedLog
from vllm_overlay.v1.kv_cache_interface import is_made_of

if TYPE_CHECKING:
    import zmq
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import (
        NixlBaseConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
        NixlPullConnectorScheduler,
    )
    from vllm.v1.request import Request

_RINGS: Any = tuple(
    vars(kv_cache_interface)[name]
    for name in ("CircularBufferSpec", "KpoolTailSpec")
    if name in vars(kv_cache_interface)
)
"""Groups that keep one block for a request, whatever its length: from 0.29.0 on."""

log = BoundedLog(init_logger(f"vllm.{__name__}"))

_Method = TypeVar("_Method", bound=Callable[..., Any])


def find_pull_problem(params: object, *, groups: int | None = None) -> Problem | None:
    """Say what keeps blocks from being pulled with these parameters, if they ask for that.

    `groups` as for `find_problem`: the KV-cache groups that are transferred.
    """
    if (problem := find_problem(params, groups=groups)) is not None:
        return problem
    if not isinstance(params, dict) or not asks_for_blocks(params):
        return None
    if (problem := find_number_problem(params)) is not None:
        return problem
    expiry = params.get("remote_blocks_expiry_time")
    if expiry is not None and type(expiry) not in (int, float):
        return Problem("remote_blocks_expiry_time", "must be a number of seconds")
    return None


def find_push_problem(params: object) -> Problem | None:
    """Say what keeps a prefill server from being asked to push, if these parameters want that.

    It knows its own blocks; they need not be named.
    """
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        return find_problem(params)
    if (problem := find_problem({**params, "remote_block_ids": [[]]})) is not None:
        return problem
    if "tp_size" not in params:  # other than for pulling, upstream has no default here
        return Problem("tp_size", "is missing")
    return find_number_problem(params)


# ---------------------------------------------------------------- in the scheduler


def matches_only_readable(method: _Method) -> _Method:
    """Have `get_num_new_matched_tokens` promise tokens only where blocks can be read."""
    return cast("_Method", _checked(shared.matches_only_readable(method)))


def skips_ignored(nothing: object) -> Callable[[_Method], _Method]:
    """Have a method that takes a request first return `nothing` for one that is not NIXL's."""

    def decorate(method: _Method) -> _Method:
        return _checked(shared.skips_ignored(nothing)(method))

    return decorate


def _checked(method: _Method) -> _Method:
    """Look at a request's parameters before `method` believes them, if nobody did before."""

    @functools.wraps(method)
    def wrapper(
        self: NixlBaseConnectorScheduler,
        request: Request,
        *args: Any,  # noqa: ANN401 - passed on as they are
        **kwargs: Any,  # noqa: ANN401
    ) -> object:
        params = request.kv_transfer_params
        if params is None or type(params) is shared.CheckedParams:
            return method(self, request, *args, **kwargs)
        if not shared.has_engine(self):
            checked = shared.as_checked(params)
        elif pulls(self):
            pulling = cast("NixlPullConnectorScheduler", self)
            groups = len(transfer_groups(self.kv_cache_config))
            find = _find_in_any_groups if _maps_groups(pulling) else find_pull_problem
            checked = shared.check(pulling, request, groups, find, _coverage_problem)
        else:
            checked = _check_push(self, request)
        request.kv_transfer_params = checked
        return method(self, request, *args, **kwargs)

    return cast("_Method", wrapper)


def _check_push(scheduler: NixlBaseConnectorScheduler, request: Request) -> shared.CheckedParams:
    params = without_unread(request.kv_transfer_params)  # who pushes reads nothing
    checked = shared.as_checked(params)
    bad = find_push_problem(checked if isinstance(params, dict) else params)
    problem = bad or peer_not_allowed(scheduler, checked)
    if problem is not None:
        if checked.get("do_remote_decode") is True:  # it goes on prefilling for somebody
            checked["do_remote_prefill"] = False
        else:
            checked.use = shared.Use.IGNORE
        count(Acted.PUSH_PARAMS_REFUSED if bad else Acted.PEER_NOT_ALLOWED)
        log.warning(
            "Request %s cannot have its KV blocks pushed: %s. Its prompt is computed here.",
            printable(request.request_id),
            problem,
        )
    elif checked.get("do_remote_prefill"):
        # P knows its own. Up to 0.25.1 a request that ends before it is scheduled has to name some.
        checked["remote_block_ids"] = ()
    return checked


def _maps_groups(scheduler: NixlPullConnectorScheduler) -> bool:
    """Whether the worker reads from a P that has its caches in other groups than ours.

    Latent ones alone, from 0.30.0 on: they are paired region by region. A P without HiSparse has
    one group of what are two on a D with it.
    """
    # Not at the top: the API server imports this first, and is in the middle of that package then.
    metadata = import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata")
    maps = hasattr(metadata.ReqMeta, "region_blocks_to_zero")
    return maps and scheduler.vllm_config.model_config.use_mla and not scheduler._has_mamba


def _find_in_any_groups(params: object, *, groups: int) -> Problem | None:
    """As `find_pull_problem`, whatever `groups` we have."""
    return find_pull_problem(params)


def _coverage_problem(
    scheduler: NixlPullConnectorScheduler, request: Request, params: shared.CheckedParams
) -> Problem | None:
    """Too few blocks for what is to be read of the prompt; the worker says so of other groups."""
    groups = transfer_groups(scheduler.kv_cache_config)
    if scheduler._has_mamba or not asks_for_blocks(params):
        return None
    if len(params["remote_block_ids"]) != len(groups):
        return None
    tokens = len(request.prompt_token_ids or ())
    if params.get("do_remote_prefill"):
        tokens = scheduler._get_remote_prefill_token_count(tokens)
    else:
        tokens = min(tokens, params.get("remote_num_tokens") or 0)
    parallel = scheduler.vllm_config.parallel_config
    ranks = max(parallel.decode_context_parallel_size, params.get("dcp_size", 1))
    windows = scheduler.blocks_per_sw if scheduler._is_hma_required else [0] * len(groups)
    rings = [is_made_of(group.kv_cache_spec, _RINGS) for group in groups]
    return shared.short_group(
        params,
        tokens,
        groups,
        [1 if ring else window for ring, window in zip(rings, windows, strict=True)],
        block_size=scheduler.block_size,
        ranks=ranks * parallel.prefill_context_parallel_size,
    )


# ---------------------------------------------------------------- the listener


def answer_handshake(
    socket: zmq.Socket[bytes],
    identity: bytes,
    encoded: dict[tuple[int, int], bytes],
    rank: tuple[object, object],
    clock: bytes,
) -> None:
    """Answer a peer that asks for the metadata of a pipeline and tensor rank, and for the time.

    The peer's client said how many ranks there are here. Asked for one that does not exist, the
    listener must go on listening; an empty answer fails that handshake.
    """
    pipeline, tensor = rank
    is_one = isinstance(pipeline, int) and isinstance(tensor, int)
    answer = shared.metadata_of(encoded, rank) if is_one else None
    shared.send_metadata(socket, identity, answer, rank, clock)
