# SPDX-License-Identifier: Apache-2.0
"""From 0.21.0 on: with transfers in both directions D keeps KV for P of tokens that were answered.

D counts as computed what it guessed behind the end of an answer, if the model agreed, and under
asynchronous scheduling the last token. P's next prompt goes on with other tokens there. And of a
hybrid that guesses it named a state that may be after fewer tokens, or more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
)

from vllm_overlay.v1.kv_cache_interface import state_specs

if TYPE_CHECKING:
    from vllm.v1.request import Request

_Part = Any
"""NIXL's part of a scheduler: `NixlConnectorScheduler`, from 0.24.0 on the one that pulls."""

_OF_ENCODER = CrossAttentionSpec | EncoderOnlyAttentionSpec
"""Their blocks go by what was encoded."""


def keeps_nothing(scheduler: _Part, request: Request) -> bool:
    """Whether D has nothing for P of a request that it has answered.

    So where there are states and D guesses: a step leaves a state after each token that it
    computes, in slots of which the model runner alone knows which one the next step goes on from.
    The workers forget such a request, and one that was preempted before its last token came: of
    that the answer names no block, as on stock.
    """
    if (request.kv_transfer_params or {}).get("do_remote_decode"):
        return False
    states = state_specs(scheduler.kv_cache_config).values()
    guesses = any(spec.num_speculative_blocks for spec in states)
    if guesses or not request.num_computed_tokens:
        scheduler._reqs_not_processed.add(request.request_id)
    return guesses


def tokens_kept(scheduler: _Part, request: Request) -> int:
    """Return of how many tokens of a finished request there is KV that its reader can use.

    On D all but the last: a template may leave the end of an answer out of what P is sent next.
    With states as on stock: they are those after all that was computed, and of no fewer tokens. So
    with context ranks of prefills: how many tokens there are in one of their blocks differs by
    release.
    """
    asks = (request.kv_transfer_params or {}).get("do_remote_decode")
    several = scheduler.vllm_config.parallel_config.prefill_context_parallel_size > 1
    if asks or several or state_specs(scheduler.kv_cache_config):
        return request.num_computed_tokens
    return min(request.num_computed_tokens, request.num_tokens - 1)


def blocks_kept(scheduler: _Part, request: Request, block_ids: Any) -> Any:  # noqa: ANN401
    """Return a finished request's blocks, a list for each group, without those behind these tokens.

    Whoever reads them counts from the last one back.
    """
    tokens = tokens_kept(scheduler, request)
    if tokens == request.num_computed_tokens:
        return block_ids
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    ranks = scheduler.vllm_config.parallel_config.decode_context_parallel_size
    return tuple(
        ids
        if isinstance(spec, _OF_ENCODER)
        # From 0.30.0 on each context rank can have the whole of a group, such as a draft model's.
        else ids[: cdiv(tokens, spec.block_size * (ranks if _is_shared(spec) else 1))]
        for ids, spec in zip(block_ids, specs, strict=True)
    )


def _is_shared(spec: KVCacheSpec) -> bool:
    return bool(getattr(spec, "dcp_sharded", True))
