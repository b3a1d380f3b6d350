"""Kernel blocks that are read in parts, or permuted: refused where the release does not make blocks
of them."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tests.support.kv_landing import Deployment, Engines
from tests.support.nixl_worker import connect, make_worker, peer_metadata
from tests.support.release import since

parts = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.parts", reason="from 0.20.0 on"
)

HALVES = not since("0.26.0")
"""Keys and values may have a tensor each."""

REFUSAL = "the same --block-size and attention backend"

PERMUTE: Any = vars(utils).get("kv_postprocess_layout_on_receive")
"""What permutes whole blocks: up to 0.31.0."""


def refused(worker: Any, **changes: Any) -> bool:  # noqa: ANN401 - a worker, fields of a peer
    """Whether a peer is refused that has kernel blocks of half the size, if nothing else is said.

    It is a fact of the worker: nothing that the handshake enters is asked for.
    """
    peer = peer_metadata(worker, "P", **{"block_size": worker.block_size // 2, **changes})
    try:
        parts.refuse_unsorted_parts(worker, peer)
    except RuntimeError as refusal:
        assert REFUSAL in str(refusal)
        return True
    return False


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_only_peers_of_smaller_kernel_blocks_are_refused(mla: bool, whole: bool) -> None:
    worker = make_worker(mla=mla, whole=whole)
    expected = not Deployment(1, 1, split=2, mla=mla, whole=whole).makes_its_blocks
    assert refused(worker) is expected
    for factor in (1, 2):
        assert not refused(worker, block_size=worker.block_size * factor)


@pytest.mark.skipif(not HALVES, reason="up to 0.25.1")
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("heads_outermost", [False, True])
@pytest.mark.parametrize("permuted", [False, True])
def test_it_is_right_about_what_the_release_makes_of_two_parts(
    heads: int, heads_outermost: bool, permuted: bool
) -> None:
    cache = torch.zeros(4, 6, heads, 2)  # blocks, tokens, heads, elements
    if heads_outermost:
        cache = torch.zeros(4, heads, 6, 2).transpose(1, 2)
    wanted = torch.arange(1.0, 1 + 12 * heads).view(6, heads, 2)
    theirs = [
        part.transpose(0, 1) if heads_outermost or permuted else part for part in wanted.split(3)
    ]
    read = torch.cat([part.flatten() for part in theirs])
    ours = cache[2].transpose(0, 1) if heads_outermost else cache[2]
    ours.view(-1).copy_(read)
    name = "blksize_and_layout" if permuted else "blksize"
    sort: Any = getattr(utils, f"kv_postprocess_{name}_on_receive")
    sort(cache, torch.tensor([2]), 2)
    assert parts._is_sorted(cache, permuted) is torch.equal(cache[2], wanted)


@pytest.mark.skipif(not HALVES, reason="up to 0.25.1")
class TestHalves:
    def test_another_layout_is_another_order(self) -> None:
        worker = make_worker()
        assert not refused(worker, kv_cache_layout="HND")
        assert refused(worker, kv_cache_layout="NHD")

    def test_host_buffers_go_before_the_cache(self) -> None:
        worker = make_worker(whole=False)
        worker.use_host_buffer = True
        worker.host_buffer_kv_cache_layout = "HND"
        caches = worker.device_kv_caches
        worker.host_xfer_buffers = {name: cache.contiguous() for name, cache in caches.items()}
        assert refused(worker)
        worker.host_xfer_buffers = caches
        assert not refused(worker)
        worker.host_buffer_kv_cache_layout = "NHD"
        assert refused(worker, kv_cache_layout="HND")

    def test_every_cache_counts(self) -> None:
        worker = make_worker()
        for odd in (torch.zeros(2, 8, 16, 4, 8), torch.zeros(2, 8, 16, 8)):
            caches = {**worker.device_kv_caches, "odd": odd}
            other = make_worker()
            other.device_kv_caches = caches
            assert refused(other)
        assert not refused(worker)


def test_scales_behind_all_values_are_sorted_by_no_release() -> None:
    for mla in (False, True):
        worker = make_worker(mla=mla)
        worker.vllm_config.cache_config.cache_dtype = "nvfp4"
        assert refused(worker) is (not mla or (since("0.29.0") and not since("0.32.0")))


def test_a_draft_s_cache_beside_latent_ones_is_not_judged() -> None:
    """It is never sorted; what it says is verified."""
    worker = make_worker(mla=True)
    for name in worker.device_kv_caches:
        worker.device_kv_caches[name] = torch.zeros(8, 16, 40)
    worker.device_kv_caches["draft"] = torch.zeros(8, 4, 16, 16)
    assert not refused(worker)


@pytest.mark.parametrize("backend", ["CPU_ATTN", "ROCM_ATTN"])
def test_attention_that_packs_keys_by_the_block_takes_no_parts(backend: str) -> None:
    engines = Engines(Deployment(1, 1, split=2))
    engines.decode.backend_name = backend
    with pytest.raises(RuntimeError, match="lays them out differently"):
        engines.connect()
    connect(engines.decode, "Q")


@pytest.mark.parametrize("backend", ["CPU_ATTN", "ROCM_ATTN"])
def test_of_a_hybrid_it_need_not_be_the_first(backend: str) -> None:
    """vLLM goes by the first layer's; of many hybrids that one has a state."""
    engines = Engines(Deployment(1, 1, split=2))
    engines.decode.attn_backends = [
        SimpleNamespace(get_name=functools.partial(str, name)) for name in ("MAMBA2_ATTN", backend)
    ]
    with pytest.raises(RuntimeError, match=f"{backend} lays them out differently"):
        engines.connect()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kernel", [4, 8])
def test_blocks_of_another_layout_are_read_where_they_are_permuted_rightly(
    whole: bool, kernel: int
) -> None:
    deployment = Deployment(2, 2, kernel=kernel, layouts=("HND", "NHD"), whole=whole)
    engines = Engines(deployment)
    if not deployment.makes_its_blocks:
        with pytest.raises(RuntimeError, match="the same VLLM_KV_CACHE_LAYOUT and attention"):
            engines.connect()
        return
    engines.connect()
    assert engines.faults_of_a_prompt(29) == []


@pytest.mark.skipif(PERMUTE is None, reason="up to 0.31.0")
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("heads_outermost", [False, True])
def test_it_is_right_about_what_the_release_makes_of_a_permuted_block(
    heads: int, tokens: int, heads_outermost: bool
) -> None:
    """Read with heads outermost; the cache has them so or not, and is permuted in any case."""
    wanted = torch.arange(1.0, 1 + 2 * heads * tokens).view(heads, tokens, 2)
    if heads_outermost:
        cache = torch.zeros(4, heads, tokens, 2)  # in memory
        cache[2] = wanted
    else:
        cache = torch.zeros(4, tokens, heads, 2)
        cache[2] = wanted.view(tokens, heads, 2)
        cache = cache.transpose(1, 2)
    if HALVES:  # they name tokens before heads
        cache, wanted = cache.transpose(1, 2), wanted.transpose(0, 1)
    PERMUTE(cache, torch.tensor([2]))
    said = parts._is_sorted(cache, True) if HALVES else parts._is_permuted(cache)
    right = torch.equal(cache[2], wanted)
    assert said <= right
    # Up to 0.25.1 no layout but the right one gets there.
    assert right <= said or (HALVES and heads_outermost)


def worker_of(**different: Any) -> SimpleNamespace:  # noqa: ANN401 - of any type
    """What is asked of a worker, of whichever release."""
    known = {
        "use_mla": False,
        "vllm_config": SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="auto")),
        "transfer_topo": SimpleNamespace(),
        "use_host_buffer": False,
        "device_kv_caches": {"layer": torch.zeros(2, 8, 16, 4, 8)},
        "kv_cache_layout": "HND",
        "_layer_specs": {},
        "kv_transfer_config": SimpleNamespace(enable_permute_local_kv=True),
    }
    return SimpleNamespace(**known | different)


PEER = SimpleNamespace(kv_cache_layout="HND")

HEADS_FIRST = torch.zeros(2, 8, 4, 16, 8).transpose(2, 3)
"""Keys and values whose heads are outermost within a block."""


def latent(*dimensions: int) -> SimpleNamespace:
    """A worker with latent caches of so many dimensions."""
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    caches = {f"layer-{n}": torch.zeros([2] * n) for n in dimensions}
    return worker_of(
        use_mla=True, device_kv_caches=caches, _layer_specs=dict.fromkeys(caches, spec)
    )


def test_a_release_that_finds_the_tokens_sorts_every_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_KNOWS_TOKENS", True)
    assert parts._sorts_parts(worker_of(), PEER)
    assert parts._sorts_parts(latent(4), PEER)
    scales = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="nvfp4"))
    assert not parts._sorts_parts(worker_of(vllm_config=scales), PEER)


def test_another_one_sorts_halves_and_latent_caches_without_a_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "_KNOWS_TOKENS", False)
    one_head = {"layer": torch.zeros(2, 8, 16, 1, 8)}
    assert not parts._sorts_parts(worker_of(device_kv_caches=one_head), PEER)
    halves = SimpleNamespace(split_k_and_v=True)
    assert parts._sorts_parts(worker_of(device_kv_caches=one_head, transfer_topo=halves), PEER)
    caches = {"layer": HEADS_FIRST}
    worker = worker_of(device_kv_caches=caches, transfer_topo=halves)
    assert parts._sorts_parts(worker, PEER)
    assert not parts._sorts_parts(worker, SimpleNamespace(kv_cache_layout="NHD"))
    caches["odd"] = torch.zeros(2, 8, 16, 4, 8)
    assert not parts._sorts_parts(worker, PEER)
    assert parts._sorts_parts(latent(3), PEER)
    assert parts._sorts_parts(latent(3, 5), PEER)
    assert not parts._sorts_parts(latent(4), PEER)
    assert not parts._sorts_parts(latent(3, 4), PEER)


def test_what_has_more_dimensions_is_not_sorted_by_chance() -> None:
    assert not parts._is_sorted(torch.zeros(8, 2, 1, 16, 8), permuted=False)
    assert not parts._is_sorted(torch.zeros(8, 16, 1), permuted=False)


OTHER = {"kv_cache_layout": "NHD"}


def packed(heads: int, tokens: int) -> dict[str, torch.Tensor]:
    """A cache of one layer whose tokens are outermost within a block."""
    return {"layer": torch.zeros(2, tokens, heads, 8).transpose(1, 2)}


def test_nothing_is_permuted_that_need_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_KNOWS_TOKENS", False)
    odd = {**OTHER, "device_kv_caches": packed(2, 4)}
    assert not parts._permutes(worker_of(**odd), PEER)
    assert parts._permutes(worker_of(device_kv_caches=packed(2, 4)), PEER)
    assert parts._permutes(worker_of(use_mla=True, **odd), PEER)
    stays = SimpleNamespace(enable_permute_local_kv=False)
    assert parts._permutes(worker_of(kv_transfer_config=stays, **odd), PEER)
    buffer = {"use_host_buffer": True, "host_xfer_buffers": packed(2, 4)}
    assert parts._permutes(worker_of(host_buffer_kv_cache_layout="HND", **buffer, **odd), PEER)
    monkeypatch.setattr(parts, "_KNOWS_TOKENS", True)
    assert parts._permutes(worker_of(**odd), PEER)


def test_every_cache_has_to_be_permuted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_KNOWS_TOKENS", False)
    caches = {**packed(4, 4), "odd": packed(2, 4)["layer"]}
    assert parts._permutes(worker_of(device_kv_caches=packed(4, 4), **OTHER), PEER)
    assert not parts._permutes(worker_of(device_kv_caches=caches, **OTHER), PEER)


def test_halves_are_permuted_and_what_has_five_dimensions_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to 0.25.1, where the topology says what a cache is made of."""
    monkeypatch.setattr(parts, "_KNOWS_TOKENS", False)
    halves: dict[str, Any] = {"device_kv_caches": {"layer": torch.zeros(2, 8, 16, 4, 8)}, **OTHER}
    for split in (False, True):
        topology = SimpleNamespace(split_k_and_v=split)
        assert parts._permutes(worker_of(transfer_topo=topology, **halves), PEER) is split
    caches = {**halves["device_kv_caches"], "odd": HEADS_FIRST}
    worker = worker_of(transfer_topo=topology, device_kv_caches=caches, **OTHER)
    assert not parts._permutes(worker, PEER)
    assert parts._permutes(worker_of(**halves), PEER)  # later, nothing is said of it
