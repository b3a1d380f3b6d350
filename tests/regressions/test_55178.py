"""55178: a hybrid's D that guesses goes on from the state of the prompt, whoever runs beside it.

A prompt's last token is computed on D, from the state before it. Beside a running request it comes
with as many places for guesses as that one has; what is in them is not of the prompt, and its
effect on a state cannot be taken back. Scheduler and metadata are the release's own; the kernels
need a GPU: those for prompts keep the state after all tokens of a row, those for guesses keep the
state after each, and the one after what was accepted is gone on with.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.core.sched.output import SchedulerOutput

from tests.support.decode_engine import DecodeEngine
from tests.support.handed_over import handed_over
from tests.support.harness import building
from tests.support.hybrid_engine import engine_of, speculate, states_of
from tests.support.nixl_worker import connect, nixl_of
from tests.support.prefill_engine import PrefillEngine
from tests.support.step_rows import step as step_of
from tests.support.step_rows import without_kernels

PROMPT = range(1000, 1040)


def received(engine: DecodeEngine, guesses: int) -> None:
    """Let D receive a prompt, all but its last token, from a P that guesses alike."""
    p = engine_of(PrefillEngine, mode="none", guesses=guesses)
    engine.send("joins", PROMPT, handed_over(p, "joins", PROMPT), max_tokens=50)
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
    drafts = [len(step.scheduled_spec_decode_tokens.get(row, ())) for row in rows]
    common = step_of(
        *(
            (done, n, done < requests[row].num_prompt_tokens)
            for row, done, n in zip(rows, computed, queries, strict=True)
        ),
        columns=4,
    )
    config = engine.worker.vllm_config
    config.model_config.hf_text_config.mamba_chunk_size = 16
    speculate(config, guesses)
    group = states_of(engine)
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
    with without_kernels(builder):
        return rows, builder.build(0, common, **told)


@pytest.mark.parametrize("guesses", [1, 3])
@pytest.mark.parametrize("beside", [1, 2])
def test_the_state_that_is_kept_is_that_of_the_prompt(guesses: int, beside: int) -> None:
    engine, step = decided(guesses, beside)
    rows, told = metadata(engine, step, guesses)
    as_prompt = rows.index("joins") >= told.num_decodes
    ends_at = engine.scheduler.requests["joins"].num_computed_tokens
    assert (ends_at if as_prompt else len(PROMPT)) == len(PROMPT)
