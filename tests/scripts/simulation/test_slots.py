"""The slots of states: whoever goes on finds the state after the token before."""

from __future__ import annotations

from random import Random

import pytest

from tests.simulation.slots import Mode, Slots, Span

TOKENS = 4
PROMPT = 11


def steps(chance: Random, mode: Mode) -> list[tuple[Span, int]]:
    """A prompt in parts that end with a block, and what follows it; of each step, how many of its
    guesses are right."""
    parts = [(Span(start, min(start + TOKENS, PROMPT), 0), 0) for start in range(0, PROMPT, TOKENS)]
    at = PROMPT
    for _ in range(12):
        guesses = 0 if mode == "all" else chance.randrange(4)
        right = chance.randint(0, guesses)
        parts.append((Span(at, at + 1 + guesses, guesses), right))
        at += 1 + right
    return parts


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("seed", range(20))
def test_a_step_goes_on_from_the_state_before_it(mode: Mode, seed: int) -> None:
    slots, held = Slots(mode, TOKENS), dict[int, int]()  # slot -> the token after which it is
    for i, (span, right) in enumerate(steps(Random(seed), mode)):  # noqa: S311 - to be repeated
        for source, target in slots.begin("r", span, fresh=not i):
            held[target] = held[source]
        assert not span.start or held[slots.read("r", span)] == span.start - 1
        held |= dict(slots.written("r", span))
        for source, target in slots.judge("r", span, right):
            held[target] = held[source]
        done = span.end - span.guesses + right
        if mode != "none" and done >= TOKENS:  # what is cached: the state at the end of a block
            full = done // TOKENS
            assert held[full - 1] == full * TOKENS - 1


@pytest.mark.parametrize("mode", ["none", "align"])
def test_who_was_preempted_begins_anew(mode: Mode) -> None:
    """What was received lies in the first slot, or the one of its last token."""
    slots = Slots(mode, TOKENS)
    slots.begin("r", Span(0, 8, 0), fresh=True)
    slots.judge("r", Span(0, 8, 0), 0)
    slots.begin("r", Span(8, 11, 2), fresh=False)
    slots.judge("r", Span(8, 11, 2), 2)
    after = Span(10, 11, 0)
    assert slots.begin("r", after, fresh=True) == []
    assert slots.read("r", after) == (0 if mode == "none" else 2)
    slots.forget("r")
    assert slots.begin("r", Span(0, 1, 0), fresh=False) == []
    assert slots.written("r", Span(0, 1, 0)) == [(0, 0)]
