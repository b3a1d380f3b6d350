"""Of layers that begin at one address the longest page is read, where both sides have it whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.shared_regions",
    reason="0.30.0 to 0.32.0",
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.shared_regions import (
    note_page,
    refuse_cut_pages,
    whole_block_len,
)

ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
STATES = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))

ADDRESS = 4096
ELSEWHERE = 8192


def worker(mode: str = "pull", *, replicated: bool = False) -> Any:  # noqa: ANN401 - a stand-in
    """Two regions, whose blocks are 1024 bytes apart and 256 long as far as the handshake says."""
    return SimpleNamespace(
        _TRANSFER_MODE=mode,
        _is_region_replicated=lambda _: replicated,
        block_len_per_layer=[256, 256],
        block_size=16,
        block_stride_per_layer=[1024, 1024],
        engine_id="D",
        kv_caches_base_addr={"D": {0: [ADDRESS, ELSEWHERE]}},
        tp_rank=0,
        world_size=1,
    )


def test_without_longer_pages_a_region_is_as_on_stock() -> None:
    made = worker()
    assert whole_block_len(made, 0, 2) == 128
    note_page(made, ADDRESS, 128, 1024, ATTENTION)
    assert whole_block_len(made, 0, 2) == 128


@pytest.mark.parametrize(
    ("mode", "stride", "spec", "length"),
    [
        ("pull", 1024, ATTENTION, 768),
        ("push", 1024, ATTENTION, 256),
        ("pull", 512, ATTENTION, 256),  # other blocks: not the rows that are read
        ("pull", 1024, STATES, 256),  # read by descriptors of their own
    ],
)
def test_the_longest_page_of_the_same_rows_is_read(
    mode: str, stride: int, spec: object, length: int
) -> None:
    made = worker(mode)
    for page in (512, 768, 640):
        note_page(made, ADDRESS, page, stride, spec)
    assert whole_block_len(made, 0) == length
    assert whole_block_len(made, 1) == 256


@pytest.mark.parametrize(
    ("ranks", "replicated", "block_size", "stride", "refused"),
    [
        (1, False, 16, 1024, False),
        (2, False, 16, 1024, True),
        (2, True, 16, 1024, False),
        (1, False, 8, 1024, True),
        (1, False, 16, 768, False),
        (1, False, 16, 767, True),
    ],
)
def test_a_peer_that_cannot_be_read_whole_is_refused(
    ranks: int, replicated: bool, block_size: int, stride: int, refused: bool
) -> None:
    made = worker(replicated=replicated)
    said: Any = SimpleNamespace(block_size=block_size, block_strides=[stride, stride])
    refuse_cut_pages(made, said, ranks)  # nothing is cut
    note_page(made, ADDRESS, 768, 1024, ATTENTION)
    if not refused:
        refuse_cut_pages(made, said, ranks)
        return
    with pytest.raises(RuntimeError, match="up to 768 bytes"):
        refuse_cut_pages(made, said, ranks)
