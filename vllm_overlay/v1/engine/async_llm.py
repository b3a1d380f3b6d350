# SPDX-License-Identifier: Apache-2.0
"""All releases: how the engine client tells the engine core about a rejected request."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import peer_problem
from vllm_overlay.v1.engine.admission import has_given_up
from vllm_overlay.v1.engine.stand_in import (
    make_stand_in,
    stand_in_id,
    takes_stand_ins,
    transfer_config,
)

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = init_logger(f"vllm.{__name__}")

ANSWER_TIMEOUT = 60
"""Seconds that all engine cores together have to answer; they do so between two steps."""

AGAIN = 60
"""Seconds after which engine cores of which one cannot answer are asked again."""


class AsyncKVTransferNotifier:
    """A base for `AsyncLLM` where upstream's has nothing of the kind: it can tell.

    Every other engine client has `vllm_overlay.engine.protocol.KVTransferNotifier`, and cannot.
    """

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        """Have the prefill server told that nobody will read, if nobody does; see `_release`.

        With a connector that is not known to take a stand-in: nothing. And nothing on a stranger's
        word. Stock has no such method here; a program that looks for it, as the servicer of vLLM's
        gRPC server does, calls it after a fault and for a client that left as well. What is sent
        again then has to find the blocks, on any server.
        """
        engine = cast("AsyncLLM", self)

        async def send(name: str, params: dict[str, Any], *, data_parallel_rank: int) -> None:
            stand_in = make_stand_in(name, params, data_parallel_rank)
            await engine.engine_core.add_request_async(stand_in)

        known = takes_stand_ins(engine.vllm_config.kv_transfer_config)
        if known and has_given_up(kv_transfer_params):
            await _release(engine, send, request_id, kv_transfer_params, data_parallel_rank)


def claims_first(
    notify: Callable[..., Awaitable[None]],
) -> Callable[..., Awaitable[None]]:
    """Have `AsyncLLM` send its own stand-in only if nobody reads, to connectors that take ours.

    What is to be in a stand-in differs from release to release: upstream's has it.
    """

    @functools.wraps(notify)
    async def wrapper(
        self: AsyncLLM,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        send = functools.partial(notify, self)
        if takes_stand_ins(transfer_config(self)):
            await _release(self, send, request_id, kv_transfer_params, data_parallel_rank)
        else:
            await send(request_id, kv_transfer_params, data_parallel_rank=data_parallel_rank)

    return wrapper


async def _release(
    engine: AsyncLLM,
    send: Callable[..., Awaitable[None]],
    name: str,
    params: dict[str, Any],
    rank: int | None,
) -> None:
    """`send` an engine core a stand-in for the rejected request, to be aborted at once.

    The engine core that gets it uses it only if no other request of its own uses the same blocks
    (K11). One of several does not know what the others have, so all of them have to agree first.
    Which of them tells the prefill server is of no matter to that, so in place of a rank that does
    not exist (perhaps the very reason for the rejection), or of none, the first takes it: one that
    is named does not count where requests are balanced over all.

    Raises:
        EngineDeadError: the engine core is gone.
    """
    if (problem := peer_problem(params)) is not None:
        logger.debug("The prefill server of a rejected request cannot be told: %s.", problem)
        return
    stand_in = stand_in_id(name)
    if not await _nobody_else_reads(engine, params, stand_in):
        return
    await send(stand_in, params, data_parallel_rank=_existing_rank(engine, rank))
    count(Acted.REJECTION_PASSED_ON)


async def _nobody_else_reads(engine: AsyncLLM, params: dict[str, Any], claimant: str) -> bool:
    """Whether every engine core that this client sends requests to grants `claimant` the blocks."""
    client: Any = engine.engine_core  # of its kinds only those for several engine cores have these
    cores = getattr(client, "core_engines", ())
    if len(cores) < 2:
        return True
    if time.monotonic() < getattr(client, "kv_transfer_ungranted_until", 0.0):
        return False
    claim = (params["remote_engine_id"], params["remote_request_id"], claimant)
    asked = asyncio.gather(
        *(client._call_utility_async("claim_kv_transfer", *claim, engine=core) for core in cores)
    )
    try:
        return all(await asyncio.wait_for(asked, ANSWER_TIMEOUT))
    except (asyncio.TimeoutError, EngineDeadError):
        raise
    except Exception as error:
        # An engine core without this method (another build, on another node) will not have it soon.
        # The others would turn away requests that are sent again, for nothing.
        client.kv_transfer_ungranted_until = time.monotonic() + AGAIN
        logger.warning(
            "An engine core cannot say whether a rejected request's KV blocks are in use (%s). "
            "For %d s such blocks stay until the prefill server's own timeout.",
            error,
            AGAIN,
        )
        return False


def _existing_rank(engine: AsyncLLM, rank: int | None) -> int:
    parallel = engine.vllm_config.parallel_config
    ranks = (
        parallel.data_parallel_size_local
        if parallel.local_engines_only
        else parallel.data_parallel_size
    )
    return rank if rank is not None and 0 <= rank < ranks else 0
