"""K15: P has a data-parallel rank on each of two nodes; D reads from the one that has the blocks.

Both nodes are given one engine id, as a manifest for all pods of P does.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pd.client import prefill
from tests.pd.deployment import Plain, Start, served
from tests.pd.nodes import start_two_ranks


@pytest.mark.shows("K15")
def test_d_reads_from_the_rank_that_has_the_blocks(
    start: Start, plain: Plain, prompts: Iterator[str]
) -> None:
    p = start_two_ranks(start, transfer={"engine_id": "p"})
    d = start("D-of-ranks", transfer={}, arguments=["--no-enable-prefix-caching"], core=1)
    p.wait_ready()
    d.wait_ready()
    for rank in (0, 1, 0, 1):
        prompt = next(prompts)
        assert served(d, prompt, prefill(p, prompt, rank)) == [plain[prompt]], rank
    assert "unrecognized request" not in p.text()
