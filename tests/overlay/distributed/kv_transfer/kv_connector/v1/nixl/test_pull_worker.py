"""Failed receives, where the worker waits for the last read itself: what stock does as well."""

from __future__ import annotations

import pytest

from tests.nixl_release import NixlConnectorWorker
from tests.nixl_worker import connect, lives, make_worker, nixl_of, receive, step

pytestmark = pytest.mark.skipif(
    not hasattr(NixlConnectorWorker, "_cleanup_remote_engines"),
    reason="upstream does not look whether NIXL still knows a peer",
)


def test_a_peer_that_nixl_has_dropped_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can reach it, until the next handshake, and that is for the next request."""
    worker = make_worker()
    connect(worker, tp_size=2)
    nixl = nixl_of(worker)
    monkeypatch.setattr(nixl, "check_remote_metadata", lambda agent: False)
    receive(worker, "reads", tp_size=2)
    failed, flies = nixl.reads
    nixl.fail(failed)
    assert lives(step, worker)[1] == set()
    receive(worker, "hits", local_blocks=[[]], remote_request_id="req-q", tp_size=2)
    receive(worker, "comes late", remote_request_id="req-r", tp_size=2)
    assert lives(step, worker)[1] == {"comes late"}
    nixl.fail(flies)
    assert lives(step, worker)[1] == {"reads"}
    assert nixl.called("send_notif") == []
