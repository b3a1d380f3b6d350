"""Engines of a hybrid model that keep its recurrent states as vLLM does."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar
from unittest import mock

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

from tests.support import decode_engine, nixl_worker, prefill_engine
from tests.support.decode_engine import DecodeEngine

WHOLE = 4096
"""More tokens than a sequence has."""

_Engine = TypeVar("_Engine", bound=DecodeEngine)


def states(
    tokens: int, *, mode: str, guesses: int = 0, exports: bool = False
) -> AbstractContextManager[object]:
    """Have the harness make blocks of recurrent states for so many tokens.

    Args:
        tokens: after which there is another state, or room for one.
        mode: see `engine_of`.
        guesses: for each of which a sequence has a block more.
        exports: see `engine_of`.
    """
    plain = nixl_worker._spec
    more = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}

    def spec(*args: Any) -> Any:  # noqa: ANN401 - as the function that it stands before
        made = plain(*args)
        if not isinstance(made, MambaSpec):
            return made
        return dataclasses.replace(
            made,
            block_size=tokens,
            num_speculative_blocks=guesses,
            mamba_cache_mode=mode,
            **(more if exports else {}),
        )

    return mock.patch.object(nixl_worker, "_spec", spec)


def engine_of(
    kind: type[_Engine],
    *,
    mode: str,
    guesses: int = 0,
    drafts: bool = False,
    exports: bool = False,
    **config: Any,  # noqa: ANN401 - of `kind`
) -> _Engine:
    """An engine of a hybrid model.

    Args:
        kind: of the engine.
        mode: "none", one slot for the whole sequence; "align", a slot for each block of tokens, of
            which the last is kept; "all", which keeps each.
        guesses: tokens that it guesses in a step.
        drafts: the scheduler knows of that, and that a draft model guesses them.
        exports: the layers export a state from within a step, as from 0.30.0 on some do.
        config: further arguments of `kind`; with `prefix_caching`, prefixes of states too.
    """
    tokens = WHOLE if mode == "none" else 16
    plain_worker = nixl_worker.make_worker

    def worker(**words: Any) -> Any:  # noqa: ANN401 - see above
        made = plain_worker(**words)
        if words["prefix_caching"]:
            made.vllm_config.cache_config.mamba_cache_mode = mode
        if drafts:
            speculate(made.vllm_config, guesses, drafts=True)
        return made

    def largest(scheduler: type[Scheduler], **words: Any) -> Scheduler:  # noqa: ANN401 - see above
        return scheduler(**words | {"block_size": tokens})  # as the engine core chooses it

    with (
        states(tokens, mode=mode, guesses=guesses, exports=exports),
        mock.patch.object(decode_engine, "make_worker", worker),
        mock.patch.object(decode_engine, "Scheduler", partial(largest, Scheduler)),
        mock.patch.object(prefill_engine, "AsyncScheduler", partial(largest, AsyncScheduler)),
    ):
        return kind(groups=("full", "mamba"), **config)


def states_of(engine: DecodeEngine) -> KVCacheGroupSpec:
    """The group of layers that keep states."""
    groups = engine.worker.kv_cache_config.kv_cache_groups
    [group] = [one for one in groups if isinstance(one.kv_cache_spec, MambaSpec)]
    return group


def speculate(config: VllmConfig, guesses: int, *, drafts: bool = False) -> None:
    """Have what is made of a configuration guess so many tokens, in a way that needs no model.

    With `drafts` it says that a draft model of its own guesses them, which is none that is looked
    for.
    """
    config.speculative_config = SpeculativeConfig(
        method="ngram",
        prompt_lookup_max=2,
        num_speculative_tokens=guesses,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    if drafts:
        config.speculative_config.method = "mtp"
