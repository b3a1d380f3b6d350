"""The step of a data-parallel rank with a drafter, as its model runner ends it.

The method is the release's; what it calls to compute, sample and keep books is recorded.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

from tests.support.harness import building

GUESSES = 3
"""Speculative tokens."""

LENGTH = 100
"""Of the model, in tokens."""


class DraftingRank:
    """A rank, and what its drafter did.

    Attributes:
        drafted: passes with guesses for the rank's requests.
        joined: passes with tokens of nobody.
    """

    @building("a rank with a drafter")
    def __init__(self, *, ranks: int = 2, padded: bool = True, method: str = "eagle") -> None:
        self.runner: Any = mock.MagicMock()
        runner = self.runner
        runner.parallel_config.data_parallel_size = ranks
        runner.use_async_scheduling = False
        runner.valid_sampled_token_count_event = None
        runner.routed_experts_initialized = False
        runner.device = "cpu"
        runner.num_spec_tokens, runner.effective_drafter_max_model_len = GUESSES, LENGTH
        runner.input_batch.req_ids = ["req"]
        books = get_args(GPUModelRunner._bookkeeping_sync.__annotations__["return"])
        runner._bookkeeping_sync.return_value = (None,) * len(books)
        runner.drafter = mock.MagicMock(spec=EagleProposer)
        if hasattr(GPUModelRunner, "_input_fits_in_drafter"):  # from 0.23.0 on
            runner._input_fits_in_drafter = lambda told: GPUModelRunner._input_fits_in_drafter(
                runner, told
            )
        config = runner.speculative_config
        config.disable_padded_drafter_batch = not padded
        config.use_eagle.return_value = method == "eagle"
        config.uses_draft_model.return_value = method == "draft_model"
        config.uses_extract_hidden_states.return_value = method == "extract_hidden_states"
        config.use_ngram_gpu.return_value = False
        config.use_dflash.return_value = False

    def step(self, length: int) -> None:
        """End a step in which the longest request has so many tokens."""
        told = SimpleNamespace(max_seq_len=length)
        fields = dict.fromkeys(ExecuteModelState._fields, mock.MagicMock())
        self.runner.execute_model_state = ExecuteModelState(
            **fields | {"spec_decode_common_attn_metadata": told}
        )
        GPUModelRunner.sample_tokens(self.runner, None)

    @property
    def drafted(self) -> int:
        count: int = self.runner.propose_draft_token_ids.call_count
        return count

    @property
    def joined(self) -> int:
        count: int = self.runner.drafter.dummy_run.call_count
        return count
