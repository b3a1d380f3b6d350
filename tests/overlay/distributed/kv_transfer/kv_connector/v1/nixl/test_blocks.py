"""Block arithmetic: against a reference that maps tokens to kernel blocks, and rule by rule."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.support.hybrid_engine import states
from tests.support.kv_landing import Deployment, Engines
from tests.support.nixl_release import NixlAgentMetadata, NixlConnectorWorker
from tests.support.nixl_worker import GroupKind, make_worker, nixl_of, peer_metadata
from tests.support.release import since

blocks = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.blocks", reason="from 0.20.0 on"
)

GROUPS: list[tuple[GroupKind, ...]] = [
    ("full",),
    ("full", "sliding"),
    ("full", "mamba"),
    ("mamba", "full", "full"),
    ("full", "sliding", "mamba"),
]
RATIOS = st.integers(1, 8)
# 0.20.x leaves the field out when it is not patched; from 0.21.0 on it is always there.
CAN_BE_UNSTATED = any(
    field.name == "physical_blocks_per_logical_kv_block"
    and field.default is not dataclasses.MISSING
    for field in dataclasses.fields(NixlAgentMetadata)
)


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    groups = draw(st.sampled_from(GROUPS))
    prefill = draw(RATIOS)
    # Alike in a good part of the cases: those are the ones that are served.
    decode = draw(st.sampled_from([prefill, prefill, *range(1, 9)]))
    return Deployment(
        prefill,
        decode,
        groups=groups,
        kernel=draw(st.sampled_from([2, 4])),
        split=draw(st.sampled_from([1, 1, 2, 3])) if groups == ("full",) else 1,
        prefix_caching=draw(st.booleans()),
        mla=draw(st.booleans()) if groups == ("full",) else False,
        whole=draw(st.booleans()),
    )


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data(), deployment=deployments())
def test_each_token_lands_in_its_place_or_the_peer_is_refused(
    data: st.DataObject, deployment: Deployment
) -> None:
    engines = Engines(deployment, max_tokens=64)
    try:
        engines.connect()
    except RuntimeError as refusal:
        event("refused")
        same_ratio = deployment.prefill_ratio == deployment.decode_ratio
        assert not (same_ratio and deployment.makes_its_blocks), refusal
        # The last is upstream's own, of 0.33.0.
        ways_out = ("start", "use the same", "disable prefix caching with")
        assert any(way in str(refusal).lower() for way in ways_out), refusal
        assert nixl_of(engines.decode).reads == []
        return
    assert deployment.makes_its_blocks
    tokens = data.draw(st.integers(1, 64), label="tokens")
    # vLLM computes at least the last token itself, and a state is never part of a hit here.
    most = (tokens - 1) // deployment.decode_block if deployment.prefix_caching else 0
    hit = data.draw(st.integers(0, most), label="hit")
    event(
        f"served, {'one ratio' if deployment.prefill_ratio == deployment.decode_ratio else 'two'}"
        f"{', with a hit' if hit else ''}"
    )
    assert engines.faults_of_a_prompt(tokens, hit, seed=data.draw(st.integers(0, 99))) == []
    assert nixl_of(engines.decode).reads


often = settings(max_examples=100, deadline=None, derandomize=True)
with_kernels_of_two_sizes = given(
    data=st.data(),
    ratio=st.integers(1, 3),
    kernel=st.sampled_from([1, 2]),
    split=st.integers(2, 4),
    mla=st.booleans(),
    whole=st.booleans(),
)


def assert_all_is_read(data: st.DataObject, deployment: Deployment) -> None:
    """D accepts P, and each token of a prompt lands in its place, whatever D has cached of it; or
    D refuses P, where it could not make its blocks of what it reads."""
    tokens = data.draw(st.integers(1, 64), label="tokens")
    hit = data.draw(st.integers(0, (tokens - 1) // deployment.decode_block), label="hit")
    event("with a hit" if hit else "without")
    engines = Engines(deployment)
    if not deployment.makes_its_blocks:
        with pytest.raises(RuntimeError, match="the same --block-size and attention backend"):
            engines.connect()
        return
    engines.connect()
    assert engines.faults_of_a_prompt(tokens, hit, seed=data.draw(st.integers(0, 99))) == []


@often
@with_kernels_of_two_sizes
def test_kernel_blocks_of_two_sizes_with_prefix_hits(
    data: st.DataObject,
    ratio: int,
    **kernels: Any,  # noqa: ANN401 - of a Deployment
) -> None:
    deployment = Deployment(ratio, ratio, prefix_caching=True, **kernels)
    assert_all_is_read(data, deployment)


@pytest.mark.skipif(not since("0.22.0"), reason="from 0.22.0 on P's ids go by P's ratio")
@often
@with_kernels_of_two_sizes
def test_kernel_blocks_of_two_sizes_within_blocks_of_one(
    data: st.DataObject,
    ratio: int,
    split: int,
    **kernels: Any,  # noqa: ANN401 - of a Deployment
) -> None:
    """As where P's attention takes smaller blocks than D's, of one --block-size."""
    deployment = Deployment(ratio * split, ratio, split=split, prefix_caching=True, **kernels)
    assert_all_is_read(data, deployment)


@pytest.mark.skipif(
    not hasattr(NixlConnectorWorker, "_logical_to_remote_kernel_block_ids"),
    reason="upstream's own from 0.24.0 on",
)
class TestRemoteKernelBlockIds:
    def test_states_keep_their_ids(self) -> None:
        worker = make_worker(groups=("full", "mamba"), block_size=8, kernel_block_size=4)
        assert worker._logical_to_remote_kernel_block_ids(([2, 0], [7]), 3) == [
            [6, 7, 8, 0, 1, 2],
            [7],
        ]

    def test_no_blocks(self) -> None:
        worker = make_worker(groups=("full", "sliding"), block_size=8, kernel_block_size=4)
        assert worker._logical_to_remote_kernel_block_ids([[], [1]], 2) == [[], [2, 3]]

    def test_ratio_one_is_free(self) -> None:
        ids = [[1, 2]]
        assert make_worker()._logical_to_remote_kernel_block_ids(ids, 1) is ids


@pytest.mark.skipif(
    getattr(NixlConnectorWorker, "_apply_prefix_caching", None) is not blocks.apply_prefix_caching,
    reason="upstream's own from 0.23.0 on",
)
class TestApplyPrefixCaching:
    def test_group_fully_cached(self) -> None:
        # An empty local group once meant "the last 0 blocks": all of them.
        worker = make_worker(groups=("full", "sliding"))
        assert worker._apply_prefix_caching([[4], []], [[1, 2], [3]], 1) == ([[4], []], [[2], []])

    def test_arguments_stay_as_they_are(self) -> None:
        local, remote = [[4]], [[1, 2]]
        make_worker()._apply_prefix_caching(local, remote, 1)
        assert (local, remote) == ([[4]], [[1, 2]])

    def test_padding_before_a_state_of_a_server_that_caches_prefixes(self) -> None:
        worker = make_worker(groups=("full", "mamba"), block_size=8, kernel_block_size=4)
        local, remote = [[1, 2, 3, 4], [9]], [[5, 6, 7, 8], [0, 0, 0, 6]]
        assert worker._apply_prefix_caching(local, remote, 2) == (local, [[5, 6, 7, 8], [6]])
        # With speculative decoding there are blocks behind the state, as many on both sides.
        local, remote = [[1, 2], [7, 8, 9]], [[5, 6], [0, 3, 4, 5]]
        assert worker._apply_prefix_caching(local, remote, 2) == (local, [[5, 6], [3, 4, 5]])

    def test_the_state_before_it_of_a_server_that_guesses_as_we_do(self) -> None:
        with states(16, mode="none", guesses=2):
            worker = make_worker(groups=("full", "mamba"), block_size=8, kernel_block_size=4)
        local, attention = [[1, 2, 3, 4, 5, 6], [7, 8, 9]], [1, 2, 3, 4, 5, 6]
        for named, paired in [([0, 1, 2, 3, 4], [2, 3, 4]), ([0, 0, 2, 3, 4], [2, 3, 4])]:
            found = worker._apply_prefix_caching(local, [attention, named], 2)
            assert found == (local, [attention, paired])
        # One that guesses another number, or does not cache prefixes: any of them may be the state.
        for named in ([0, 0, 1, 2, 3, 4], [5, 1, 2, 3, 4], [0, 5, 1, 2, 3, 4]):
            with pytest.raises(ValueError, match="do not hold the same prompt"):
                worker._apply_prefix_caching(local, [attention, named], 2)
        # So it is where attention does not tell how long the prompt is: P names a block too many.
        for more in ([0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4]):
            with pytest.raises(ValueError, match="do not hold the same prompt"):
                worker._apply_prefix_caching(local, [[*attention, 7, 8], more], 2)
        # Or its blocks are of another size.
        with pytest.raises(ValueError, match="do not hold the same prompt"):
            worker._apply_prefix_caching(local, [[*attention, 7, 8, 9], [0, 1, 2, 3, 4]], 3)

    @pytest.mark.parametrize(
        ("groups", "local", "remote", "ratio"),
        [
            pytest.param(("full", "mamba"), [[1, 2], [3]], [[1, 2], [0, 3, 4]], 2, id="drafts"),
            pytest.param(("full",), [[1, 2]], [[1]], 2, id="more local than remote"),
            pytest.param(("full", "mamba"), [[1, 2], [3]], [[1, 2], [3, 4]], 2, id="states"),
            pytest.param(("full", "mamba"), [[1, 2], [3]], [[1, 2, 3, 4, 5, 6], [3]], 3, id="far"),
        ],
    )
    def test_no_one_prompt(
        self,
        groups: tuple[GroupKind, ...],
        local: list[list[int]],
        remote: list[list[int]],
        ratio: int,
    ) -> None:
        worker = make_worker(groups=groups, block_size=8, kernel_block_size=4)
        with pytest.raises(ValueError, match="do not hold the same prompt"):
            worker._apply_prefix_caching(local, remote, ratio)


class TestPairSmallerBlocks:
    def test_nothing_to_read(self) -> None:
        worker = make_worker()
        local: list[list[list[int]]] = [[], [[]]]
        for nothing in local:
            assert blocks.pair_smaller_blocks(worker, "r", nothing, [[1, 2]], 2) == ([], [[1, 2]])

    def test_more_than_the_prompt(self) -> None:
        with pytest.raises(ValueError, match="2 local blocks"):
            blocks.pair_smaller_blocks(make_worker(), "r", [[1, 2]], [[1, 2]], 2)

    @pytest.mark.parametrize(
        ("hit", "remote"), [(0, [1, 2]), (1, [1, 2, 3]), (0, [1, 2, 3, 4, 5, 6])]
    )
    def test_slots_reserved_for_guesses_are_no_part_of_the_prompt(
        self, hit: int, remote: list[int]
    ) -> None:
        """A draft model's, at our end: by the lengths there would be too many, or no hit."""
        worker = make_worker()
        worker.vllm_config.speculative_config = SimpleNamespace(num_speculative_tokens=3)
        meta: Any = SimpleNamespace(local_num_computed_blocks=(hit,))
        worker._recving_metadata["r"] = meta
        ours, theirs = blocks.pair_smaller_blocks(worker, "r", [[4, 5]], [remote], 2)
        assert theirs == [remote[2 * hit :][:4]]
        assert ours == [[8, 9, 10, 11][: len(theirs[0])]]

    def test_without_the_scheduler_s_word_the_lengths_say_what_was_cached(self) -> None:
        paired = blocks.pair_smaller_blocks(make_worker(), "r", [[4, 5]], [list(range(7))], 2)
        assert paired == ([[8, 9, 10]], [[4, 5, 6]])

    @pytest.mark.parametrize(("hit", "asked"), [(0, 6), (1, 2)])
    def test_more_than_the_prompt_and_its_guesses(self, hit: int, asked: int) -> None:
        """These take one more logical block of ours, of two kernel blocks."""
        worker = make_worker(block_size=8, kernel_block_size=4)
        worker.vllm_config.speculative_config = SimpleNamespace(num_speculative_tokens=7)
        meta: Any = SimpleNamespace(local_num_computed_blocks=(hit,))
        worker._recving_metadata["r"] = meta
        with pytest.raises(ValueError, match=f"{asked} local blocks"):
            blocks.pair_smaller_blocks(worker, "r", [list(range(asked))], [[1, 2, 3, 4]], 2)

    @pytest.mark.parametrize(("hit", "asked"), [(0, 2), (1, 1), (2, 1)])
    @pytest.mark.parametrize("guesses", [None, 0])
    def test_more_than_the_prompt_has_behind_what_was_cached(
        self, hit: int, asked: int, guesses: int | None
    ) -> None:
        worker = make_worker()
        if guesses is not None:
            config: Any = SimpleNamespace(num_speculative_tokens=guesses)
            worker.vllm_config.speculative_config = config
        meta: Any = SimpleNamespace(local_num_computed_blocks=(hit,))
        worker._recving_metadata["r"] = meta
        with pytest.raises(ValueError, match=f"{asked} local blocks"):
            blocks.pair_smaller_blocks(worker, "r", [list(range(4, 4 + asked))], [[1, 2]], 2)


class TestHandshake:
    @pytest.mark.skipif(not CAN_BE_UNSTATED, reason="always stated on this release")
    def test_stock_peer_of_a_plain_model_is_believed_with_a_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        engines = Engines(Deployment(2, 2, stated=False))
        with caplog.at_level(logging.WARNING, "vllm"):
            engines.connect()
        assert "does not say how many kernel blocks" in caplog.text
        assert engines.faults_of_a_prompt(21) == []

    @pytest.mark.skipif(not CAN_BE_UNSTATED, reason="always stated on this release")
    def test_stock_peer_whose_blocks_refute_our_ratio(self) -> None:
        worker = make_worker(block_size=8, kernel_block_size=4)
        peer = peer_metadata(worker, "P", physical_blocks_per_logical_kv_block=None, num_blocks=15)
        with pytest.raises(RuntimeError, match="15 kernel blocks"):
            worker.add_remote_agent(peer)

    @pytest.mark.skipif(not CAN_BE_UNSTATED, reason="always stated on this release")
    @pytest.mark.parametrize("ratio", [1, 2, 3])
    def test_stock_hybrid_of_the_smallest_ratio_goes_on_working(self, ratio: int) -> None:
        engines = Engines(Deployment(ratio, ratio, groups=("full", "mamba"), stated=False))
        engines.connect()
        assert engines.faults_of_a_prompt(21) == []

    @pytest.mark.skipif(not CAN_BE_UNSTATED, reason="always stated on this release")
    def test_stock_hybrid_whose_ratio_cannot_be_inferred(self) -> None:
        engines = Engines(Deployment(4, 4, groups=("full", "mamba"), stated=False), state_tokens=8)
        with pytest.raises(RuntimeError, match="cannot be inferred"):
            engines.connect()
        assert "P" not in engines.decode._physical_blocks_per_logical  # nothing is left behind

    def test_stock_peer_understands_ours(self) -> None:
        """A receiver that does not know the field drops it."""
        worker = make_worker(block_size=8, kernel_block_size=4)
        payload = worker.xfer_handshake_metadata
        assert payload is not None
        field = "physical_blocks_per_logical_kv_block"
        stock = dataclasses.make_dataclass(
            "Stock",
            [(f.name, f.type) for f in dataclasses.fields(NixlAgentMetadata) if f.name != field],
        )
        heard = msgspec.msgpack.Decoder(stock).decode(payload.agent_metadata_bytes)
        assert heard.num_blocks == worker.num_blocks
        assert msgspec.msgpack.decode(payload.agent_metadata_bytes)[field] == 2

    @pytest.mark.parametrize("ratio", [0, -1, 3])
    def test_ratio_that_cannot_be(self, ratio: int) -> None:
        worker = make_worker(block_size=8, kernel_block_size=4)
        with pytest.raises(RuntimeError, match="no whole number of logical blocks"):
            worker.add_remote_agent(
                peer_metadata(worker, "P", physical_blocks_per_logical_kv_block=ratio)
            )

    def test_larger_kernel_blocks_within_blocks_of_one_size(self) -> None:
        worker = make_worker(block_size=8, kernel_block_size=4)
        peer = peer_metadata(worker, "P", block_size=8, physical_blocks_per_logical_kv_block=1)
        with pytest.raises(RuntimeError, match=r"has 1 kernel blocks in a logical block \(8 tok"):
            blocks.refuse_other_block_size(worker, peer)

    def test_engine_whose_ranks_have_two_ratios(self) -> None:
        worker = make_worker(
            groups=("full", "mamba"), block_size=8, kernel_block_size=4, prefix_caching=False
        )
        worker.add_remote_agent(peer_metadata(worker, "P"))
        again = peer_metadata(worker, "P", physical_blocks_per_logical_kv_block=4)
        with pytest.raises(RuntimeError, match="ranks with 2 and with 4"):
            worker.add_remote_agent(again)

    def test_window_group_beside_states_needs_one_ratio(self) -> None:
        engines = Engines(Deployment(2, 4, groups=("full", "sliding", "mamba")))
        with pytest.raises(RuntimeError, match="SlidingWindowSpec"):
            engines.connect()
