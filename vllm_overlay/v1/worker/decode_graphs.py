# SPDX-License-Identifier: Apache-2.0
"""All releases: of a model with states, graphs of decodes are replayed for decodes alone.

The runner knows a step of decodes by its shape: each request has one token and as many guesses as
it may have at most. Part of a prompt may have that many tokens, too. Layers with states take it for
what it is, and tell their graph of its blocks only in steps without one: replayed for a prompt, it
reads and writes the states of an earlier step, and the prompt's own are never made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import MambaSpec

from vllm_overlay.v1.kv_cache_interface import is_made_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def decodes_alone(runner: GPUModelRunner, step: SchedulerOutput) -> bool | None:
    """Whether the runner may take a step for one of decodes: False, or None where the shape says.

    A row is a decode if it is a token and its request's guesses, and the request has a state: the
    last token of a received prompt is one, its first token is none.

    Args:
        runner: its batch is that of the step.
        step: with at least one token.
    """
    groups = runner.kv_cache_config.kv_cache_groups
    if not any(is_made_of(group.kv_cache_spec, MambaSpec) for group in groups):
        return None  # attention over a prompt and over guesses is the same
    batch = runner.input_batch
    guesses = sum(map(len, step.scheduled_spec_decode_tokens.values()))
    if step.total_num_scheduled_tokens != batch.num_reqs + guesses:
        return False
    return None if batch.num_computed_tokens_cpu[: batch.num_reqs].all() else False
