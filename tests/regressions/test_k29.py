"""K29: of what was in a received request's blocks before, nothing is left.

All of D's cache is NaN, as states may leave it. A prompt is received from a P that has another
number of kernel blocks in a logical block, as other tensor ranks or another --block-size make it.
When the request runs, no NaN is left where its attention layers will look.

Scheduler and worker are joined, for either may zero: up to 0.25.1 the scheduler names each block
that is given out, from 0.27.0 on the worker zeroes what a read has not reached. The engine here
zeroes what the scheduler names before anything arrives; for the other order there is 48481.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec

from tests.support import decode_engine
from tests.support.decode_engine import DecodeEngine
from tests.support.harness import HarnessError
from tests.support.hybrid_engine import states
from tests.support.kv_landing import Deployment, Engines
from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    EngineDiedError,
    GroupKind,
    MismatchError,
    nixl_of,
    states_in,
)
from tests.support.release import since

RATIOS = [(6, 10), (10, 6), (1, 4), (4, 3), (4, 4)]
"""Kernel blocks in a logical block of P and of D."""

LATENT_RATIOS = RATIOS if since("0.23.0") else []
"""Before, no engine starts: NIXL takes states of two parts, and Kimi's have four."""

KERNEL = 16
"""Tokens of a kernel block. By that blocks differ in size, so much 48481 relies on."""

LENGTHS = [9, 80, 96, 150, 177, 241]
"""Of prompts, in tokens."""

SEQUENCE = 960
"""Tokens for which there is one state: a multiple of all sizes of blocks."""

PAIRED = since("0.22.0")
"""Before, a stock D takes some of P's blocks for others where the numbers differ, or fails or ends
over them; up to 0.19.1 a patched one does too (42097). What it receives then has no NaN either."""

STATE = 7.0
"""What P's states hold."""


class Decode(DecodeEngine):
    """D over its worker of `engines`; it zeroes what it is told to, and receives, at once."""

    def __init__(self, engines: Engines) -> None:
        def scheduler(**words: Any) -> Scheduler:  # noqa: ANN401 - handed on
            return Scheduler(**words | {"block_size": SEQUENCE})  # as the engine core chooses it

        with (
            mock.patch.object(decode_engine, "make_worker", lambda **_: engines.decode),
            mock.patch.object(decode_engine, "Scheduler", scheduler),
        ):
            super().__init__(
                groups=engines.deployment.groups,
                block_size=engines.deployment.decode_block,
                num_blocks=engines.decode._logical_num_blocks,
            )

    def _start(self, decided: SchedulerOutput) -> None:
        ratio = self.worker._physical_blocks_per_logical_kv_block
        for kernel in kernel_blocks(decided.new_block_ids_to_zero or (), ratio):
            for cache in attention(self.worker):
                cache[kernel] = 0
        super()._start(decided)
        nixl = nixl_of(self.worker)
        for read in nixl.in_flight():
            try:
                nixl.move(read)
            except MismatchError:  # up to 0.19.1, see PAIRED
                nixl.fail(read)
            else:
                nixl.finish(read)


def attention(worker: NixlConnectorWorker) -> list[torch.Tensor]:
    """The caches of a hybrid's attention layers, with the kernel blocks first."""
    return [
        worker.device_kv_caches[name]
        for group in worker.kv_cache_config.kv_cache_groups
        if not isinstance(group.kv_cache_spec, MambaSpec)
        for name in group.layer_names
    ]


def states_of(worker: NixlConnectorWorker) -> list[torch.Tensor]:
    """All parts of a hybrid's states, with the blocks first."""
    return [
        part
        for group in worker.kv_cache_config.kv_cache_groups
        if isinstance(group.kv_cache_spec, MambaSpec)
        for name in group.layer_names
        for part in states_in(worker.device_kv_caches[name], group.kv_cache_spec)
    ]


def kernel_blocks(blocks: Sequence[int], ratio: int) -> list[int]:
    return [block * ratio + i for block in blocks for i in range(ratio)]


def is_paired(deployment: Deployment) -> bool:
    return PAIRED or deployment.prefill_ratio == deployment.decode_ratio


def receive(deployment: Deployment, tokens: int) -> str | list[str]:
    """Have D receive a prompt, and compute its last token.

    Returns:
        What is wrong in D's memory then; or, if D has not received it, what it did.
    """
    with states(SEQUENCE, mode="none"):
        engines = Engines(deployment, max_tokens=max(LENGTHS))
    try:
        engines.connect()
    except HarnessError:
        raise
    except (AssertionError, RuntimeError):
        return "refused"
    prefill, decode = engines.prefill, engines.decode
    block = deployment.kernel * deployment.prefill_ratio
    held = list(range(1, 1 + -(-tokens // block)))
    theirs, state = kernel_blocks(held, deployment.prefill_ratio), held[-1] + 1
    for cache in attention(prefill):
        for kernel in theirs:
            cache[kernel] = kernel
    for part in states_of(prefill):
        part[state] = STATE
    for cache in attention(decode):
        cache.fill_(torch.nan)

    engine = Decode(engines)
    engine.ask("req-d", range(tokens), [held, [state]], max_tokens=8)
    try:
        engine.step()
        allocated = engine.scheduler.kv_cache_manager.get_block_ids("req-d")
        then = engine.step().computed.get("req-d")
    except EngineDiedError:
        return "died"
    if then is None or then[0] < tokens - 1:
        return f"computed {then}"

    found = []
    read = kernel_blocks(allocated[0], deployment.decode_ratio)[: len(theirs)]
    has = engine.scheduler.kv_cache_manager.get_block_ids("req-d")
    looked_at = kernel_blocks(has[0], deployment.decode_ratio)
    for cache in attention(decode):
        if unread := [kernel for kernel in looked_at if cache[kernel].isnan().any()]:
            found.append(f"of {looked_at} these hold NaN: {unread}")
    if not is_paired(deployment):
        return found
    for cache in attention(decode):
        pairs = zip(read, theirs, strict=False)
        if wrong := [ours for ours, source in pairs if (cache[ours] != source).any()]:
            found.append(f"of {read} these are not what was read: {wrong}")
    if any((part[has[1][0]] != STATE).any() for part in states_of(decode)):
        found.append("the state is not what was read")
    return found


def wrong_of(
    ratios: list[tuple[int, int]], groups: tuple[GroupKind, ...], *, mla: bool = False
) -> dict[Any, Any]:
    """What is wrong, or was done instead, by ratios and length of the prompt."""
    wrong = {}
    for both in ratios:
        deployment = Deployment(*both, groups, KERNEL, mla=mla)
        for tokens in LENGTHS:
            found = receive(deployment, tokens)
            if found and (is_paired(deployment) or isinstance(found, list)):
                wrong[both, tokens] = found
    return wrong


def test_attention_beside_states() -> None:
    assert wrong_of(RATIOS, ("full", "mamba")) == {}


def test_a_latent_cache_beside_states() -> None:
    assert wrong_of(LATENT_RATIOS, ("full", "kda"), mla=True) == {}
