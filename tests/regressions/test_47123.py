"""47123: a prompt's part of as many tokens as a decode and its guesses is no decode.

On P such a part is a prompt of that length, or what is left of one behind chunks or a cached
prefix; on each engine also what a preempted request computes again. A graph of decodes that is
replayed for it reads, and writes, the states of an earlier step.
"""

from __future__ import annotations

import pytest

from tests.support.decode_graphs import GDN, MAMBA2, Row, graph_reads
from tests.support.release import since

GUESSES = 3
GUESSED = Row(50, 40, 1 + GUESSES, GUESSES)

PARTS = {
    "a whole prompt": [Row(0, 5, 4)],
    "what is left of one": [Row(36, 41, 4)],
    "of two": [Row(0, 5, 4), Row(36, 41, 4)],
    "computed again": [Row(32, 20, 4)],
}

LAYERS = [pytest.param(GDN, id="delta nets"), pytest.param(MAMBA2, id="Mamba-2")]

FIRST = [
    *([LAYERS[0]] if since("0.31.0") else []),
    *([LAYERS[1]] if since("0.19.0") else []),
]
"""To whom a first token alone is a prompt's. To others it is a decode, and the graph is told."""


def reads_its_own(blocks: list[int] | None) -> bool:
    return blocks is None or blocks == list(range(1, 1 + len(blocks)))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layers", LAYERS)
def test_a_part_of_a_prompt_reads_no_state_of_an_earlier_step(layers: type, part: str) -> None:
    assert reads_its_own(graph_reads(layers, *PARTS[part], guesses=GUESSES))


@pytest.mark.parametrize("layers", LAYERS[: 2 if since("0.19.0") else 1])
def test_nor_does_who_decodes_beside_it(layers: type) -> None:
    rows = [GUESSED, Row(36, 41, 4)]
    assert reads_its_own(graph_reads(layers, *rows, guesses=GUESSES))


if FIRST:

    @pytest.mark.parametrize("layers", FIRST)
    def test_nor_does_the_first_token_of_a_prompt_of_two(layers: type) -> None:
        assert reads_its_own(graph_reads(layers, Row(0, 2)))
        assert reads_its_own(graph_reads(layers, Row(45, 40), Row(0, 2)))
