"""Who is refused because the heads of an NVFP4 cache would be cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.regressions.test_k30 import faults
from tests.support.nixl_worker import make_worker, peer_metadata

cut_scales = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.cut_scales",
    reason="0.21.0 to 0.32.0",
)


def refusal(worker: Any, ranks: int) -> str:  # noqa: ANN401 - a worker
    """How a peer of so many ranks is refused; empty if it is not."""
    try:
        cut_scales.refuse_cut_scales(worker, SimpleNamespace(engine_id="P"), ranks)
    except RuntimeError as error:
        return str(error)
    return ""


def worker_of(ranks: int, *groups: Any) -> Any:  # noqa: ANN401 - kinds of groups, a worker
    return make_worker(tp_size=ranks, groups=groups, whole=True)


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (16, 16), (8, 16)])
def test_whole_pages_are_read(ranks: tuple[int, int]) -> None:
    assert faults(*ranks) == []


@pytest.mark.parametrize(
    ("ours", "refused"), [(1, [2, 8, 16]), (2, [1, 8, 16]), (8, [1, 2]), (16, [1, 2])]
)
def test_by_the_heads_that_a_rank_holds(ours: int, refused: list[int]) -> None:
    worker = worker_of(ours, "nvfp4")
    assert [ranks for ranks in (1, 2, 8, 16) if refusal(worker, ranks)] == refused


def test_the_refusal_says_what_to_start_both_with() -> None:
    assert refusal(worker_of(2, "nvfp4"), 4) == (
        "NIXL handshake: a rank of engine P holds 2 KV heads, one of this engine 4, and an NVFP4 "
        "cache cannot be cut by heads. Start prefill and decode with the same "
        "--tensor-parallel-size (now 4 and 2), or another --kv-cache-dtype."
    )


def test_other_caches_are_cut_as_ever() -> None:
    assert refusal(worker_of(2, "full"), 4) == ""
    assert refusal(make_worker(mla=True, tp_size=2), 4) == ""


def test_one_layer_is_enough() -> None:
    worker = worker_of(2, "full")
    mode = SimpleNamespace(is_nvfp4=True)
    plain, packed = SimpleNamespace(), SimpleNamespace(kv_quant_mode=mode)
    for specs, refused in [
        ({"a": plain}, False),
        ({"a": plain, "b": packed}, True),
        ({"a": SimpleNamespace(kv_cache_specs={"a": plain, "b": packed})}, True),
        ({"a": SimpleNamespace(kv_cache_specs={"a": plain})}, False),
    ]:
        worker._layer_specs = specs
        assert bool(refusal(worker, 4)) is refused


def test_a_latent_cache_is_read_whole_and_who_pushes_is_as_on_stock() -> None:
    worker = worker_of(2, "nvfp4")
    worker.use_mla = True
    assert refusal(worker, 4) == ""
    worker.use_mla = False
    worker._TRANSFER_MODE = "push"
    assert refusal(worker, 4) == ""


def test_a_peer_is_refused_before_its_blocks_are_looked_at() -> None:
    worker = worker_of(2, "nvfp4")
    with pytest.raises(RuntimeError, match="cannot be cut by heads"):
        worker.add_remote_agent(peer_metadata(worker, "P", 0, 1), 0, 1)
