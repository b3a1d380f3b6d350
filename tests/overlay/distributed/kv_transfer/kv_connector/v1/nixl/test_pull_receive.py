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
