"""Who exports a state: as on stock, but for what begins inside a block."""

from __future__ import annotations

from random import Random

import pytest
from vllm.v1 import kv_cache_interface

pytest.importorskip("vllm_overlay.v1.checkpoints", reason="from 0.30.0 on")

BLOCK = 16
UNIT = 4


def test_what_exports() -> None:
    chance = Random(0)  # noqa: S311 - repeatable is what it has to be
    valid = kv_cache_interface.is_mamba_prefill_checkpoint_valid
    stock = valid.__wrapped__
    told, spared = 0, 0
    for _ in range(20_000):
        start = chance.randrange(8 * BLOCK)
        end = start + chance.randint(1, 6 * BLOCK)
        dropped = chance.choice((0, UNIT))  # as for a draft model
        position = max(0, (end - 1) // UNIT * UNIT - dropped)
        asked = start, end, position, UNIT, BLOCK, chance.choice((None, 1, 8))
        assert valid(*asked) == (stock(*asked) and start % BLOCK == 0)
        told += valid(*asked)
        spared += stock(*asked) and not valid(*asked)
    assert told
    assert spared
