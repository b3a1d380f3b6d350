"""K00: a fleet is rolled engine by engine, so stock and patched ones serve each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

from tests.pd.client import prefill
from tests.pd.deployment import Deployment, Note, Plain, Start, served
from tests.pd.server import Side


@pytest.mark.patched_only
@pytest.mark.parametrize("stock", ["P", "D"])
def test_one_of_the_two_is_still_stock(
    stock: str,
    pd: Deployment,
    start: Start,
    sides: dict[str, Side],
    plain: Plain,
    prompts: Iterator[str],
    note: Note,
) -> None:
    other = start(f"{stock}-stock", side=sides["stock"], transfer={}, core="PD".index(stock))
    other.wait_ready()
    p, d = (other, pd.d) if stock == "P" else (pd.p, other)
    moved = d.metric("nixl_bytes_transferred_sum")
    for prompt in islice(prompts, 4):
        assert served(d, prompt, prefill(p, prompt)) == [plain[prompt]]
    moved = d.metric("nixl_bytes_transferred_sum") - moved
    note(bytes_moved=moved)
    assert moved > 0
    assert p.blocks_held() == 0
