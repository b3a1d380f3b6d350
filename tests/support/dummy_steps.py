"""Dummy steps of an idle rank: which blocks does a replayed graph of decodes write states into?

The runner's batch, the metadata of the step and the builders are the release's own, and so is the
dummy step up to where the model would run. There is no GPU, so there is no graph: what it would
read is what lies in the builder's buffers then.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.sampling_params import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from tests.support.decode_graphs import buffer_of, builder_of, with_graphs
from tests.support.harness import building
from tests.support.hybrid_engine import states_of
from tests.support.release import since
from tests.support.step_rows import without_kernels

CPU = torch.device("cpu")
ROOM = 8
"""Requests that fit into a batch."""

NOBODYS = {0, -1}
"""No request's block: the null block, and up to 0.19.1 what padded rows name."""


class _Told(Exception):  # noqa: N818 - no error
    """The layers have been told of the step; nothing runs it."""


class IdleRank(GPUModelRunner):
    """A rank whose requests come and leave. What it has nothing of is None, as what is off."""

    @building("a model runner with a batch")
    def __init__(self, layers: type[Any], *, guesses: int = 0) -> None:
        engine = with_graphs(guesses)
        config = engine.worker.vllm_config
        config.scheduler_config.max_num_seqs = ROOM
        self.vllm_config, self.cache_config = config, config.cache_config
        self.model_config, self.parallel_config = config.model_config, config.parallel_config
        self.compilation_config = config.compilation_config
        self.scheduler_config = config.scheduler_config
        self.speculative_config = config.speculative_config
        self.kv_cache_config = engine.worker.kv_cache_config
        self.device, self.dcp_world_size = CPU, 1
        self.max_num_tokens, self.max_model_len = 64, 64
        self.uniform_decode_query_len = 1 + guesses
        self.arange_np = np.arange(64)
        self.positions = torch.zeros(64, dtype=torch.int64)
        self.query_start_loc, self.query_pos = _buffer(1 + ROOM), _buffer(64)
        self.optimistic_seq_lens_cpu = torch.zeros(ROOM, dtype=torch.int32)
        self.seq_lens: Any = (
            torch.zeros(ROOM, dtype=torch.int32) if since("0.19.0") else _buffer(ROOM)
        )
        self.num_accepted_tokens = _buffer(ROOM)
        self.num_decode_draft_tokens = _buffer(ROOM)
        self.num_decode_draft_tokens.np.fill(-1)  # as a step leaves it in which nobody guessed
        self.input_batch = _batch(len(self.kv_cache_config.kv_cache_groups))
        group = states_of(engine)
        self._group = self.kv_cache_config.kv_cache_groups.index(group)
        self.builder = builder_of(layers, engine)
        for name in group.layer_names:  # of which 51565 zeroes a first token's states
            layer = SimpleNamespace(kv_cache=[torch.zeros(64)])
            config.compilation_config.static_forward_context[name] = layer
        self.attn_groups: Any = [[] for _ in self.kv_cache_config.kv_cache_groups]
        self.attn_groups[self._group] = [
            AttentionGroup(
                backend=Mamba2AttentionBackend,  # nobody asks it
                layer_names=group.layer_names,
                kv_cache_spec=group.kv_cache_spec,
                kv_cache_group_id=self._group,
                metadata_builders=[self.builder],
            )
        ]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of each kind
        """What the release asks for, and such a step needs not."""

    def _determine_batch_execution_and_padding(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """As the other ranks have it."""
        return CUDAGraphMode.FULL, self._width, False, None, None

    def _get_slot_mappings(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401 - as in the class
        """Layers with states have none."""
        groups = range(len(self.kv_cache_config.kv_cache_groups))
        return {number: torch.zeros(64, dtype=torch.int64) for number in groups}, {}

    def maybe_dummy_run_with_lora(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401 - as in the class
        """Where the model would run."""
        raise _Told

    @building("a step of requests")
    @mock.patch("vllm.v1.utils.PIN_MEMORY", new=False, create=True)  # it would want a device
    def step(self, **requests: tuple[int, int, int]) -> None:
        """Compute a step of these requests, and let all others leave.

        Args:
            requests: tokens of each that are computed before, those of its prompt, and the block of
                its state.
        """
        batch = self.input_batch
        for gone in batch.req_id_to_index.keys() - requests:
            batch.remove_request(gone)
        for name, (computed, prompt, block) in requests.items():
            if name in batch.req_id_to_index:
                batch.num_computed_tokens_cpu[batch.req_id_to_index[name]] = computed
                continue
            blocks = [[block] for _ in self.attn_groups]
            batch.add_request(_request(name, computed, prompt, blocks))
        batch.condense()
        batch.refresh_metadata()
        batch.block_table.commit_block_table(len(requests))

    def told(self, block: int) -> None:
        """Have an earlier step leave this block in what the graph reads, in each row."""
        for name, buffer in vars(self.builder).items():
            if "state_indices" in name and buffer is not None:
                buffer.fill_(block)

    @building("a dummy step")
    @mock.patch("vllm.v1.utils.PIN_MEMORY", new=False, create=True)
    def writes(self, rows: int) -> set[int]:
        """Take a dummy step for a graph of so many requests; blocks that the graph writes into."""
        tokens = self.uniform_decode_query_len
        self._width = BatchDescriptor(rows * tokens, num_reqs=rows, uniform=True)
        try:
            with without_kernels(self.builder):
                self._dummy_run(tokens, uniform_decode=True)
        except _Told:
            pass
        return set(buffer_of(self.builder)[:rows].flatten().tolist())


def _buffer(size: int) -> CpuGpuBuffer:
    return CpuGpuBuffer(size, dtype=torch.int32, device=CPU, pin_memory=False)


def _batch(groups: int) -> InputBatch:
    """An empty one for so many KV-cache groups."""
    words = {
        "max_num_reqs": ROOM,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
        "device": CPU,
        "pin_memory": False,
        "vocab_size": 64,
        "block_sizes": [16] * groups,
        "kernel_block_sizes": [16] * groups,
        "max_num_blocks_per_req": [cdiv(64, 16)] * groups,
        "logitsprocs": LogitsProcessors(),
    }
    known = inspect.signature(InputBatch).parameters
    return InputBatch(**{name: value for name, value in words.items() if name in known})


def _request(
    name: str, computed: int, prompt: int, blocks: Sequence[list[int]]
) -> CachedRequestState:
    """One with an output token for each that is computed behind the prompt, and one more."""
    fields = {
        "req_id": name,
        "prompt_token_ids": [1] * prompt,
        "mm_features": [],
        "sampling_params": SamplingParams(temperature=0),
        "generator": None,
        "block_ids": tuple(blocks),
        "num_computed_tokens": computed,
        "output_token_ids": [1] * max(0, computed + 1 - prompt),
    }
    known = {field.name for field in dataclasses.fields(CachedRequestState)}
    return CachedRequestState(**{k: v for k, v in fields.items() if k in known})
