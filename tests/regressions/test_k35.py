"""K35: with a draft model a hybrid hits no longer a prefix than its attention has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.overlapped_engine import OverlappedEngine

BLOCK = 16
TURNS = 20
TO_D = {"do_remote_decode": True}
OWN = range(500, 500 + BLOCK)
"""How a prompt goes on that begins like an earlier one."""


@pytest.mark.parametrize("guesses", [1, 3])
@pytest.mark.parametrize(("params", "left_out"), [(TO_D, 1), (None, 0)], ids=["p", "d"])
def test_a_prompt_that_begins_like_another(
    params: dict[str, Any] | None, left_out: int, guesses: int
) -> None:
    """P leaves out a prompt's last token: D's state is the one before it."""
    engine = engine_of(
        OverlappedEngine, mode="align", guesses=guesses, drafts=True, prefix_caching=True
    )
    engine.send("earlier", range(4 * BLOCK + left_out), params, max_tokens=1)
    engine.run(TURNS)
    second = engine.send("second", [*range(4 * BLOCK), *OWN], params, max_tokens=1)
    engine.run(TURNS)
    assert engine.finished["second"] == "length"
    assert engine.wrong == []
    # All but the last block of what is shared is there, as without states.
    assert engine.computed["second"] == second.num_prompt_tokens - 3 * BLOCK
