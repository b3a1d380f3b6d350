"""46424: a hybrid that caches all states of a prompt goes on from the right one, whoever guesses.

With a state for each block and speculation a step leaves a state for each of its tokens, in a block
each; which of them is the request's depends on how many guesses were right. Here nobody guesses in
the step after that: a prompt's last token, which D computes, or requests for which there is
no guess. The runner's method and the builder are the release's own; the kernels need a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from vllm.v1.attention.backends.mamba2_attn import (
    Mamba2AttentionBackend,
    Mamba2AttentionMetadataBuilder,
)
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from tests.support.decode_engine import DecodeEngine
from tests.support.harness import building
from tests.support.hybrid_engine import engine_of, speculate, states_of
from tests.support.release import since
from tests.support.step_rows import without_kernels

GUESSES = 3
BLOCK = 16

EACH = since("0.22.0") and not since("0.32.0")
"""Whether D can speculate and keep a state for each block. Before, no layer looks for one that was
accepted there; after, there is no such cache."""

MODES = ["all"] if EACH else ["none"] if since("0.19.0") else []
"""Before 0.19.0 no Mamba-2 layer takes a step without guesses, whatever is cached."""


class Row(NamedTuple):
    """A request's part of a step, and what the one before left of it."""

    computed: int
    prompt: int
    tokens: int = 1
    last: int = -1
    """The block with the first state of the step before; -1 where that had no guesses of it."""
    accepted: int = 1
    """Tokens of the step before that are the request's."""


class Buffer:
    """A tensor for each device, which are one here; older releases ask for it as `gpu`."""

    def __init__(self, values: list[int]) -> None:
        self.cpu = self.gpu = torch.tensor(values, dtype=torch.int32)
        self.np = self.cpu.numpy()

    def copy_to_gpu(self) -> None:
        """They are one."""

    def __getitem__(self, part: slice) -> torch.Tensor:
        return self.gpu[part]


class Runner(GPUModelRunner):
    """One whose batch is `rows`. What it has nothing of is None, as what is switched off."""

    def __init__(self, rows: tuple[Row, ...], group: Any, builder: Any) -> None:  # noqa: ANN401
        config = builder.vllm_config
        self.rows, self.cache_config, self.model_config = rows, config.cache_config, mock.Mock()
        self.model_config.rswa_window = None
        self.speculative_config, self.drafter = config.speculative_config, None
        self.device, self.dcp_world_size = torch.device("cpu"), 1
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
        layers = AttentionGroup(
            backend=Mamba2AttentionBackend,
            layer_names=group.layer_names,
            kv_cache_spec=group.kv_cache_spec,
            kv_cache_group_id=0,
            metadata_builders=[builder],
        )
        self.attn_groups = [[layers]]
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + row.tokens)
        self.query_start_loc = Buffer(starts)
        self.seq_lens = Buffer([row.computed + row.tokens for row in rows])
        self.optimistic_seq_lens_cpu = self.seq_lens.cpu
        self.positions = Buffer([0] * starts[-1])
        self.num_accepted_tokens = Buffer([row.accepted for row in rows])
        self.num_decode_draft_tokens = Buffer([-1] * len(rows))
        if config.cache_config.mamba_cache_mode == "all":
            self.mamba_prev_last_scheduled_idx = Buffer([row.last for row in rows])
        table = SimpleNamespace(get_device_tensor=lambda _: blocks_of(rows))
        computed, prompts = (
            torch.tensor([getattr(row, name) for row in rows], dtype=torch.int32)
            for name in ("computed", "prompt")
        )
        self.input_batch = SimpleNamespace(
            num_computed_tokens_cpu_tensor=computed,
            num_prompt_tokens_cpu_tensor=prompts,
            num_prompt_tokens=prompts.numpy(),
            num_accepted_tokens_cpu=self.num_accepted_tokens.np,
            block_table=[table],
        )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of each kind
        """What the release asks for, and a step of these rows needs not."""


def blocks_of(rows: tuple[Row, ...]) -> torch.Tensor:
    """The table: 100 is the first block of the first request, 201 the second of the next one."""
    return torch.tensor([[100 * (n + 1) + i for i in range(12)] for n in range(len(rows))]).int()


@building("what the mixer of a Mamba-2 layer is told of a step")
def metadata(mode: str, rows: tuple[Row, ...]) -> Any:  # noqa: ANN401 - the release's class
    """Have the runner make it of a step in which nobody guesses."""
    engine = engine_of(DecodeEngine, mode=mode, guesses=GUESSES)
    config = engine.worker.vllm_config
    config.cache_config.mamba_cache_mode = mode
    config.model_config.hf_text_config.mamba_chunk_size = 16
    speculate(config, GUESSES)
    group = states_of(engine)
    builder = Mamba2AttentionMetadataBuilder(
        group.kv_cache_spec, group.layer_names, config, torch.device("cpu")
    )
    tokens = sum(row.tokens for row in rows)
    with without_kernels(builder):
        told, _ = Runner(rows, group, builder)._build_attention_metadata(
            num_tokens=tokens,
            num_reqs=len(rows),
            max_query_len=max(row.tokens for row in rows),
            slot_mappings={0: torch.zeros(tokens, dtype=torch.int64)},
        )
    return told[group.layer_names[0]]


def read(mode: str, *rows: Row) -> list[int] | str:
    """From which block each row's state is read, as the mixer goes by what it is told."""
    told = metadata(mode, rows)
    each = mode == "all"
    blocks = []
    for number in range(len(rows)):
        prompt = number - told.num_decodes
        column = 0
        if prompt >= 0:
            table = told.state_indices_tensor_p[prompt]
            if each:
                column = int(told.block_idx_last_computed_token[number])
        else:
            table = told.state_indices_tensor_d[number]
            if each:
                if told.block_idx_last_scheduled_token_prev_step is None:
                    return "the mixer knows of no block, and the engine ends"
                column = int(told.block_idx_last_scheduled_token_prev_step[number])
            if told.num_accepted_tokens is not None:
                column += int(told.num_accepted_tokens[number]) - 1
        blocks.append(int(table.reshape(-1)[column]))
    return blocks


@pytest.mark.parametrize("received", [BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1])
def test_a_received_prompt_is_gone_on_with(received: int) -> None:
    """D computes its last token, and nobody guesses."""
    row = Row(received, received + 1)
    for mode in MODES:
        column = (received - 1) // BLOCK if mode == "all" else 0
        assert read(mode, row) == [100 + column]
        assert read(mode, row, row) == [100 + column, 200 + column]


@pytest.mark.parametrize("accepted", range(1, GUESSES + 2))
def test_beside_it_runs_who_guessed_rightly_before(accepted: int) -> None:
    received = Row(2 * BLOCK + 1, 2 * BLOCK + 2)
    runs = Row(2 * BLOCK + 4 + accepted, 20, last=2, accepted=accepted)
    if EACH:
        assert read("all", runs) == [102 + accepted - 1]
        assert read("all", runs, received) == [102 + accepted - 1, 202]


def test_who_did_not_guess_before_goes_on_from_the_last_block() -> None:
    if EACH:
        assert read("all", Row(2 * BLOCK, 20), Row(2 * BLOCK + 1, 20)) == [101, 202]


def test_what_a_preempted_request_computes_again_is_as_a_prompt() -> None:
    """Its tokens are no guesses: the state after all of them is the one that is kept."""
    runs = Row(2 * BLOCK + 4, 20, last=2, accepted=2)
    again = Row(2 * BLOCK, 20, tokens=GUESSES)
    if EACH:
        assert read("all", runs, again) == [103, 201]
        assert metadata("all", (runs, again)).num_decodes == 1
