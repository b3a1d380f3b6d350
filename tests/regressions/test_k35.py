"""K35: with a draft model a hybrid hits no longer a prefix than its attention has.

Without a connector: with one, releases from 0.24.0 on look up each group by itself (48425).
"""

from __future__ import annotations

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.overlapped_engine import OverlappedEngine

BLOCK = 16
EARLIER = range(4 * BLOCK)
OWN = range(500, 500 + BLOCK)


@pytest.mark.parametrize("guesses", [1, 3])
def test_a_prompt_that_begins_like_another(guesses: int) -> None:
    engine = engine_of(
        OverlappedEngine,
        mode="align",
        guesses=guesses,
        drafts=True,
        prefix_caching=True,
        connected=False,
    )
    engine.ask("earlier", EARLIER, max_tokens=1)
    assert engine.run()
    engine.ask("second", [*EARLIER, *OWN], max_tokens=1)
    assert engine.run()
    assert engine.wrong == []
    # All but the last block of what is shared is there, as without states; from 0.33.0 on, all.
    assert engine.computed["second"] <= 2 * BLOCK
