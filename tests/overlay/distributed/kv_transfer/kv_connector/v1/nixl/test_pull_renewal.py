"""Which failures of a read disconnect its peer, where the worker itself keeps failed receives."""

from __future__ import annotations

import pytest

from tests.support.nixl_worker import (
    connect,
    lives,
    make_worker,
    nixl_of,
    raising,
    receive,
    register_peer,
    script_handshake,
    step,
)

renewal = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.renewal", reason="up to 0.31.0"
)
pull_renewal = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.pull_renewal",
    reason="0.30.0 to 0.31.0",
)


class nixlInvalidParamError(Exception):  # noqa: N801 - NIXL's own name
    """What NIXL raises for numbers of blocks that the peer does not have."""


DROPPED = RuntimeError("NIXL_ERR_NOT_FOUND")
MADE_UP = nixlInvalidParamError("NIXL_ERR_INVALID_PARAM")


@pytest.mark.parametrize(
    ("errors", "disconnects"),
    [
        ([DROPPED], True),
        ([MADE_UP], False),
        ([MADE_UP, DROPPED], True),
        ([MADE_UP, MADE_UP], False),
    ],
)
def test_a_read_that_cannot_be_made(errors: list[Exception], disconnects: bool) -> None:
    worker = make_worker()
    connect(worker, "P")
    script_handshake(worker, lambda engine_id, tp_size: register_peer(worker, engine_id, tp_size))
    nixl = nixl_of(worker)
    for block, error in enumerate(errors, start=1):
        nixl.on["make_prepped_xfer"] = raising(error)
        lives(receive, worker, f"bad-{block}", local_blocks=[[block]], remote_blocks=[[block]])
        lives(step, worker)
    nixl.on.clear()
    lives(receive, worker, "next", local_blocks=[[9]], remote_blocks=[[9]])
    assert bool(nixl.called("remove_remote_agent")) is disconnects


def test_what_fails_before_nixl_is_asked_disconnects_nobody() -> None:
    worker = make_worker()
    connect(worker, "P")
    nixl = nixl_of(worker)
    lives(receive, worker, "bad", local_blocks=[[1]], remote_blocks=[[1], [2]])
    lives(step, worker)
    lives(receive, worker, "next", local_blocks=[[9]], remote_blocks=[[9]])
    assert nixl.called("remove_remote_agent") == []


def test_a_peer_is_tried_once_for_a_read_whose_handle_nixl_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def reach(*address: object) -> None:
        tried.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(renewal, "_reach", reach)
    worker = make_worker()
    connect(worker, "P")
    nixl = nixl_of(worker)
    for block in (1, 2):
        lives(receive, worker, f"bad-{block}", local_blocks=[[block]], remote_blocks=[[block]])
        nixl.fail(nixl.reads[-1])
        nixl.on["release_xfer_handle"] = raising(RuntimeError("in use"))
        for _ in range(5):
            assert lives(step, worker) == (set(), set())
        assert len(tried) == block
    nixl.on.clear()
    assert lives(step, worker)[1] == {"bad-1", "bad-2"}
    assert worker.get_block_ids_with_load_errors() == {1, 2}
    assert len(tried) == 2
