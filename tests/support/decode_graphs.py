"""Steps of a model runner with CUDA graphs of decodes: which states does a replayed one read?

A graph reads the buffers that its layers' metadata was built in when it was captured. Runner,
dispatcher and builders are the release's own. There is no GPU, so there is no graph: what it would
read is what lies in those buffers when the runner has decided to replay one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.support.decode_engine import DecodeEngine
from tests.support.harness import HarnessError, building
from tests.support.hybrid_engine import engine_of, speculate, states_of
from tests.support.release import since
from tests.support.step_rows import step, without_kernels

MAMBA2 = Mamba2AttentionMetadataBuilder
GDN = GDNAttentionMetadataBuilder

EARLIER = -7
"""What an earlier step left in the buffers."""


class Row(NamedTuple):
    """A request's part of a step.

    Attributes:
        computed: tokens of it that are computed already.
        prompt: tokens of its prompt.
        tokens: of the step, guesses among them.
        guesses: of the step.
    """

    computed: int
    prompt: int
    tokens: int = 1
    guesses: int = 0


class _Decided(Exception):  # noqa: N818 - no error
    """The runner has decided how a step runs; nothing runs it."""


class _Runner(GPUModelRunner):
    """One whose batch is made of rows. What it has nothing of is None, as what is switched off."""

    def __init__(self, rows: tuple[Row, ...], engine: DecodeEngine) -> None:
        config = engine.worker.vllm_config
        self.vllm_config, self.cache_config = config, config.cache_config
        self.model_config, self.parallel_config = config.model_config, config.parallel_config
        self.compilation_config = config.compilation_config
        self.observability_config = config.observability_config
        self.speculative_config = config.speculative_config
        self.kv_cache_config = engine.worker.kv_cache_config
        self.uniform_decode_query_len = 1 + config.num_speculative_tokens
        self.cudagraph_dispatcher = CudagraphDispatcher(config)
        self.cudagraph_dispatcher.initialize_cudagraph_keys(
            config.compilation_config.cudagraph_mode, self.uniform_decode_query_len
        )
        self.input_batch: Any = SimpleNamespace(
            num_reqs=len(rows),
            req_ids=[f"r{number}" for number in range(len(rows))],
            num_computed_tokens_cpu=np.array([row.computed for row in rows]),
            num_prompt_tokens=np.array([row.prompt for row in rows]),
            lora_id_to_lora_request={},
        )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of each kind
        """What the release asks for, and such a step needs not."""

    def _update_states(self, *_: Any) -> None:  # noqa: ANN401 - as in the class
        """They are those of the step."""

    def _prepare_inputs(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401 - as in the class
        """What the model reads is not looked at."""
        return (None,) * (3 if since("0.28.0") else 2)

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        raise _Decided(super()._determine_batch_execution_and_padding(*args, **kwargs)[0])

    def replays(self, rows: tuple[Row, ...]) -> bool:
        """Whether it replays a whole graph for its batch."""
        told = SchedulerOutput.make_empty()
        told.num_scheduled_tokens = {f"r{n}": row.tokens for n, row in enumerate(rows)}
        told.total_num_scheduled_tokens = sum(row.tokens for row in rows)
        told.scheduled_spec_decode_tokens = {
            f"r{n}": [0] * row.guesses for n, row in enumerate(rows) if row.guesses
        }
        try:
            self.execute_model(told)
        except _Decided as decided:
            return bool(decided.args[0] == CUDAGraphMode.FULL)
        raise HarnessError("a runner that decides nothing", "one that says how a step runs")


def with_graphs(guesses: int = 0) -> DecodeEngine:
    """An engine of a hybrid model that replays graphs for up to 8 requests that decode."""
    engine = engine_of(DecodeEngine, mode="none", guesses=guesses)
    config = engine.worker.vllm_config
    config.model_config.hf_text_config.mamba_chunk_size = 16
    if guesses:
        speculate(config, guesses)
    sizes = [(1 + guesses) * requests for requests in range(1, 9)]
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    config.compilation_config.cudagraph_capture_sizes = sizes
    config.compilation_config.max_cudagraph_capture_size = sizes[-1]
    return engine


def builder_of(layers: type[Any], engine: DecodeEngine) -> Any:  # noqa: ANN401 - one of `layers`
    """What makes the metadata of the engine's layers with states."""
    group = states_of(engine)
    config = engine.worker.vllm_config
    return layers(group.kv_cache_spec, group.layer_names, config, torch.device("cpu"))


def buffer_of(builder: Any) -> torch.Tensor:  # noqa: ANN401 - of each kind
    """Where a graph finds the blocks of each row."""
    buffer: torch.Tensor = (
        builder.state_indices_tensor_d
        if isinstance(builder, MAMBA2)
        else builder.spec_state_indices_tensor
        if builder.use_spec_decode
        else builder.non_spec_state_indices_tensor
    )
    return buffer.view(len(buffer), -1)


@building("what layers with states are told of a step")
def graph_reads(
    layers: type[GDNAttentionMetadataBuilder | Mamba2AttentionMetadataBuilder],
    *rows: Row,
    guesses: int = 0,
) -> list[int] | None:
    """Whose state, row by row, a replayed graph reads; None where none is replayed.

    They should be 1, 2, and so on: the number of the row. `EARLIER` is of an earlier step.

    Args:
        layers: the builder of their metadata.
        rows: in the order of the batch.
        guesses: that a request may have at most.
    """
    engine = with_graphs(guesses)
    if not _Runner(rows, engine).replays(rows):
        return None
    builder = builder_of(layers, engine)
    buffer = buffer_of(builder).fill_(EARLIER)
    told: dict[str, torch.Tensor] = {}
    if any(row.guesses for row in rows):
        drafts = [row.guesses if row.tokens == 1 + row.guesses > 1 else -1 for row in rows]
        told["num_accepted_tokens"] = torch.ones(len(rows), dtype=torch.int32)
        told["num_decode_draft_tokens_cpu"] = torch.tensor(drafts, dtype=torch.int32)
    rows_told = ((row.computed, row.tokens, row.computed < row.prompt) for row in rows)
    common = step(*rows_told, columns=1 + guesses)
    with without_kernels(builder):
        builder.build(0, common, **told)
    owners = {int(block): n for n, block in enumerate(common.block_table_tensor[:, 0], start=1)}
    return [owners.get(int(block), EARLIER) for block in buffer[: len(rows), 0]]
