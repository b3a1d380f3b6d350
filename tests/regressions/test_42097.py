"""42097: blocks expand with the remote ratio; mismatches that cannot be served are refused.

P and D of a Mamba hybrid may have different numbers of kernel blocks in a logical block (it
follows from the TP size). What D reads must be the prompt's KV, or D must not read at all.
"""

from __future__ import annotations

import dataclasses

from tests.support.harness import HarnessError
from tests.support.kv_landing import Deployment, Engines
from tests.support.nixl_worker import MismatchError, nixl_of

HYBRID = Deployment(2, 2, groups=("full", "mamba"))


def faults(deployment: Deployment, tokens: int, state_tokens: int | None) -> list[str]:
    """What is wrong on D after a transfer, an assertion that kills the worker included."""
    engines = Engines(deployment, state_tokens=state_tokens)
    engines.connect()
    try:
        return engines.faults_of_a_prompt(tokens)
    except (AssertionError, IndexError, MismatchError) as error:
        return [f"the worker died: {error!r}"]


def test_a_hybrid_gets_the_prompts_kv_whatever_the_ratios() -> None:
    wrong = {}
    for ratios in [(2, 4), (4, 2), (3, 2), (1, 2), (4, 3), (4, 4)]:
        deployment = dataclasses.replace(HYBRID, prefill_ratio=ratios[0], decode_ratio=ratios[1])
        # A state that fills half a logical block looks like half the ratio.
        for state_tokens in (None, 8) if ratios == (4, 4) else (None,):
            for tokens in (3, 5, 8, 13, 16, 32, 45):
                if found := faults(deployment, tokens, state_tokens):
                    wrong[ratios, state_tokens, tokens] = found
    assert wrong == {}


def test_a_hybrid_gets_the_rest_of_the_prompt_after_a_prefix_hit() -> None:
    wrong = {}
    for ratio in (1, 2, 3):
        deployment = Deployment(ratio, ratio, groups=HYBRID.groups, prefix_caching=True)
        for tokens, hit in [(13, 1), (26, 2), (45, 1), (45, 3)]:
            engines = Engines(deployment)
            engines.connect()
            try:
                found = engines.faults_of_a_prompt(tokens, hit)
            except (AssertionError, MismatchError) as error:
                found = [f"the worker died: {error!r}"]
            if found:
                wrong[ratio, tokens, hit] = found
    assert wrong == {}


def test_a_hybrid_with_a_window_gets_the_prompts_kv_or_refuses_the_peer() -> None:
    wrong = {}
    for ratios in [(2, 4), (4, 2), (3, 2), (2, 3)]:
        for tokens in (13, 26, 45):
            engines = Engines(Deployment(*ratios, groups=("full", "sliding", "mamba")))
            try:
                engines.connect()
                found = engines.faults_of_a_prompt(tokens)
            except HarnessError:
                raise
            except RuntimeError as refusal:
                assert "--block-size" in str(refusal)
                found = [f"{read} after the refusal" for read in nixl_of(engines.decode).reads]
            except (AssertionError, IndexError, MismatchError) as error:
                found = [f"the worker died: {error!r}"]
            if found:
                wrong[ratios, tokens] = found
    assert wrong == {}


def test_hybrid_with_two_ratios_and_prefix_caching_is_refused() -> None:
    engines = Engines(
        dataclasses.replace(HYBRID, prefill_ratio=2, decode_ratio=4, prefix_caching=True)
    )
    refusal = ""
    try:
        engines.connect()
    except HarnessError:
        raise
    except RuntimeError as error:
        refusal = str(error)
    assert "-prefix-caching" in refusal  # which option; it goes by two names
