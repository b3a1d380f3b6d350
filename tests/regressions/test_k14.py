"""K14: a lease that has run out ends, also behind one that lives."""

from __future__ import annotations

import time

import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import hold, make_worker, nixl_of, sent

# From 0.22.0 on. Before, all leases have one length and none is prolonged: the oldest end first.
LEASES_DIFFER = hasattr(NixlConnectorWorker, "_handle_heartbeat")


def test_behind_a_lease_that_a_heartbeat_prolonged() -> None:
    worker = make_worker(engine_id="P")
    worker._lease_extension = 20  # in seconds; vLLM's default
    hold(worker, "waits-at-d", time.perf_counter() + 0.2)
    hold(worker, "d-is-gone", time.perf_counter() + 0.3)
    if LEASES_DIFFER:
        nixl_of(worker).inbox["D/0"] = [b"HB:waits-at-d"]
    assert sent(worker) == set()
    time.sleep(0.4)
    assert sent(worker) == {"d-is-gone"} | (set() if LEASES_DIFFER else {"waits-at-d"})
    assert sent(worker) == set()


@pytest.mark.parametrize("dead", [1, 3])
def test_behind_a_lease_for_a_second_turn(dead: int) -> None:
    """Where blocks are read in both directions, some leases are much longer than others."""
    worker = make_worker(engine_id="P")
    leases = {"long": 480}
    for number in range(dead):
        leases |= {f"short-{number}": -1, f"lives-{number}": 30}
    for req_id in leases if LEASES_DIFFER else sorted(leases, key=leases.__getitem__):
        hold(worker, req_id, time.perf_counter() + leases[req_id])
    assert sent(worker) == {f"short-{number}" for number in range(dead)}
    assert sent(worker) == set()
