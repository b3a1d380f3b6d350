"""A receive whose handshake has ended: its peer may have been evicted before it is read."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    await_handshakes,
    lives,
    make_worker,
    nixl_of,
    raising,
    receive,
    register_peer,
    script_handshake,
    step,
)

pytestmark = pytest.mark.skipif(
    not hasattr(NixlConnectorWorker, "_cleanup_remote_engine"), reason="from 0.24.0 on"
)


@pytest.fixture
def overlay() -> Any:  # noqa: ANN401 - the module
    name = "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.pull_receive"
    return pytest.importorskip(name, reason="up to 0.29.0")


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


def test_one_of_such_a_peer_does_not_fail_with_a_later_one_s_handshake() -> None:
    worker = make_worker(num_blocks=16)
    if hasattr(worker.xfer_stats, "record_failed_handshake"):
        pytest.skip("from 0.31.0 on upstream asks again")
    asked, lost = threading.Event(), [False, True, False]

    def shake_hands(engine_id: str, ranks: int) -> dict[Any, str]:
        assert asked.wait(10)
        if lost.pop(0):
            raise ConnectionError("nobody there")
        return register_peer(worker, engine_id, ranks)

    script_handshake(worker, shake_hands)
    receive(worker, "a", local_blocks=[[3, 4]], remote_request_id="a-at-p")
    asked.set()
    await_handshakes(worker)
    worker._cleanup_remote_engine("P")
    asked.clear()
    lives(receive, worker, "b", local_blocks=[[1, 2]], remote_request_id="b-at-p")
    asked.set()
    for _ in range(2):
        await_handshakes(worker)
        lives(step, worker)
    await_handshakes(worker)
    lives(step, worker)
    nixl_of(worker).finish(*nixl_of(worker).reads)
    assert lives(step, worker)[1] == {"a"}
    assert not worker.get_block_ids_with_load_errors() & {3, 4}


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


@pytest.mark.parametrize("counts", [False, True])
def test_who_has_ranks_that_do_not_fit_is_heard_where_that_is_not_counted(
    overlay: Any,  # noqa: ANN401
    counts: bool,
) -> None:
    """From 0.29.0 on upstream knows how many of a request's readers it waits for."""
    fits = raising(ValueError("3 ranks"), lambda ranks: ranks == 3)
    worker = SimpleNamespace(
        transfer_topo=SimpleNamespace(tp_ratio=fits),
        nixl_wrapper=mock.Mock(),
        xfer_stats=mock.Mock(),
    )
    if counts:
        worker.expected_consumer_notifications_by_req = {}
    worker.nixl_wrapper.get_new_notifs.return_value = {"D": [b"a:1", b"b:3"]}
    assert overlay.notifications(worker) == [[b"a:1", b"b:3"][: 1 + counts]]


@pytest.mark.parametrize(("agents", "rank"), [({3: "P/3"}, 3), ({(0, 3): "P/3"}, (0, 3))])
@pytest.mark.parametrize("before", [{}, {"asked": [1]}])
@pytest.mark.parametrize("posts", [[], [2]])
def test_the_rank_of_a_read_is_noted_and_of_one_that_need_not_wait(
    overlay: Any,  # noqa: ANN401
    agents: dict[Any, str],
    rank: object,
    before: dict[str, list[int]],
    posts: list[int],
) -> None:
    def read(self: Any, spec: object, engine_id: str, req_id: str) -> None:  # noqa: ANN401
        if posts:
            self._recving_transfers.setdefault(req_id, []).extend(posts)

    reads = {req_id: [*handles] for req_id, handles in before.items()}
    worker = SimpleNamespace(
        _remote_agents={"P": agents}, _recving_transfers=reads, _receives=mock.Mock()
    )
    spec = SimpleNamespace(remote_rank=3)
    overlay.notes_reads(read)(worker, request_id="asked", read_spec=spec, dst_engine_id="P")
    noted = worker._receives
    assert noted.read_posted.call_args_list == [mock.call(handle, rank) for handle in posts]
    told = bool(before) and not posts
    assert noted.told.call_args_list == [mock.call("asked", rank)] * told
