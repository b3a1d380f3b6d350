"""Notifications to peers that are not connected: bounded, and made on vLLM's threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.nixl_release import NixlConnectorMetadata
from tests.support.nixl_worker import nixl_of, rank_key, step
from tests.support.side_channel import Fleet, SideChannel, silent
from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import notifications
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.notifications import (
    MAX_PEERS,
    pending_notifications,
)
from vllm_overlay.logging_utils.bounded_log import LINES

HANDSHAKES = "vllm-nixl-handshake-initiator"


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


def failed(fleet: Fleet) -> int:
    """What the metric counts; taking it resets it."""
    stats = fleet.worker.get_kv_connector_stats()
    return len(stats.data["num_failed_notifications"]) if stats else 0


def test_every_request_of_a_peer_is_told_and_the_peer_asked_once(fleet: Fleet) -> None:
    """A restarted D may be asked to give up hundreds at once."""
    place = fleet.serve("P", tp_size=2)
    for i in range(3 * MAX_PEERS):
        fleet.leave(f"left-{i}", "P", tp_size=2)
    assert fleet.until(lambda: fleet.heard() and not pending_notifications(fleet.worker))
    # Each once; those that come when it is registered may go before those that waited for it.
    told = sorted(b"left-%d-at-p:1" % i for i in range(3 * MAX_PEERS))
    assert {rank: sorted(words) for rank, words in fleet.heard().items()} == {
        "P/0": told,
        "P/1": told,
    }
    # Once more for those that come while it is being registered.
    assert place.asked in ([0, 1], [0, 1, 0, 1])
    assert len(nixl_of(fleet.worker).called("add_remote_agent")) == 2
    assert failed(fleet) == 0


def test_nixl_is_entered_by_the_threads_of_vllm_only(fleet: Fleet) -> None:
    entered: list[str] = []
    nixl = nixl_of(fleet.worker)
    for call in ("add_remote_agent", "prep_xfer_dlist", "send_notif"):
        nixl.on[call] = lambda *_: entered.append(threading.current_thread().name)
    fleet.serve("P")
    fleet.leave("left", "P")
    assert fleet.until(fleet.heard)
    registering, main = entered[:-1], entered[-1]
    assert len(registering) >= 2
    assert all(name.startswith(HANDSHAKES) for name in registering), registering
    assert main == threading.current_thread().name


def test_a_handshake_begins_on_the_main_thread(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There alone vLLM parts with idle engines (from 0.24.0 on): it enters NIXL, without a lock."""
    begun: list[str] = []
    executor, nixl = fleet.worker._handshake_initiation_executor, nixl_of(fleet.worker)
    submit = executor.submit

    def noting(*args: Any) -> Any:  # noqa: ANN401 - a future
        begun.append(threading.current_thread().name)
        return submit(*args)

    monkeypatch.setattr(executor, "submit", noting)
    for call in ("release_dlist_handle", "remove_remote_agent"):
        nixl.on[call] = lambda *_: begun.append(threading.current_thread().name)
    fleet.serve("old")
    fleet.read("old")
    assert fleet.until(fleet.reads)
    for read in nixl.in_flight():
        read.state = "DONE"
    parts = hasattr(fleet.worker, "_engine_ttl")
    if parts:
        assert fleet.until(lambda: not fleet.worker._recving_transfers)
        fleet.worker._engine_last_active["old"] -= 2 * fleet.worker._engine_ttl
    fleet.serve("P")
    fleet.leave("left", "P")
    assert fleet.until(fleet.heard)
    assert set(begun) == {threading.current_thread().name}
    assert ("old" in fleet.worker._remote_agents) != parts


def test_a_handshake_that_cannot_begin_is_a_failed_notification(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    fleet.serve("P")
    fleet.leave("left", "P")
    monkeypatch.setattr(fleet.worker._handshake_initiation_executor, "submit", refuse)
    assert fleet.until(lambda: not pending_notifications(fleet.worker))
    assert failed(fleet) == 1
    monkeypatch.undo()
    fleet.read()
    assert fleet.until(fleet.reads)


def test_without_room_for_a_thread_a_peer_is_told_as_on_stock(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM has a thread of its own since its first handshake."""
    start = threading.Thread.start

    def full(thread: threading.Thread) -> None:
        if thread.name.startswith("kvfix"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", full)
    place = fleet.serve("P")
    fleet.leave("left", "P")
    fleet.leave("left too", "P")
    assert fleet.until(lambda: fleet.heard() and not pending_notifications(fleet.worker))
    assert fleet.heard() == {"P/0": [b"left-at-p:1", b"left too-at-p:1"]}
    assert (place.asked, failed(fleet)) == ([0], 0)


def test_what_was_heard_for_others_is_not_taken_for_later_ones(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read connects first; then P starts again under its id, and D forgets what it knew."""
    asked, goes_on = threading.Event(), threading.Event()
    ask = notifications.Notifications._ask

    def slowly(*args: Any) -> Any:  # noqa: ANN401 - what was heard
        heard = ask(*args)
        asked.set()
        goes_on.wait(20)
        return heard

    monkeypatch.setattr(notifications.Notifications, "_ask", slowly)
    place = fleet.serve("P")
    fleet.leave("left", "P")
    assert asked.wait(20)
    fleet.read()
    assert fleet.until(lambda: fleet.reads() and fleet.heard())
    goes_on.set()
    before = len(place.asked)
    with fleet.worker._handshake_lock:
        del fleet.worker._remote_agents["P"]
    fleet.leave("next", "P")
    assert fleet.until(lambda: len(place.asked) > before)


@pytest.fixture
def busy(fleet: Fleet) -> Iterator[threading.Event]:
    """vLLM's handshake thread is at work for others, until this is set."""
    over = threading.Event()
    fleet.worker._handshake_initiation_executor.submit(over.wait, 20)
    yield over
    over.set()


@pytest.mark.parametrize(("took", "slept", "asked"), [(0.6, 0.6, [0]), (0.0, 1.2, [0, 0])])
def test_what_was_heard_long_ago_is_asked_again(
    fleet: Fleet,
    busy: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    took: float,
    slept: float,
    asked: list[int],
) -> None:
    """As by an engine that slept in between, and whose P may have started again."""
    now, passed = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now() + passed * notifications.PATIENCE)

    def slowly(_: int) -> bool:
        nonlocal passed
        passed = max(passed, took)
        return True

    place = fleet.serve("P", answers=slowly)
    fleet.leave("left", "P")
    vars(fleet.worker)["_notifications"]._asked[2].result(20)
    passed += slept
    step(fleet.worker)
    assert bool(fleet.worker._handshake_futures) is (asked == [0])  # else it is the notifier's turn
    busy.set()
    assert fleet.until(fleet.heard)
    assert place.asked == asked


def begin_registration(fleet: Fleet) -> SideChannel:
    """P has been asked; what it said is to be registered when the handshake thread gets there."""
    place = fleet.serve("P")
    fleet.leave("left", "P")
    assert fleet.until(lambda: fleet.worker._handshake_futures)
    return place


def test_what_was_heard_before_a_long_line_is_asked_again(
    fleet: Fleet, busy: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P may have started again while the handshakes before it took their time."""
    place, now = begin_registration(fleet), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 2 * notifications.PATIENCE)
    busy.set()
    assert fleet.until(fleet.heard)
    assert place.asked == [0, 0]


def test_a_read_uses_nothing_that_was_heard_before_it_came(
    fleet: Fleet, busy: threading.Event
) -> None:
    place = begin_registration(fleet)
    fleet.read()
    busy.set()
    assert fleet.until(lambda: fleet.reads() and fleet.heard())
    assert place.asked == [0, 0]
    assert len(nixl_of(fleet.worker).called("add_remote_agent")) == 1


def test_a_read_uses_nothing_that_was_asked_before_it_came(
    fleet: Fleet, busy: threading.Event
) -> None:
    answers = threading.Event()
    place = fleet.serve("P", answers=lambda _: answers.wait(20))
    fleet.leave("left", "P")
    fleet.read()
    answers.set()
    assert fleet.until(lambda: pending_notifications(fleet.worker) == 1)
    busy.set()
    assert fleet.until(lambda: fleet.reads() and fleet.heard())
    assert place.asked == [0, 0]


def test_what_is_to_be_told_later_leaves_what_was_heard(
    fleet: Fleet, busy: threading.Event
) -> None:
    place = begin_registration(fleet)
    fleet.leave("next", "P")
    busy.set()
    assert fleet.until(lambda: len(fleet.heard().get("P/0", ())) == 2)
    assert place.asked == [0]


def test_another_address_of_an_engine_leaves_what_was_heard_of_it(
    fleet: Fleet, busy: threading.Event
) -> None:
    answers = threading.Event()
    first = fleet.serve("P", answers=lambda _: answers.wait(20))
    fleet.leave("left", "P")
    other = fleet.serve("P")
    fleet.leave("next", "P")
    answers.set()
    assert fleet.until(lambda: other.asked)
    busy.set()
    assert fleet.until(lambda: len(fleet.heard().get("P/0", ())) == 2)
    assert (first.asked, other.asked) == ([0], [0])


def test_a_notification_has_two_steps_before_it(fleet: Fleet, busy: threading.Event) -> None:
    """An idle engine goes on for as long as there are any, and sooner as one is taken."""
    assert pending_notifications(fleet.worker) == 0
    fleet.serve("P")
    fleet.leave("left", "P")
    assert pending_notifications(fleet.worker) == 2
    assert fleet.until(lambda: fleet.worker._handshake_futures)
    assert pending_notifications(fleet.worker) == 1
    busy.set()
    vars(fleet.worker)["_notifications"]._settled.result(20)
    assert pending_notifications(fleet.worker) == 1  # the next step tells
    assert fleet.until(fleet.heard)
    assert pending_notifications(fleet.worker) == 0
    fleet.worker._ready_requests.put(("a read", None))
    assert pending_notifications(fleet.worker) == 0


def test_a_handshake_that_is_under_way_is_shared(
    fleet: Fleet, busy: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many others wait to be told."""
    monkeypatch.setattr(notifications, "MAX_PEERS", 0)
    place = fleet.serve("P")
    fleet.read()
    fleet.leave("left", "P")
    busy.set()
    assert fleet.until(lambda: fleet.reads() and fleet.heard())
    assert place.asked == [0]
    assert len(fleet.reads()) == 1
    assert failed(fleet) == 0


@pytest.mark.parametrize("name", ["_nixl_handshake", "add_remote_agent"])
def test_a_worker_with_a_handshake_of_its_own_makes_it_as_on_stock(
    fleet: Fleet, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plugins have such workers. NIXL gets nothing from a thread that is not vLLM's."""
    threads: list[str] = []
    ours = getattr(type(fleet.worker), name)

    def theirs(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - as ours
        threads.append(threading.current_thread().name)
        return ours(*args, **named)

    monkeypatch.setattr(type(fleet.worker), name, theirs)
    place = fleet.serve("P")
    fleet.leave("left", "P")
    assert fleet.until(fleet.heard)
    assert [thread.startswith(HANDSHAKES) for thread in threads] == [True]
    assert place.asked == [0]


def test_a_worker_without_a_table_of_handshakes_is_left_as_on_stock() -> None:
    """Some of vLLM's own tests have such a worker, up to 0.30.0."""
    shaken: list[str] = []

    class Bare:
        @notifications.finds_network_part_done
        def _nixl_handshake(self) -> None:
            pass

        @notifications.notes_aside
        def add_remote_agent(self) -> None:
            pass

        @notifications.notifies_aside
        def _background_nixl_handshake(self, req_id: str, engine_id: str, meta: object) -> None:
            shaken.append(req_id)

    worker = Bare()
    worker._background_nixl_handshake("left", "P", SimpleNamespace(local_block_ids=[]))
    assert shaken == ["left"]
    assert vars(worker) == {}


def test_a_peer_is_registered_once_whoever_comes_first(fleet: Fleet) -> None:
    fleet.serve("P")
    fleet.leave("left", "P")
    fleet.read()
    assert fleet.until(lambda: fleet.reads() and fleet.heard())
    assert fleet.until(lambda: not pending_notifications(fleet.worker))
    assert len(nixl_of(fleet.worker).called("add_remote_agent")) == 1
    assert fleet.worker._remote_agents == {"P": {rank_key(0): "P/0"}}
    assert not fleet.worker._handshake_futures


def test_the_clocks_difference_is_that_of_the_handshake(fleet: Fleet) -> None:
    """From 0.26.0 on; an error would have D read blocks whose lease has ended."""
    fleet.serve("P")
    fleet.leave("left", "P")
    time.sleep(0.5)  # it has answered by now
    assert fleet.until(fleet.heard)
    if hasattr(fleet.worker, "_engine_clock_offset"):
        assert abs(fleet.worker._engine_clock_offset["P"]) < 0.1


def test_what_does_not_fit_is_counted_and_logged_a_few_times(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    fleet.serve("silent", answers=silent)
    for i in range(MAX_PEERS + 20):
        fleet.ports[f"silent-{i}"] = fleet.ports["silent"]
        fleet.leave(f"left-{i}", f"silent-{i}")
    assert failed(fleet) == 20
    assert taken() == {"NOTIFICATION_GIVEN_UP": 20}
    fleet.leave("again", f"silent-{MAX_PEERS - 1}")
    assert failed(fleet) == 0
    assert pending_notifications(fleet.worker) == 2 * (MAX_PEERS + 1)
    lines = [line for line in caplog.messages if "could not be reported to a prefill" in line]
    assert len(lines) == LINES
    threads = {t for t in threading.enumerate() if t.name.startswith("kvfix-nixl-notifier")}
    assert len(threads - before) == 1


def test_a_peer_that_does_not_answer_is_given_up(fleet: Fleet) -> None:
    fleet.serve("silent", answers=silent)
    fleet.leave("left", "silent")
    assert fleet.until(lambda: not pending_notifications(fleet.worker), 8.0)
    assert failed(fleet) == 1
    assert step(fleet.worker) == (set(), set())
    assert not fleet.worker._recving_metadata
    fleet.serve("P")
    fleet.leave("next", "P")
    assert fleet.until(fleet.heard)


def _named(fleet: Fleet) -> bool:
    """Whether the release has names for what became of transfers: from 0.30.0 on."""
    return hasattr(fleet.worker, "get_transfer_results")


def test_all_ranks_together_have_one_deadline(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(rank: int) -> bool:
        time.sleep(0.4)
        return True

    monkeypatch.setattr(notifications, "PATIENCE", 2.0)
    place = fleet.serve("slow", tp_size=16, answers=slowly)
    fleet.leave("left", "slow", tp_size=16)
    assert fleet.until(lambda: not pending_notifications(fleet.worker))
    assert 1 < len(place.asked) < 16
    assert failed(fleet) == 1
    assert not nixl_of(fleet.worker).called("add_remote_agent")


def test_what_is_of_no_use_any_more_is_dropped(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.serve("silent", answers=silent)
    fleet.leave("left-1", "silent")
    fleet.serve("P")
    fleet.leave("left-2", "P")
    monkeypatch.setattr(notifications, "USEFUL", 0.1)
    assert fleet.until(lambda: not pending_notifications(fleet.worker))
    assert failed(fleet) == 2


@pytest.mark.parametrize("host", [None, ["127.0.0.1"], 7, "no such host", "[", "a" * 3000])
def test_an_address_that_is_none(fleet: Fleet, host: Any) -> None:  # noqa: ANN401 - anything
    metadata = NixlConnectorMetadata()
    metadata.add_new_req_to_recv(
        request_id="left",
        local_block_ids=[],
        kv_transfer_params={
            "remote_block_ids": [[1]],
            "remote_engine_id": "P",
            "remote_request_id": "left-at-p",
            "remote_host": host,
            "remote_port": 1,
            "tp_size": 1,
        },
    )
    fleet.worker.start_load_kv(metadata)
    fleet.serve("Q")
    fleet.read("Q")
    assert fleet.until(fleet.reads)


def test_a_failing_registration_is_a_failed_handshake(fleet: Fleet) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("refused")

    nixl_of(fleet.worker).on["add_remote_agent"] = refuse
    fleet.serve("P")
    fleet.leave("left", "P")
    assert fleet.until(lambda: not pending_notifications(fleet.worker))
    step(fleet.worker)
    assert failed(fleet) == (0 if _named(fleet) else 1)  # from 0.30.0 on as a failed handshake
    del nixl_of(fleet.worker).on["add_remote_agent"]
    fleet.read()
    assert fleet.until(fleet.reads)


@pytest.mark.parametrize("clock", [(), (0.25,)], ids=["up to 0.25.1", "from 0.26.0 on"])
@pytest.mark.parametrize("host_buffer", [False, True])
def test_what_was_noted_is_registered_as_a_handshake_does_it(
    monkeypatch: pytest.MonkeyPatch, clock: tuple[float, ...], host_buffer: bool
) -> None:
    devices: list[int] = []
    platform = SimpleNamespace(set_device=devices.append)
    monkeypatch.setattr(notifications, "current_platform", platform)
    worker: Any = SimpleNamespace(
        use_host_buffer=host_buffer,
        device_id=3,
        add_remote_agent=lambda engine, rank: f"{engine}/{rank}",
    )
    heard, named = notifications._Heard(), {0: "P/0", 1: "P/1"}
    noted = {rank: heard.note(("P",), {"rank": rank}) for rank in named}
    heard.result = (noted, *clock) if clock else noted
    assert heard.register(worker) == ((named, *clock) if clock else named)
    assert devices == ([] if host_buffer else [3])


def test_a_peers_sizes_are_handed_on_in_the_order_of_a_handshake() -> None:
    meta: Any = SimpleNamespace(tp_size=2, pp_size=5, dcp_size=3)
    assert notifications._sizes(meta) == (3, 5)
    del meta.dcp_size
    assert notifications._sizes(meta) == (5,)
