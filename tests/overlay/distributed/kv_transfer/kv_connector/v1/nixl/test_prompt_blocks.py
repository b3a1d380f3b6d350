"""Which of the blocks that P names are read: the prompt's, else all, as on stock."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from tests.support.decode_engine import DecodeEngine
from tests.support.kv_landing import Deployment
from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import connect, make_kv_cache_config, nixl_of, receive
from tests.support.prefill_engine import PrefillEngine
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import prompt_blocks
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.prompt_blocks import (
    read_prompt_only,
    read_prompt_only_of_kernel_blocks,
    read_prompt_only_of_one_ratio,
    tell_hits,
    with_hits,
)

HOOKS = [read_prompt_only, read_prompt_only_of_kernel_blocks, read_prompt_only_of_one_ratio]
NAMED = [30, 31, 32, 33, 34, 35]


def side(*groups: Any, ratio: int = 1, theirs: tuple[int, int] = (16, 1), **more: Any) -> Any:  # noqa: ANN401
    """A worker of D, which knows P: tokens in a kernel block of it, and how many make a block."""
    info = SimpleNamespace(
        remote_block_size=theirs[0], remote_physical_blocks_per_logical=theirs[1], **more
    )
    return SimpleNamespace(
        kv_cache_config=make_kv_cache_config(groups),
        block_size=16,
        _physical_blocks_per_logical_kv_block=ratio,
        _has_mamba="mamba" in groups,
        transfer_topo=SimpleNamespace(get_engine_info=lambda _: info),
        kv_topo=SimpleNamespace(remote_block_size={"P": theirs[0]}),
    )


def asked(ours: Sequence[Sequence[int]], theirs: Any, hits: Sequence[int] | None) -> Any:  # noqa: ANN401 - a stand-in
    """The metadata of a receive; `hits` None is what nobody says anything about."""
    return SimpleNamespace(
        local_block_ids=[list(ids) for ids in ours],
        local_num_computed_blocks=() if hits is None else tuple(hits),
        remote=SimpleNamespace(engine_id="P", block_ids=theirs),
    )


def read(
    worker: Any,  # noqa: ANN401
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    hits: Sequence[int] | None,
    hook: Any = read_prompt_only,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    meta = asked(ours, theirs, hits)
    hook(worker, meta)
    return meta.remote.block_ids


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(("ours", "hit"), [([1, 2, 3, 4], 0), ([3, 4], 2), ([4], 3)])
def test_the_list_ends_with_ours(hook: Any, ours: list[int], hit: int) -> None:  # noqa: ANN401
    assert read(side("full"), [ours], [NAMED], [hit], hook) == [NAMED[:4]]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("groups", "ours", "hits"),
    [
        (("full",), [[1, 2, 3, 4, 5, 6]], [0]),  # as many
        (("full",), [[5, 6]], [4]),
        (("full",), [[1, 2, 3, 4, 5, 6, 7]], [0]),  # we have reserved slots for guesses
        (("full",), [[]], [4]),  # nothing to read
        (("full",), [], [4]),
        (("full",), [[1, 2]], None),  # nobody says how many were there: vLLM's own tests
        (("full", "mamba"), [[1, 2], [3]], [0, 0]),
        (("full", "sliding"), [[1, 2, 3, 4, 5, 6], [7, 8]], [0, 0]),
        (("sliding",), [[1, 2]], [0]),  # nothing tells how far P went
    ],
)
def test_what_stock_pairs_rightly_or_nobody_can_tell_is_left_as_it_is(
    hook: Any,  # noqa: ANN401
    groups: Any,  # noqa: ANN401
    ours: list[list[int]],
    hits: list[int] | None,
) -> None:
    named = [NAMED for _ in groups]
    assert read(side(*groups), ours, named, hits, hook) is named


class TestBlocksOfOtherSizes:
    def test_kernel_blocks(self) -> None:
        """Ours hold 16 tokens, P's 8."""
        worker = side("full", theirs=(8, 1))
        assert read(worker, [[1]], [NAMED], [1]) == [NAMED[:4]]
        assert read(worker, [[1, 2]], [NAMED], [0]) == [NAMED[:4]]
        assert read(worker, [[1, 2]], [NAMED], [1]) == [NAMED]

    def test_logical_blocks_of_two_kernel_blocks(self) -> None:
        worker = side("full", ratio=2, theirs=(16, 2))
        assert read(worker, [[1, 2]], [NAMED], [1]) == [NAMED[:3]]
        assert read(worker, [[1, 2]], [NAMED], [1], read_prompt_only_of_one_ratio) == [NAMED[:3]]

    def test_what_was_expanded_before_the_handshake(self) -> None:
        worker = side("full", ratio=2)
        assert read(worker, [[1]], [NAMED], [1], read_prompt_only_of_kernel_blocks) == [NAMED[:4]]

    def test_larger_ones_of_p(self) -> None:
        """They are refused in the handshake, but what is cut is no part of the prompt."""
        assert read(side("full", theirs=(32, 1)), [[1, 2, 3]], [NAMED], [0]) == [NAMED[:2]]

    def test_groups_of_two_sizes(self) -> None:
        assert read(side("full", "wide"), [[1, 2], [1]], [NAMED, NAMED], [0, 0]) == [
            NAMED[:2],
            NAMED[:1],
        ]
        ours = [range(1, 7), [1]]  # of one group P names no more than ours hold
        assert read(side("full", "wide"), ours, [NAMED, NAMED], [0, 0]) == [NAMED, NAMED[:1]]


class TestWindows:
    def cut(self, ours: int, theirs: list[int], surplus: int = 1) -> Any:  # noqa: ANN401
        """Of six blocks of the prompt ours are the last `ours`; P has `surplus` more."""
        full = list(range(40, 46 + surplus))
        worker = side("full", "sliding")
        return read(worker, [range(1, 7), range(10, 10 + ours)], [full, theirs], [0, 0])

    def test_those_up_to_the_end_of_the_prompt(self) -> None:
        assert self.cut(2, [51, 52, 53]) == [list(range(40, 46)), [51, 52]]
        assert self.cut(3, [50, 51, 52, 53, 54], 2) == [list(range(40, 46)), [50, 51, 52]]

    def test_more_than_we_ask_for(self) -> None:
        """The worker takes the last of them, as always."""
        assert self.cut(1, [51, 52, 53])[1] == [51, 52]

    def test_none_that_we_ask_for(self) -> None:
        assert self.cut(0, [51, 52, 53])[1] == []

    def test_null_blocks_that_are_not_asked_for(self) -> None:
        assert self.cut(1, [0, 52, 53])[1] == [0, 52]

    @pytest.mark.parametrize(
        ("ours", "theirs", "surplus"),
        [(3, [51, 52, 53], 1), (2, [0, 52, 53], 1), (1, [51, 52, 53], 3), (1, [], 1)],
    )
    def test_p_has_them_no_more(self, ours: int, theirs: list[int], surplus: int) -> None:
        with pytest.raises(ValueError, match="max_tokens"):
            self.cut(ours, theirs, surplus)

    def test_a_group_of_another_block_size(self) -> None:
        """How far P went is known in blocks of the others only."""
        worker = side("wide", "sliding")
        with pytest.raises(ValueError, match="max_tokens"):
            read(worker, [[1], [1, 2]], [NAMED, NAMED], [0, 0])

    @pytest.mark.parametrize("ours", [6, 7])
    def test_no_more_than_ours_hold_in_a_group_of_its_block_size(self, ours: int) -> None:
        worker = side("full", "wide", "sliding")
        named = read(worker, [range(ours), [1], [7, 8]], [NAMED] * 3, [0, 0, 0])
        assert named == [NAMED, NAMED[:1], NAMED]


def test_layers_of_one_kind_with_other_sizes_keep_all() -> None:
    worker = side("full")
    [group] = worker.kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    both = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": spec, "b": spec})
    object.__setattr__(group, "kv_cache_spec", both)
    assert read(worker, [[1]], [NAMED], [0]) == [NAMED[:1]]


class TestPairedByPosition:
    """From 0.29.0 on some peers' blocks are counted from the first token; that is right already."""

    def test_ranks_share_a_context(self) -> None:
        named = [NAMED]
        assert read(side("full", remote_dcp_size=2), [[1]], named, [0]) is named
        worker = side("full", remote_dcp_size=1)
        worker.dcp_size = 2
        assert read(worker, [[1]], named, [0]) is named
        worker.dcp_size = 1
        assert read(worker, [[1]], named, [0]) == [NAMED[:1]]

    def test_layers_are_grouped_otherwise(self) -> None:
        worker = side("full")
        worker.region_group_ids, worker.dst_region_group_ids = [0, 0], {"P": [0, 1]}
        named = [NAMED]
        assert read(worker, [[1]], named, [0]) is named
        worker.region_group_ids = [0, 1]
        assert read(worker, [[1]], named, [0]) == [NAMED[:1]]
        worker.region_group_ids = []  # one group here
        assert read(worker, [[1]], named, [0]) == [NAMED[:1]]


class TestWithHits:
    BLOCKS: Any = SimpleNamespace(
        blocks=(
            [
                SimpleNamespace(block_hash=hashed, is_null=null)
                for hashed, null in [(b"a", False), (b"b", True), (b"c", False), (None, False)]
            ],
            [SimpleNamespace(block_hash=None, is_null=False)],
        )
    )

    def metadata(self, kind: Any = list) -> Any:  # noqa: ANN401 - a stand-in
        """What the scheduler tells of a request with two groups."""
        meta = asked([], [NAMED, NAMED], None)
        meta.local_block_ids = with_hits(kind([[4], [5]]), self.BLOCKS)
        tell_hits(meta)
        return meta

    @pytest.mark.parametrize("kind", [list, tuple])
    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_a_worker_knows_them_wherever_it_is(self, kind: Any, elsewhere: bool) -> None:  # noqa: ANN401
        meta = self.metadata(kind)
        assert (type(meta.local_block_ids), [*meta.local_block_ids]) == (kind, [[4], [5]])
        if elsewhere:
            meta = pickle.loads(pickle.dumps(meta))  # noqa: S301 - our own
        read_prompt_only(side("full", "wide"), meta)
        assert meta.remote.block_ids == [NAMED[:3], NAMED[:1]]

    def test_a_worker_elsewhere_may_be_stock(self) -> None:
        """It has no vllm_overlay, and gets lists."""
        assert b"vllm_overlay" not in pickle.dumps(self.metadata())

    def test_nobody_has_said_anything(self) -> None:
        meta = asked([[4], [5]], [NAMED], None)
        for first in ([4], with_hits([[4]], self.BLOCKS)[0]):  # or of one of the groups only
            meta.local_block_ids[0] = first
            tell_hits(meta)
            assert meta.local_num_computed_blocks == ()

    def test_nothing_to_read(self) -> None:
        assert with_hits((), self.BLOCKS) == ()


# ---------------------------------------------------------------- as on stock


def first_layer(engine: DecodeEngine) -> list[list[int]]:
    blocks = engine.worker.num_blocks
    return [[i for i in one.remote if i < blocks] for one in nixl_of(engine.worker).reads]


@pytest.mark.skipif(
    not Deployment(1, 1, split=2).makes_its_blocks, reason="0.26.0 to 0.31.0: K07 refuses such a P"
)
@pytest.mark.parametrize("hit", [0, 5])
def test_blocks_of_p_may_be_smaller(hit: int) -> None:
    """P's hold 8 tokens: the prompt ends in the 25th of the 28 that it names."""
    engine = DecodeEngine()
    worker = engine.worker
    halves = [length // 2 for length in worker.block_len_per_layer]
    blocks = worker.num_blocks * 2
    connect(worker, "P", block_size=8, block_lens=halves, num_blocks=blocks)
    if hit:
        engine.ask("before", range(hit * 16 + 1), max_tokens=1)
        engine.step()
    named = list(range(30, 58))
    engine.ask("asked", range(197), [named])
    engine.step()
    assert first_layer(engine) == [named[2 * hit : 26]]  # the 26th is padding of ours


@pytest.mark.parametrize("length", [15, 16, 17, 197])
@pytest.mark.parametrize("hit", [0, 1, 5])
def test_a_p_that_generates_one_token_is_read_as_on_stock(length: int, hit: int) -> None:
    engine = DecodeEngine()
    connect(engine.worker, "P")
    prompt = range(length)
    if hit:
        engine.ask("before", prompt[: hit * 16 + 1], max_tokens=1)
        engine.step()
    named = list(range(30, 30 + -(-length // 16)))
    engine.ask("asked", prompt, [named])
    engine.step()
    had = min(hit, (length - 1) // 16)
    assert first_layer(engine) == ([named[had:]] if named[had:] else [])


def test_a_second_turn_reads_what_p_generated_in_the_first() -> None:
    """Its prompt goes on with P's tokens, so D has blocks for all of them."""
    source = PrefillEngine()
    source.prefill("asked", range(197), max_tokens=20)
    source.run(22)
    [named] = (source.answers["asked"] or {})["remote_block_ids"]
    assert len(named) == 14
    engine = DecodeEngine()
    connect(engine.worker, "P")
    engine.ask("asked", [*range(197), *[7] * 19], [named])
    engine.step()
    assert first_layer(engine) == [list(named)]


def test_what_comes_without_a_scheduler_s_word_is_paired_from_the_end() -> None:
    engine = DecodeEngine()
    connect(engine.worker, "P")
    receive(engine.worker, local_blocks=[[1, 2]], remote_blocks=[[5, 6, 7]])
    assert first_layer(engine) == [[6, 7]]


def test_each_release_has_its_hook() -> None:
    module: Any = sys.modules[NixlConnectorWorker.__module__]
    assert [h for h in HOOKS if getattr(module, h.__name__, None) is h]
    assert prompt_blocks.__doc__
