"""Who asks for nothing of the prompt's tokens is served from the peer's blocks, as on stock."""

from __future__ import annotations

import pytest
from vllm.sampling_params import SamplingParams

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import connect, nixl_of


@pytest.mark.parametrize("logprobs", [None, 3])
def test_the_prompt_is_read(logprobs: int | None) -> None:
    """Log-probabilities of what is generated need no prompt."""
    engine = DecodeEngine()
    connect(engine.worker, "P")
    engine.ask("asks", range(40), [[5, 6, 7]])
    params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=logprobs)
    engine.scheduler.requests["asks"].sampling_params = params
    assert "asks" not in engine.step().computed
    nixl = nixl_of(engine.worker)
    nixl.finish(*nixl.in_flight())
    engine.step()
    assert engine.step().computed["asks"] == (39, 40)
