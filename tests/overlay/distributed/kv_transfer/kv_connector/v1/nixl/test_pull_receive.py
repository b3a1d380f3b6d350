"""A receive whose handshake has ended: its peer may have been evicted before it is read."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    await_handshakes,
    lives,
    make_worker,
    nixl_of,
    receive,
    register_peer,
    script_handshake,
    step,
)

pytestmark = pytest.mark.skipif(
    not hasattr(NixlConnectorWorker, "_cleanup_remote_engine"), reason="from 0.24.0 on"
)


def test_a_peer_that_was_evicted_before_it_was_read_is_met_again() -> None:
    worker = make_worker(num_blocks=16)
    asked = threading.Event()

    def shake_hands(engine_id: str, ranks: int) -> dict[Any, str]:
        assert asked.wait(10)
        return register_peer(worker, engine_id, ranks)

    script_handshake(worker, shake_hands)
    lives(receive, worker)
    asked.set()
    await_handshakes(worker)
    worker._cleanup_remote_engine("P")
    for _ in range(2):
        lives(step, worker)
        await_handshakes(worker)
    lives(step, worker)
    nixl_of(worker).finish(*nixl_of(worker).reads)
    assert lives(step, worker) == (set(), {"req-d"})
    assert not worker.get_block_ids_with_load_errors()


def test_a_step_does_not_wait_for_the_agents_of_a_handshake_that_has_just_ended() -> None:
    worker = make_worker(num_blocks=16)
    if hasattr(worker.xfer_stats, "record_failed_handshake"):
        pytest.skip("from 0.31.0 on upstream asks again until they are entered")
    asked = threading.Event()

    def shake_hands(engine_id: str, ranks: int) -> dict[Any, str]:
        assert asked.wait(10)
        return register_peer(worker, engine_id, ranks)

    script_handshake(worker, shake_hands)
    receive(worker, "a", local_blocks=[[3, 4]], remote_request_id="a-at-p")
    with worker._handshake_lock:  # as while the main thread asks for receives
        asked.set()
        worker._handshake_futures["P"].result(10)
        lives(receive, worker, "b", local_blocks=[[1, 2]], remote_request_id="b-at-p")
        lives(step, worker)
        assert "P" not in worker._remote_agents
    await_handshakes(worker)
    lives(step, worker)
    nixl_of(worker).finish(*nixl_of(worker).reads)
    assert lives(step, worker)[1] == {"a", "b"}
    assert not worker.get_block_ids_with_load_errors()
