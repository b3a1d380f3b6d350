# SPDX-License-Identifier: Apache-2.0
"""Up to 0.24.0: all data-parallel ranks run the drafter in a step, or none does.

Ranks agree on the size of each pass of a drafter, and its experts are spread over all of them. A
rank with a request that is within a few tokens of the model's length does not draft, and went on
without the others, which wait for it for ever: every request of every rank hangs, and P keeps the
blocks of those that were to be received.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def drafts_with_others(runner: GPUModelRunner, fits: bool) -> None:
    """Take part in the drafter's passes where this rank does not draft.

    It is what an idle rank does: a pass over a token of nobody, without metadata and slots, so
    nothing is written to the KV cache. The pass is as long as the others' (PR 40589, in 0.25.0).

    Args:
        runner: after it has sampled, before it drafts.
        fits: whether there is room for guesses behind each request of the step, and it drafts.
    """
    if fits or runner.parallel_config.data_parallel_size == 1:
        return
    config: Any = runner.speculative_config
    if config.use_eagle() or config.uses_draft_model() or config.uses_extract_hidden_states():
        drafter: Any = runner.drafter
        drafter.dummy_run(num_tokens=1)
