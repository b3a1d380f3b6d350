"""44560: loads that fill D's cache do not keep each other from running.

Of a model with recurrent states P computes all of a prompt but the last token. Where that ends with
a block, D needs one more to run.
"""

from __future__ import annotations

from tests.support.decode_engine import DecodeEngine
from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import connect, lives, nixl_of
from tests.support.prefill_engine import PrefillEngine

MORE, NONE = range(33), range(100, 148)
"""Prompts of which D needs a further block of 16 tokens to run, and none."""


def offered(prompt: range) -> list[list[int]]:
    """The blocks that P names, for each group."""
    engine = engine_of(PrefillEngine, mode="none")
    engine.prefill("asked", prompt)
    engine.run(4)
    answer = engine.answers["asked"]
    assert answer is not None
    return [list(blocks) for blocks in answer["remote_block_ids"]]


def ended(num_blocks: int) -> dict[str, str]:
    """Let an engine receive both prompts.

    Args:
        num_blocks: of its cache.

    Returns:
        why those requests ended that did.
    """
    engine = engine_of(DecodeEngine, mode="none", num_blocks=num_blocks)
    connect(engine.worker, "P")
    engine.ask("needs-more", MORE, offered(MORE))
    engine.ask("needs-none", NONE, offered(NONE))
    reasons: dict[str, str] = {}
    for _ in range(40):
        nixl_of(engine.worker).finish(*nixl_of(engine.worker).in_flight())
        reasons |= engine.step().finished
    return reasons


def test_every_request_ends() -> None:
    stuck = {blocks: reasons for blocks in range(7, 12) if len(reasons := lives(ended, blocks)) < 2}
    assert stuck == {}
