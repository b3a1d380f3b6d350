"""Which of D's blocks P's are read into, for every kind of KV-cache group and what P names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_release import NixlConnectorScheduler
from tests.support.nixl_worker import connect, make_kv_cache_config, nixl_of

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.reserved",
    reason="0.23.0 and 0.24.0",
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.reserved import without_reserved

hooked = sys.modules[NixlConnectorScheduler.__module__]


def left(
    tokens: int,
    named: Any,  # noqa: ANN401 - what a client sends
    held: dict[str, list[int]],
    *,
    cached: int = 0,
    ranks: int = 1,
) -> Any:  # noqa: ANN401 - lists
    """What is left of the blocks that each group holds, of which the cache had the first ones."""
    scheduler: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=ranks, prefill_context_parallel_size=1
            )
        ),
        kv_cache_config=make_kv_cache_config(list(held)),  # type: ignore[arg-type]
    )
    request: Any = SimpleNamespace(
        kv_transfer_params=None if named is None else {"remote_block_ids": named}
    )
    blocks: Any = SimpleNamespace(blocks=tuple(held.values()))
    new = [ids[cached:] for ids in held.values()]
    return without_reserved(scheduler, request, blocks, tokens, new)


@pytest.mark.parametrize(
    ("tokens", "named", "expected"),
    [
        (30, 2, [1, 2]),
        (30, 3, [1, 2, 3]),
        (30, 4, [1, 2, 3, 4]),
        (30, 5, [1, 2, 3, 4]),  # as on stock
        (32, 2, [1, 2]),
        (33, 3, [1, 2, 3]),
        (64, 4, [1, 2, 3, 4]),
        (33, 1, [1, 2, 3]),  # P has not all of the prompt
        (33, 0, [1, 2, 3]),
    ],
)
def test_blocks_that_p_has_nothing_for_are_left_out(
    tokens: int, named: int, expected: list[int]
) -> None:
    assert left(tokens, [list(range(named))], {"full": [1, 2, 3, 4]}) == [expected]


def test_what_the_cache_had_counts_as_filled() -> None:
    held = {"full": [1, 2, 3, 4]}
    assert left(14, [[7, 8]], held, cached=1) == [[2]]
    assert left(14, [[7, 8, 9]], held, cached=1) == [[2, 3]]
    assert left(30, [[7, 8, 9]], held, cached=1) == [[2, 3]]


def test_ranks_of_context_parallelism_share_a_block() -> None:
    assert left(33, [[7, 8]], {"full": [1, 2, 3]}, ranks=2) == [[1, 2]]


def test_a_window_ends_with_what_is_kept() -> None:
    held = {"sliding": [1, 2, 3], "full": [4, 5, 6]}
    assert left(30, [[7, 8], [9, 10]], held) == [[1, 2], [4, 5]]
    assert left(30, [[7, 8], [9, 10, 11]], held) == list(held.values())


def test_groups_of_other_blocks_states_and_windows_alone_are_as_on_stock() -> None:
    held = {"full": [1, 2, 3], "wide": [4, 5], "mamba": [6, 7]}
    assert left(30, [[7, 8], [9], [10]], held) == [[1, 2], [4, 5], [6, 7]]
    assert left(30, [[7, 8]], {"sliding": [1, 2, 3]}) == [[1, 2, 3]]


@pytest.mark.parametrize("named", [None, [], [[7, 8], [9]], ()])
def test_what_p_does_not_name_for_each_group_is_as_on_stock(named: Any) -> None:  # noqa: ANN401
    assert left(30, named, {"full": [1, 2, 3]}) == [[1, 2, 3]]


def test_nothing_to_read_is_nothing() -> None:
    scheduler: Any = SimpleNamespace(kv_cache_config=make_kv_cache_config(["full"]))
    request: Any = SimpleNamespace(kv_transfer_params={"remote_block_ids": [[7]]})
    assert without_reserved(scheduler, request, SimpleNamespace(blocks=()), 0, ()) == ()


# ---------------------------------------------------------------- with the scheduler

LENGTHS = [1, 13, 14, 16, 17, 29, 30, 31, 32, 33, 48]


def engine(drafts: int, groups: Any = ("full",), *, eagle: bool = False) -> DecodeEngine:  # noqa: ANN401
    made = DecodeEngine(groups=groups)
    connect(made.worker, "P", num_blocks=64)
    made.guess(drafts, eagle=eagle)
    return made


def reads(drafts: int, at_p: int, **config: Any) -> Iterator[Any]:  # noqa: ANN401
    """What is read, and held while it is, for prompts of all lengths, of a P that reserves."""
    for length in LENGTHS:
        side = engine(drafts, **config)
        blocks = list(range(1, 1 + -(-(length + at_p) // 16)))
        side.ask("asked", range(length), [blocks for _ in side.groups])
        side.step()
        found = [(list(read.local), list(read.remote)) for read in nixl_of(side.worker).reads]
        yield found, side.scheduler.kv_cache_manager.get_block_ids("asked")


@pytest.mark.parametrize(
    ("drafts", "at_p", "config"),
    [
        (3, 3, {}),  # a P that guesses likewise
        (1, 3, {}),
        (0, 0, {}),
        (0, 3, {}),
        (3, 0, {"eagle": True}),
        (3, 3, {"eagle": True}),
        (3, 3, {"groups": ("full", "sliding")}),
        (0, 0, {"groups": ("full", "sliding")}),
        (0, 0, {"groups": ("full", "mamba")}),
    ],
)
def test_where_p_names_enough_the_same_is_read_as_on_stock(
    monkeypatch: pytest.MonkeyPatch,
    drafts: int,
    at_p: int,
    config: Any,  # noqa: ANN401
) -> None:
    ours = list(reads(drafts, at_p, **config))
    assert all(found for found, _ in ours)
    monkeypatch.setattr(hooked, "without_reserved", lambda *args: args[-1])
    assert ours == list(reads(drafts, at_p, **config))


def test_the_scheduler_holds_the_same_blocks_as_on_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [held for _, held in reads(3, 0)]
    assert [len(held[0]) for held in ours] == [-(-(length + 3) // 16) for length in LENGTHS]
    monkeypatch.setattr(hooked, "without_reserved", lambda *args: args[-1])
    assert ours == [held for _, held in reads(3, 0)]


@pytest.mark.parametrize("at_p", [0, 1, 2, 3])
def test_whatever_a_p_reserves_that_guesses_no_more(at_p: int) -> None:
    for length, (found, [held]) in zip(LENGTHS, reads(3, at_p), strict=True):
        [(local, remote)] = found
        count = -(-length // 16)
        pairs = [
            (theirs, held.index(ours) + 1)
            for ours, theirs in zip(local, remote, strict=True)
            if theirs < 64
        ]
        assert pairs[:count] == [(i, i) for i in range(1, count + 1)], length
        assert all(theirs == ours for theirs, ours in pairs)


@pytest.mark.parametrize("length", [30, 31, 32])
def test_a_window_is_read_to_its_own_blocks(length: int) -> None:
    side = engine(3, ("full", "sliding"))
    side.ask("asked", range(length), [[40, 41], [50, 51]])
    side.step()
    held = side.scheduler.kv_cache_manager.get_block_ids("asked")
    mine = {block: (g, i) for g, group in enumerate(held) for i, block in enumerate(group)}
    [read] = nixl_of(side.worker).reads
    pairs = {
        (theirs, mine[ours])
        for ours, theirs in zip(read.local, read.remote, strict=True)
        if theirs < 64
    }
    assert pairs == {(40, (0, 0)), (41, (0, 1)), (50, (1, 0)), (51, (1, 1))}
