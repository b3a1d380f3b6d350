"""K16: what is asked of each prompt token needs the prompt to be computed."""

from __future__ import annotations

import pytest
from vllm.sampling_params import SamplingParams

from tests.support.decode_engine import DecodeEngine
from tests.support.harness import building
from tests.support.nixl_worker import connect, nixl_of

PROMPT = range(40)  # three blocks of 16 tokens
BLOCKS = [[5, 6, 7]]


class Asking(DecodeEngine):
    """A decode engine whose next requests want the log-probability of each prompt token."""

    @building("a request for prompt logprobs")
    def ask_for_all(self, req_id: str) -> None:
        self.ask(req_id, PROMPT, BLOCKS)
        request = self.scheduler.requests[req_id]
        asked = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1)
        request.sampling_params = asked
        request.skip_reading_prefix_cache = request.get_skip_reading_prefix_cache()


@pytest.fixture
def engine() -> Asking:
    engine = Asking()
    connect(engine.worker, "P")
    return engine


def test_every_token_of_the_prompt_is_computed(engine: Asking) -> None:
    engine.ask_for_all("asks")
    computed = [engine.step().computed.get("asks") for _ in range(3)]
    assert computed[0] == (0, len(PROMPT))


def test_p_is_told_at_once_that_nobody_reads(engine: Asking) -> None:
    engine.ask_for_all("asks")
    engine.step()
    assert not engine.reads_in_flight()
    assert nixl_of(engine.worker).heard == {"P/0": [b"asks-at-p:1"]}


def test_also_after_a_prompt_that_is_in_the_cache(engine: Asking) -> None:
    """The prefix cache holds two of its three blocks; they are not read, on stock neither."""
    engine.ask("before", PROMPT)
    engine.step()
    engine.ask_for_all("asks")
    assert engine.step().computed.get("asks") == (0, len(PROMPT))
