"""Which blocks a step zeroes when it starts a load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import connect, nixl_of

zeroing = pytest.importorskip("vllm_overlay.v1.core.sched.zeroing", reason="up to 0.25.1")

OURS = list(range(1, 7))
"""The request's blocks, of 16 tokens."""

LIKE_OURS = {"remote_block_ids": [[11, 12, 13, 14, 15], [20]], "tp_size": 2}


class NixlPullConnector:
    """What NIXL's connector is told by."""


class SomeNixlConnector(NixlPullConnector):
    """One derived from it."""


class OtherConnector:
    """One that may write some of a block."""


def left(
    end: int = 79,
    loaded: int | None = None,
    *,
    connector: object = None,
    params: object = LIKE_OURS,
    zeroes: bool = True,
    size: int = 16,
    state: int = 1,
) -> list[int]:
    """Return which of its own blocks, and of two that another was given, the step zeroes.

    An attention block has `size` tokens of 10 bytes, a state `state` numbers of 2 bytes.
    """
    blocks = [SimpleNamespace(block_id=block) for block in OURS]
    manager = SimpleNamespace(
        block_size=size, new_block_ids=[8, *OURS, 9], req_to_blocks={"it": blocks}
    )
    mamba = MambaSpec(
        block_size=size,
        shapes=((state,),),
        dtypes=(torch.float16,),
        page_size_padded=10 * size,
    )
    states = SimpleNamespace(block_size=0, new_block_ids=[], req_to_blocks={})
    scheduler: Any = SimpleNamespace(
        needs_kv_cache_zeroing=zeroes,
        connector=NixlPullConnector() if connector is None else connector,
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2)),
        kv_cache_manager=SimpleNamespace(
            coordinator=SimpleNamespace(single_type_managers=(manager, states))
        ),
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(
                    kv_cache_spec=SimpleNamespace(block_size=size, page_size_bytes=10 * size)
                ),
                SimpleNamespace(kv_cache_spec=mamba),
            ]
        ),
    )
    request: Any = SimpleNamespace(
        request_id="it", num_computed_tokens=end, kv_transfer_params=params
    )
    zeroing.spares_loaded(scheduler, request, end if loaded is None else loaded)
    assert states.new_block_ids == []
    return manager.new_block_ids


def test_what_is_not_loaded_is_zeroed() -> None:
    assert left() == [8, 6, 9]
    assert left(80) == [8, 6, 9]


def test_a_hit_of_ones_own_cache_is_not_loaded() -> None:
    # Another computes these blocks in the same step.
    assert left(79, 79 - 32) == [8, 1, 2, 6, 9]


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {**LIKE_OURS, "tp_size": 4},
        {**LIKE_OURS, "remote_block_ids": [[11, 12, 13], [20]]},
        {**LIKE_OURS, "remote_block_ids": [[11, 12, 13, 14, 15, 16], [20]]},
        {**LIKE_OURS, "remote_block_ids": []},
        {**LIKE_OURS, "remote_block_ids": None},
    ],
)
def test_of_a_p_that_may_be_unlike_the_last_block_is_zeroed(params: object) -> None:
    assert left(params=params) == [8, 5, 6, 9]
    assert left(80, params=params) == [8, 6, 9]  # its tokens fill it


@pytest.mark.parametrize(("state", "zeroed"), [(80, [3]), (81, [])])
def test_a_p_whose_blocks_may_be_smaller_reads_some_of_the_last_block(
    state: int, zeroed: list[int]
) -> None:
    # Half of a block of 32 tokens holds a state of 160 bytes, so P may have been started with it.
    params = {**LIKE_OURS, "remote_block_ids": [[11, 12, 13], [20]]}
    assert left(params=params, size=32, state=state) == [8, *zeroed, 4, 5, 6, 9]


def test_another_connector_may_write_some_of_the_last_block() -> None:
    assert left(connector=OtherConnector()) == [8, 5, 6, 9]
    several = SimpleNamespace(_connectors=[OtherConnector()])
    assert left(connector=several) == [8, 5, 6, 9]


def test_nixl_may_be_one_of_several() -> None:
    several = SimpleNamespace(_connectors=[OtherConnector(), SomeNixlConnector()])
    assert left(connector=several) == [8, 6, 9]


def test_a_model_without_states() -> None:
    assert left(zeroes=False) == [8, *OURS, 9]


def test_what_failed_to_arrive_is_computed_in_zeroed_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = DecodeEngine(groups=("full", "mamba"))
    connect(engine.worker, "P")
    nixl_of(engine.worker).on["check_xfer_state"] = lambda handle: "ERR"
    schedule, decided = engine.scheduler.schedule, []

    def note() -> SchedulerOutput:
        decided.append(schedule())
        return decided[-1]

    monkeypatch.setattr(engine.scheduler, "schedule", note)
    engine.ask("failed", range(100, 140), [[5, 6, 7], [5]])
    for _ in range(5):
        engine.step()
    first = next(step for step in decided if "failed" in step.num_scheduled_tokens)
    assert first.num_scheduled_tokens == {"failed": 40}
    attention, _ = first.scheduled_new_reqs[0].block_ids
    assert sorted(first.new_block_ids_to_zero) == sorted(attention)
