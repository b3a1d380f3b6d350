"""Which blocks the offloading connector notes as given away, and which as on stock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

reused_blocks = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.offloading.reused_blocks",
    reason="0.21.0 to 0.32.0",
)


def block(number: int, *, shared: bool = False) -> SimpleNamespace:
    """A block; one that is shared holds a prefix."""
    return SimpleNamespace(
        block_id=number, block_hash=b"prefix" if shared else None, is_null=number == 0
    )


GIVEN = SimpleNamespace(
    blocks=([block(0), block(3), block(4, shared=True)], [block(0), block(7), block(0)])
)


def noted(scheduler: SimpleNamespace, tokens: int) -> list[tuple[Any, ...]]:
    """What upstream's own method is called with afterwards."""
    called: list[tuple[Any, ...]] = []
    reused_blocks.notes_what_others_load(lambda *all_of: called.append(all_of))(
        scheduler, "request", GIVEN, tokens
    )
    return called


def test_what_holds_no_prefix_is_noted_and_upstream_goes_on() -> None:
    scheduler = SimpleNamespace(_current_batch_allocated_block_ids={1})
    assert noted(scheduler, 0) == [(scheduler, "request", GIVEN, 0)]
    assert scheduler._current_batch_allocated_block_ids == {1, 3, 7}


def test_what_the_connector_loads_itself_it_notes_itself() -> None:
    scheduler = SimpleNamespace(_current_batch_allocated_block_ids={1})
    assert noted(scheduler, 16) == [(scheduler, "request", GIVEN, 16)]
    assert scheduler._current_batch_allocated_block_ids == {1}


def test_up_to_0_22_1_the_copies_of_such_blocks_are_waited_for_at_once() -> None:
    copies = {3: {10, 11}, 4: {12}, 5: {13}}  # none of block 7
    scheduler = SimpleNamespace(
        _current_batch_jobs_to_flush={9}, _block_id_to_pending_jobs=dict(copies)
    )
    noted(scheduler, 0)
    assert scheduler._current_batch_jobs_to_flush == {9, 10, 11}
    assert scheduler._block_id_to_pending_jobs == copies


def test_other_connectors_are_told_what_they_are_on_stock() -> None:
    class OffloadingConnector: ...

    class Own(OffloadingConnector): ...

    class LMCacheMPConnector: ...

    none = object()
    blocks = SimpleNamespace(new_empty=lambda: none)
    assert reused_blocks.blocks_for(OffloadingConnector(), blocks) is blocks
    for other in (Own(), LMCacheMPConnector()):
        assert reused_blocks.blocks_for(other, blocks) is none
