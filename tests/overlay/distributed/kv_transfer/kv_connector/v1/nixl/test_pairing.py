"""Kernel blocks of two sizes, where upstream expands the ids: paired rightly, or refused."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.kv_landing import Deployment, Engines
from tests.support.nixl_release import NixlAgentMetadata
from tests.support.nixl_worker import connect, make_worker, nixl_of, peer_metadata, topology_of
from tests.support.release import since

pairing = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.pairing", reason="from 0.24.0 on"
)


NO_PARTS = (
    "not every layer keeps the whole prompt"
    if Deployment(1, 1, split=2).makes_its_blocks
    else "the same --block-size and attention backend"
)
"""Of blocks that are read in parts: what is said where a group keeps a window of the prompt."""

GROUPS: Any = ("full", "sliding")
HYBRID: Any = ("mamba", "full")


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("split", [2, 3])
@pytest.mark.parametrize(("tokens", "hit"), [(1, 0), (23, 0), (31, 1), (49, 1)])
def test_each_token_lands_in_its_place(
    mla: bool, ratio: int, split: int, tokens: int, hit: int
) -> None:
    deployment = Deployment(ratio, ratio, kernel=4, split=split, prefix_caching=True, mla=mla)
    engines = Engines(deployment)
    if not deployment.makes_its_blocks:
        with pytest.raises(RuntimeError, match="the same --block-size and attention backend"):
            engines.connect()
        return
    engines.connect()
    assert engines.faults_of_a_prompt(tokens, hit) == []
    assert nixl_of(engines.decode).reads


class TestPairSmallerBlocks:
    def test_nothing_to_read(self) -> None:
        worker = make_worker()
        nothing: list[list[list[int]]] = [[], [[]]]
        for local in nothing:
            assert pairing.pair_smaller_blocks(worker, "r", local, [[1, 2]], 2) == ([], [[1, 2]])

    def test_more_than_the_prompt(self) -> None:
        with pytest.raises(ValueError, match="2 local blocks"):
            pairing.pair_smaller_blocks(make_worker(), "r", [[1, 2]], [[1, 2]], 2)

    def test_the_scheduler_s_word_on_the_prefix_goes_before_a_guess(self) -> None:
        """Padding at our end: the lengths alone would say that there was no hit."""
        worker = make_worker()
        connect(worker, "P")
        remote = SimpleNamespace(block_ids=[[1, 2, 3]], engine_id="P")
        meta: Any = SimpleNamespace(local_num_computed_blocks=(1,), remote=remote)
        worker._recving_metadata["r"] = meta
        ours, theirs = pairing.pair_smaller_blocks(worker, "r", [[4, 5]], [[1, 2, 3]], 2)
        assert theirs == [[3]]
        assert ours == [[8]]  # the first of the two parts of block 4
        assert remote.block_ids == [[3]]


@pytest.mark.skipif(not since("0.32.0"), reason="from 0.32.0 on kernels of a hybrid may differ")
@pytest.mark.parametrize("tokens", range(1, 60, 7))
@pytest.mark.parametrize("prefill_ratio", [17, 34])
def test_of_a_hybrid_of_two_ratios_and_kernels_all_is_read(tokens: int, prefill_ratio: int) -> None:
    """Without K19 nobody says what was cached: nothing, as the handshake has it."""
    deployment = Deployment(prefill_ratio, 9, groups=("full", "mamba"), kernel=1, split=2)
    engines = Engines(deployment)
    engines.connect()
    assert engines.faults_of_a_prompt(tokens) == []


@pytest.mark.skipif(not since("0.32.0"), reason="earlier ones do not make such blocks")
@pytest.mark.parametrize("decode_ratio", [1, 2])
@pytest.mark.parametrize("tokens", range(3, 49, 9))
@pytest.mark.parametrize("hit", [0, 1, 3])
def test_a_window_whose_kernels_alone_differ_is_read(
    decode_ratio: int, tokens: int, hit: int
) -> None:
    """`--block-size` is the same, as with one attention backend on two kinds of GPU."""
    ratios = 2 * decode_ratio, decode_ratio
    deployment = Deployment(*ratios, groups=GROUPS, split=2, prefix_caching=True)
    engines = Engines(deployment)
    engines.connect()
    assert engines.faults_of_a_prompt(tokens, min(hit, (tokens - 1) // 16)) == []


class TestRefusals:
    def test_a_window_with_kernel_blocks_of_two_sizes(self) -> None:
        engines = Engines(Deployment(1, 1, groups=("full", "sliding"), split=2))
        with pytest.raises(RuntimeError, match=NO_PARTS):
            engines.connect()

    def test_another_ratio(self) -> None:
        with pytest.raises(RuntimeError, match="same --block-size"):
            Engines(Deployment(1, 2)).connect()

    def test_one_that_pushes_other_kernel_blocks(self) -> None:
        worker = make_worker()
        connect(worker, "P")
        pairing.refuse_pusher(worker, peer_metadata(worker, "P"))
        other = peer_metadata(worker, "P", block_size=worker.block_size // 2)
        with pytest.raises(RuntimeError, match="pushes kernel blocks of 8"):
            pairing.refuse_pusher(worker, other)

    def test_a_worker_that_pushes_leaves_the_pairing_to_its_peer(self) -> None:
        worker = make_worker(groups=("full", "mamba"), block_size=8, kernel_block_size=4)
        connect(worker, "P")
        other = peer_metadata(worker, "P", physical_blocks_per_logical_kv_block=4, num_blocks=64)
        with pytest.raises(RuntimeError, match="ranks with 2 and with 4"):
            pairing.refuse_hybrid(worker, other)
        worker._TRANSFER_MODE = "push"
        pairing.refuse_hybrid(worker, other)
        pairing.refuse_other_size(worker, other)


FULL, WINDOW, LATENT_WINDOW, STATE = (
    object.__new__(vars(pairing)[kind])
    for kind in ("FullAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec", "MambaSpec")
)

SAYS_GROUPS = "region_group_ids" in {field.name for field in dataclasses.fields(NixlAgentMetadata)}
"""Whether engines say to which group of layers each region belongs: from 0.30.0 on."""
SAYS_CONTEXT = "dcp_size" in {field.name for field in dataclasses.fields(NixlAgentMetadata)}
"""Whether engines say of how many ranks each has a share of the tokens: from 0.29.0 on."""


def peer_of(worker: Any, **changes: int) -> Any:  # noqa: ANN401
    """What a peer that the worker has in its books as like itself says but for `changes`."""
    connect(worker, "Q")
    topology = topology_of(worker)
    info = topology.get_engine_info("Q")
    ratio = changes.get("physical_blocks_per_logical_kv_block", 1)
    known = dataclasses.replace(info, remote_physical_blocks_per_logical=ratio)
    topology._engines[("Q", 0)] = known if changes else info
    if SAYS_GROUPS:
        worker.dst_region_group_ids["Q"] = worker.region_group_ids
    return peer_metadata(worker, "Q", **changes)


class TestWhoIsRefused:
    """By a worker that pulls, if nothing else is said; each case has one difference."""

    def test_nobody_like_us(self) -> None:
        for groups in (("full",), GROUPS, ("full", "mamba")):
            worker = make_worker(groups=groups)
            peer = peer_of(worker)
            for refuse in (pairing.refuse_hybrid, pairing.refuse_other_size, pairing.refuse_pusher):
                refuse(worker, peer)

    def test_a_hybrid_of_another_ratio(self) -> None:
        worker = make_worker(groups=("full", "mamba"), block_size=8, kernel_block_size=4)
        peer = peer_of(worker, physical_blocks_per_logical_kv_block=4, num_blocks=64)
        for refuse in (pairing.refuse_hybrid, pairing.refuse_pusher):
            with pytest.raises(RuntimeError, match="while prefix caching is on"):
                refuse(worker, peer)

    def test_another_ratio_of_a_model_without_states(self) -> None:
        worker = make_worker(block_size=8, kernel_block_size=4)
        peer = peer_of(worker, physical_blocks_per_logical_kv_block=4, num_blocks=64)
        pairing.refuse_hybrid(worker, peer)
        for refuse in (pairing.refuse_other_size, pairing.refuse_pusher):
            with pytest.raises(RuntimeError, match="same --block-size"):
                refuse(worker, peer)

    def test_nobody_s_ratio_where_p_pairs_the_blocks(self) -> None:
        worker = make_worker(block_size=8, kernel_block_size=4)
        peer = peer_of(worker, physical_blocks_per_logical_kv_block=4, num_blocks=64)
        worker._TRANSFER_MODE = "push"
        pairing.refuse_other_size(worker, peer)

    def test_other_kernel_blocks_only_with_a_window(self) -> None:
        for groups in (("full",), GROUPS):
            worker = make_worker(groups=groups)
            peer = peer_of(worker, block_size=worker.block_size // 2)
            if groups == GROUPS:
                with pytest.raises(RuntimeError, match=NO_PARTS):
                    pairing.refuse_other_size(worker, peer)
            elif Deployment(1, 1, split=2).makes_its_blocks:
                pairing.refuse_other_size(worker, peer)

    @pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 1), (1, 2), (2, 2)])
    def test_other_blocks_with_context_ranks(self, ours: int, theirs: int) -> None:
        """Those take turns block by block, so each would hold tokens of others: from 0.29.0 on."""
        worker = make_worker(mla=True)
        same, half = peer_of(worker), peer_of(worker, block_size=worker.block_size // 2)
        worker.dcp_size, same.dcp_size, half.dcp_size = ours, theirs, theirs
        pairing.refuse_other_size(worker, same)
        shared = max(ours, theirs) > 1
        if shared or not Deployment(1, 1, split=2, mla=True).makes_its_blocks:
            told = "context ranks" if shared else "does not make of them"
            with pytest.raises(RuntimeError, match=told):
                pairing.refuse_other_size(worker, half)
        else:
            pairing.refuse_other_size(worker, half)

    @pytest.mark.parametrize("ours", [(), (0, 0), (0, 1)])
    @pytest.mark.parametrize("theirs", [(), (0, 0), (0, 1)])
    def test_nobody_whose_regions_belong_to_other_groups(
        self, ours: tuple[int, ...], theirs: tuple[int, ...]
    ) -> None:
        """Those are paired token by token: from 0.30.0 on."""
        worker = make_worker(groups=GROUPS)
        peer = peer_of(worker, block_size=worker.block_size // 2)
        worker.region_group_ids = ours
        worker.dst_region_group_ids = {"Q": theirs}
        if ours and ours != theirs:
            pairing.refuse_other_size(worker, peer)
        else:
            with pytest.raises(RuntimeError):
                pairing.refuse_other_size(worker, peer)

    @pytest.mark.parametrize("theirs", [None, (0, 0), (0, 1)])
    def test_no_pusher_whose_regions_belong_to_other_groups(
        self, theirs: tuple[int, ...] | None
    ) -> None:
        worker = make_worker()
        peer = peer_of(worker, block_size=worker.block_size // 2)
        peer.region_group_ids = theirs
        worker.region_group_ids = (0, 1)
        if theirs == (0, 0):
            pairing.refuse_pusher(worker, peer)
        else:
            with pytest.raises(RuntimeError, match="pushes kernel blocks"):
                pairing.refuse_pusher(worker, peer)

    @pytest.mark.parametrize(
        ("specs", "kernel", "ratio", "refused"),
        [
            ((FULL, WINDOW), 8, 2, False),
            ((FULL, WINDOW), 8, 1, True),
            ((FULL, STATE), 8, 1, False),
            ((FULL, LATENT_WINDOW), 8, 2, True),
            ((FULL, LATENT_WINDOW), 16, 1, False),
            ((STATE, WINDOW), 8, 2, True),
        ],
    )
    def test_a_window_with_other_blocks_where_parts_are_sorted(
        self,
        monkeypatch: pytest.MonkeyPatch,
        specs: tuple[Any, ...],
        kernel: int,
        ratio: int,
        refused: bool,
    ) -> None:
        """Our blocks are kernel blocks, of 16 tokens. As from 0.32.0 on, on any release."""
        monkeypatch.setattr(pairing, "peer_ratio", lambda *_: ratio)
        monkeypatch.setattr(pairing, "refuse_other_block_size", lambda *_: None)
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        worker: Any = SimpleNamespace(
            _TRANSFER_MODE="pull",
            _physical_blocks_per_logical_kv_block=1,
            block_size=16,
            kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
        )
        peer: Any = SimpleNamespace(engine_id="Q", block_size=kernel)
        with pytest.raises(RuntimeError, match="whole prompt") if refused else nullcontext():
            pairing.refuse_other_size(worker, peer)


def paired(
    ours: list[list[int]],
    theirs: list[list[int]],
    hits: tuple[int, ...] | None = None,
    groups: tuple[Any, ...] = ("full",),
    ratio: int = 2,
    **sizes: Any,  # noqa: ANN401 - handed on
) -> tuple[Any, Any]:
    """What is read into what, and what the request's metadata then names of the peer."""
    worker = make_worker(groups=groups, **sizes)
    meta: Any = None
    if hits is not None:
        connect(worker, "P")
        remote = SimpleNamespace(block_ids=[list(ids) for ids in theirs], engine_id="P")
        meta = SimpleNamespace(local_num_computed_blocks=hits, remote=remote)
        worker._recving_metadata["r"] = meta
    got = pairing.pair_smaller_blocks(worker, "r", ours, theirs, ratio)
    return got, meta.remote.block_ids if meta else None


class TestPairs:
    """Our blocks are read in two parts: block b is parts 2b and 2b + 1."""

    def test_the_whole_prompt(self) -> None:
        got, kept = paired([[4, 5]], [[1, 2, 3, 6]], (0,))
        assert got == ([[8, 9, 10, 11]], [[1, 2, 3, 6]])
        assert kept == [[1, 2, 3, 6]]

    def test_without_metadata_the_lengths_say_what_was_cached(self) -> None:
        """Two whole blocks of ours are the prompt; the second is asked for."""
        assert paired([[5]], [[1, 2, 3, 6]]) == (([[10, 11]], [[3, 6]]), None)
        assert paired([[5]], [[1, 2, 3]]) == (([[10]], [[3]]), None)
        got, _ = paired([[4], [5]], [[9], [1, 2, 3, 6]], groups=HYBRID)
        assert got == ([[4], [10, 11]], [[9], [3, 6]])

    def test_no_hits_said_is_as_good_as_no_metadata(self) -> None:
        assert paired([[5]], [[1, 2, 3]], ()) == (([[10]], [[3]]), [[3]])

    def test_padding_at_our_end_is_not_read(self) -> None:
        assert paired([[4, 5]], [[1, 2, 3]]) == (([[8, 9, 10]], [[1, 2, 3]]), None)

    def test_what_the_peer_has_beyond_our_blocks_is_not_read(self) -> None:
        got, kept = paired([[4]], [[1, 2, 3, 6, 7]], (1,))
        assert got == ([[8, 9]], [[3, 6]])
        assert kept == [[3, 6]]

    def test_a_hit_is_counted_in_logical_blocks(self) -> None:
        """Logical blocks of two kernel blocks, each in two parts: one hit is four of theirs."""
        theirs = [list(range(1, 9))]
        got, _ = paired([[6, 7]], theirs, (1,), block_size=8, kernel_block_size=4)
        assert got == ([[12, 13, 14, 15]], [[5, 6, 7, 8]])
        got, _ = paired([[6, 7]], theirs, block_size=8, kernel_block_size=4)
        assert got == ([[12, 13, 14, 15]], [[5, 6, 7, 8]])

    def test_each_group_has_hits_of_its_own(self) -> None:
        both = [[1, 2, 3, 4], [5, 6, 7, 8]]
        got, kept = paired([[1, 2], [4]], both, (0, 1), ("full", "sliding"))
        assert got == ([[2, 3, 4, 5], [8, 9]], [[1, 2, 3, 4], [7, 8]])
        assert kept == [[1, 2, 3, 4], [7, 8]]

    def test_a_state_is_whole_and_a_group_of_which_we_hold_all_is_left(self) -> None:
        got, kept = paired([[3], [4], []], [[9], [1, 2], [5]], (0, 0, 0), ("mamba", "full", "full"))
        assert got == ([[3], [8, 9], []], [[9], [1, 2], [5]])
        assert kept == [[9], [1, 2], [5]]

    def test_of_some_groups_nothing_is_asked_for(self) -> None:
        """Their peer's blocks stay in the metadata, for what is cleared later."""
        got, kept = paired([[], [4]], [[1, 2], [5, 6, 7]], (1, 1), ("full", "sliding"))
        assert got == ([[], [8]], [[1, 2], [7]])
        assert kept == [[1, 2], [7]]

    def test_what_another_rank_of_p_is_read_for_stays_in_the_metadata(self) -> None:
        """A read names the blocks of its own groups only."""
        worker = make_worker(groups=GROUPS)
        connect(worker, "P")
        remote = SimpleNamespace(block_ids=[[1, 2], [5, 6]], engine_id="P")
        meta: Any = SimpleNamespace(local_num_computed_blocks=(0, 0), remote=remote)
        worker._recving_metadata["r"] = meta
        got = pairing.pair_smaller_blocks(worker, "r", [[], [4]], [[], [5, 6]], 2)
        assert got == ([[], [8, 9]], [[], [5, 6]])
        assert remote.block_ids == [[1, 2], [5, 6]]

    @pytest.mark.parametrize(("theirs", "asked"), [([1, 2], 2), ([1, 2, 3], 3), ([], 1)])
    def test_more_than_the_prompt_has(self, theirs: list[int], asked: int) -> None:
        ours = [list(range(asked))]
        with pytest.raises(ValueError, match=rf"{asked} local blocks .* {len(theirs)} remote"):
            paired(ours, [theirs])

    @pytest.mark.skipif(not SAYS_CONTEXT, reason="from 0.29.0 on")
    @pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1)])
    def test_context_ranks_are_paired_as_on_stock(self, sizes: tuple[int, int]) -> None:
        """Upstream has left out what the cache had, before it comes here: rank by rank."""
        worker = make_worker(mla=True)
        connect(worker, "P")
        worker.dcp_size = sizes[0]
        topology = topology_of(worker)
        info = dataclasses.replace(topology.get_engine_info("P"), remote_dcp_size=sizes[1])
        topology._engines = dict.fromkeys(topology._engines, info)
        remote = SimpleNamespace(block_ids=[[1, 2, 3, 6]], engine_id="P")
        meta: Any = SimpleNamespace(local_num_computed_blocks=(1,), remote=remote)
        worker._recving_metadata["r"] = meta
        got = pairing.pair_smaller_blocks(worker, "r", [[5]], [[3, 6]], 2)
        assert got == ([[10, 11]], [[3, 6]])
        assert remote.block_ids == [[1, 2, 3, 6]]

    def test_a_window_is_paired_from_its_end(self) -> None:
        """Both sides name its last blocks only, so hits in front of them do not count."""
        got, _ = paired([[7]], [[1, 2, 3, 6]], (5,), ("sliding",))
        assert got == ([[14, 15]], [[3, 6]])

    def test_a_request_that_is_not_awaited_has_no_metadata_to_keep(self) -> None:
        worker = make_worker(groups=HYBRID)
        worker._recving_metadata["r"] = SimpleNamespace(local_num_computed_blocks=(), remote=None)
        got = pairing.pair_smaller_blocks(worker, "r", [[3], [4]], [[9], [1, 2]], 2)
        assert got == ([[3], [8, 9]], [[9], [1, 2]])

    @pytest.mark.parametrize(
        ("groups", "ratio", "read"),
        [(HYBRID, 1, [3, 6]), (HYBRID, 2, [1, 2]), (GROUPS, 2, [3, 6])],
    )
    def test_of_a_hybrid_of_another_ratio_nothing_was_cached(
        self, groups: tuple[Any, ...], ratio: int, read: list[int]
    ) -> None:
        worker = make_worker(groups=groups)
        connect(worker, "P")
        topology = topology_of(worker)
        info = topology.get_engine_info("P")
        info = dataclasses.replace(info, remote_physical_blocks_per_logical=ratio)
        topology._engines = dict.fromkeys(topology._engines, info)
        remote = SimpleNamespace(block_ids=[[], [1, 2, 3, 6]], engine_id="P")
        meta: Any = SimpleNamespace(local_num_computed_blocks=(), remote=remote)
        worker._recving_metadata["r"] = meta
        got = pairing.pair_smaller_blocks(worker, "r", [[], [5]], [[], [1, 2, 3, 6]], 2)
        assert got == ([[], [10, 11]], [[], read])

    @pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1)])
    def test_shares_of_context_ranks_are_left_to_upstream(self, sizes: tuple[int, int]) -> None:
        info = SimpleNamespace(remote_dcp_size=sizes[1])
        meta = SimpleNamespace(remote=SimpleNamespace(engine_id="P"))
        worker: Any = SimpleNamespace(
            dcp_size=sizes[0],
            transfer_topo=SimpleNamespace(get_engine_info={"P": info}.get),
            _recving_metadata={"r": meta},
            _map_block_ids_for_block_size_ratio=lambda *given: given,
        )
        given = [[5]], [[3, 6]], 2
        assert pairing.pair_smaller_blocks(worker, "r", *given) == given
