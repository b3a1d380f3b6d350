"""44151: of a request's blocks those are handed out that hold its tokens.

With speculative decoding P reserves slots for the tokens that it will guess, after those of the
prompt. They need a block more for some lengths of the prompt, to which nothing was written yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.nixl_worker import connect, make_worker, nixl_of, receive
from tests.support.prefill_engine import PrefillEngine

ENDS_LATER = [30, 32, 46]
"""Tokens of prompts after which three guesses need a block more."""


def prefilled(prompt: Iterable[int], **config: Any) -> list[list[int]]:  # noqa: ANN401 - of the engine
    """The blocks that P names, for each group, when it has prefilled a prompt in several steps."""
    engine = PrefillEngine(drafts=3, step_tokens=24, **config)
    engine.prefill("asked", prompt)
    engine.run(4)
    answer = engine.answers["asked"] or {}
    return [list(blocks) for blocks in answer["remote_block_ids"]]


@pytest.mark.parametrize("length", ENDS_LATER)
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_no_block_is_named_that_holds_nothing(length: int, async_scheduling: bool) -> None:
    [blocks] = prefilled(range(length), async_scheduling=async_scheduling)
    assert len(blocks) == -(-length // 16)


@pytest.mark.parametrize("length", [30, 32])
def test_a_window_ends_with_the_prompt(length: int) -> None:
    """Two groups: one that keeps all tokens, one that keeps those the next token looks at."""
    full, window = prefilled(range(length), groups=("full", "sliding"))
    assert len(full) == 2
    assert len([block for block in window if block]) == 2  # the null block stands for what is gone


@pytest.mark.parametrize("length", ENDS_LATER)
def test_decode_reads_the_first_block_first(length: int) -> None:
    [blocks] = offered = prefilled(range(length))
    worker = make_worker(num_blocks=64)
    connect(worker, "P")
    receive(worker, local_blocks=[range(1, 1 + -(-length // 16))], remote_blocks=offered)
    [read] = nixl_of(worker).reads
    keys_of_first_layer = range(worker.num_blocks)
    assert [index for index in read.remote if index in keys_of_first_layer] == list(
        blocks[: -(-length // 16)]
    )
