"""42430: D goes on from the state of the prompt that it received, also where it replays a graph.

Of a hybrid P leaves a prompt's last token to D. In a step in which each request has one token D
replays its graph of decodes, and the state that it reads has to be the request's.
"""

from __future__ import annotations

import pytest

from tests.support.decode_graphs import MAMBA2, Row, graph_reads

LAST = Row(39, 40)
RUNS = Row(45, 40)


@pytest.mark.parametrize("rows", [[LAST], [LAST, LAST], [RUNS, LAST], [RUNS, RUNS, LAST]])
def test_the_last_token_of_a_received_prompt(rows: list[Row]) -> None:
    assert graph_reads(MAMBA2, *rows) == list(range(1, 1 + len(rows)))
