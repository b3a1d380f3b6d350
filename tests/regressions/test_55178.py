"""55178: a hybrid's D that guesses goes on from the state of the prompt, whoever runs beside it.

A prompt's last token is computed on D, from the state before it. Beside a running request it comes
with as many places for guesses as that one has; what is in them is not of the prompt, and its
effect on a state cannot be taken back. Scheduler and metadata are the release's own; the kernels
need a GPU: those for prompts keep the state after all tokens of a row, those for guesses keep the
state after each, and the one after what was accepted is gone on with.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import SpeculativeConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import mamba_attn
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.core.sched.output import SchedulerOutput

from tests.support.decode_engine import DecodeEngine
from tests.support.harness import building
from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import connect, nixl_of, peer_port
from tests.support.prefill_engine import PrefillEngine

PROMPT = range(1000, 1040)


def received(engine: DecodeEngine, guesses: int) -> None:
    """Let D receive a prompt, all but its last token, from a P that guesses alike."""
    p = engine_of(PrefillEngine, mode="none", guesses=guesses)
    p.prefill("joins", PROMPT)
    p.run(4)
    params = p.answers["joins"]
    assert params is not None
    params.pop("remote_lease", None)  # nobody listens there
    from_p = {"remote_engine_id": "P", "remote_host": "127.0.0.1", "remote_port": peer_port("P")}
    to_d = {"do_remote_prefill": True, "do_remote_decode": False}
    engine.send("joins", PROMPT, params | from_p | to_d, max_tokens=50)
    engine.step()
    nixl_of(engine.worker).finish(*nixl_of(engine.worker).reads)
    engine.step()


def decided(guesses: int, beside: int) -> tuple[DecodeEngine, SchedulerOutput]:
    """The step in which D computes the last token of a received prompt, beside so many others."""
    engine = engine_of(DecodeEngine, mode="none", guesses=guesses)
    engine.guess(guesses)
    connect(engine.worker, "P")
    for number in range(beside):
        engine.ask(f"runs-{number}", range(100 * number, 100 * number + 20), max_tokens=50)
    engine.step()
    received(engine, guesses)
    return engine, engine.scheduler.schedule()


@building("what the mixer of a Mamba-2 layer is told of a step")
def metadata(engine: DecodeEngine, step: SchedulerOutput, guesses: int) -> tuple[list[str], Any]:
    """Make it as the model runner does, with those that decode first.

    Returns:
        the requests in the order of the batch, and the metadata.
    """
    requests = engine.scheduler.requests
    rows = sorted(step.num_scheduled_tokens, key=lambda req_id: req_id == "joins")
    queries = [step.num_scheduled_tokens[row] for row in rows]
    # The scheduler has counted them already.
    computed = [requests[row].num_computed_tokens - n for row, n in zip(rows, queries, strict=True)]
    ends = [done + n for done, n in zip(computed, queries, strict=True)]
    drafts = [len(step.scheduled_spec_decode_tokens.get(row, ())) for row in rows]
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    prompts = [requests[row].num_prompt_tokens for row in rows]
    fields: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor(ends, dtype=torch.int32),
        "_seq_lens_cpu": torch.tensor(ends, dtype=torch.int32),
        "seq_lens_cpu_upper_bound": torch.tensor(ends, dtype=torch.int32),
        "_num_computed_tokens_cpu": torch.tensor(computed, dtype=torch.int32),
        "num_reqs": len(rows),
        "num_actual_tokens": sum(queries),
        "max_query_len": max(queries),
        "max_seq_len": max(ends),
        "block_table_tensor": torch.arange(1, 1 + 4 * len(rows), dtype=torch.int32).view(-1, 4),
        "slot_mapping": torch.zeros(sum(queries), dtype=torch.int64),
        "is_prefilling": torch.tensor(
            [n < all_ for n, all_ in zip(computed, prompts, strict=True)]
        ),
    }
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    config = engine.worker.vllm_config
    config.model_config.hf_text_config.mamba_chunk_size = 16
    config.speculative_config = SpeculativeConfig(
        method="ngram",  # one that needs no second model
        prompt_lookup_max=2,
        num_speculative_tokens=guesses,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    [group] = [
        g for g in engine.worker.kv_cache_config.kv_cache_groups if "group1" in g.layer_names[0]
    ]
    builder = Mamba2AttentionMetadataBuilder(
        group.kv_cache_spec, group.layer_names, config, torch.device("cpu")
    )
    told = {
        "num_accepted_tokens": torch.ones(len(rows), dtype=torch.int32),
        "num_decode_draft_tokens_cpu": torch.tensor(
            [n if n and n + 1 == q else -1 for n, q in zip(drafts, queries, strict=True)],
            dtype=torch.int32,
        ),
    }
    common = CommonAttentionMetadata(**{k: v for k, v in fields.items() if k in known})
    nothing = (None, None, None)
    with (  # what only the kernels for prompts want to know goes to the device, and needs one
        mock.patch.object(builder, "_build_chunk_metadata_tensors", return_value=nothing),
        mock.patch.object(mamba_attn, "compute_causal_conv1d_metadata", return_value=nothing),
    ):
        return rows, builder.build(0, common, **told)


@pytest.mark.parametrize("guesses", [1, 3])
@pytest.mark.parametrize("beside", [1, 2])
def test_the_state_that_is_kept_is_that_of_the_prompt(guesses: int, beside: int) -> None:
    engine, step = decided(guesses, beside)
    rows, told = metadata(engine, step, guesses)
    as_prompt = rows.index("joins") >= told.num_decodes
    ends_at = engine.scheduler.requests["joins"].num_computed_tokens
    assert (ends_at if as_prompt else len(PROMPT)) == len(PROMPT)
