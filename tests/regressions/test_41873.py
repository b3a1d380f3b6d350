"""41873: rows that pad a step to the size of its graph are nobody's, whoever was there before.

A request that leaves after one step, such as each on P, leaves a row in which its prompt is not
computed to the end. The runner's method and the builder are the release's own.
"""

from __future__ import annotations

import pytest
import torch

from tests.regressions.test_46424 import Row, Runner, blocks_of
from tests.support.decode_graphs import EARLIER, MAMBA2, buffer_of, builder_of, with_graphs
from tests.support.harness import building
from tests.support.hybrid_engine import states_of
from tests.support.step_rows import without_kernels

RUNS = Row(45, 40)
LEFT = Row(0, 40, tokens=0)
"""One that was there, and left after its first step."""


@building("what layers with states are told of a step")
def told_to_the_graph(rows: list[Row], padding: list[Row], guesses: int = 0) -> list[int]:
    """The first block of each row that a graph finds, after a step that is padded."""
    engine = with_graphs(guesses)
    builder = builder_of(MAMBA2, engine)
    buffer = buffer_of(builder).fill_(EARLIER)
    tokens = (1 + guesses) * (len(rows) + len(padding))
    with without_kernels(builder):
        Runner((*rows, *padding), states_of(engine), builder)._build_attention_metadata(
            num_tokens=sum(row.tokens for row in rows),
            num_reqs=len(rows),
            max_query_len=1 + guesses,
            num_tokens_padded=tokens,
            num_reqs_padded=len(rows) + len(padding),
            slot_mappings={0: torch.zeros(tokens, dtype=torch.int64)},
            use_spec_decode=guesses > 0,
        )
    return buffer[: len(rows), 0].tolist()


@pytest.mark.parametrize("rows", [[RUNS], [RUNS, RUNS, RUNS]], ids=len)
def test_a_step_is_padded_with_nobodys_rows(rows: list[Row]) -> None:
    own = blocks_of((*rows,))[:, 0].tolist()
    assert told_to_the_graph(rows, [LEFT]) == own
    assert told_to_the_graph(rows, [RUNS._replace(tokens=0), LEFT]) == own


def test_so_is_one_with_guesses() -> None:
    rows = [RUNS._replace(tokens=4)]
    assert told_to_the_graph(rows, [LEFT], guesses=3) == blocks_of((*rows,))[:, 0].tolist()
