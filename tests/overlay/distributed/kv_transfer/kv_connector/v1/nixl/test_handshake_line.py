"""Handshakes wait for each other, and for the ranks of one peer, for as long as they may."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.nixl_worker import (
    await_handshakes,
    make_vllm_config,
    make_worker,
    nixl_of,
    receive,
    received,
    register_peer,
    script_handshake,
)
from tests.support.side_channel import Fleet
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.handshake_line import (
    HandshakeLine,
    line_of,
    max_handshake_wait,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.notifications import (
    finds_network_part_done,
    notes_aside,
)


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def line(waiting: dict[str, Any], **extra: Any) -> HandshakeLine:  # noqa: ANN401 - the option
    config = make_vllm_config(extra_config=extra)
    worker = SimpleNamespace(
        vllm_config=config, _handshake_futures=waiting, _handshake_lock=threading.RLock()
    )
    return HandshakeLine(worker)


def test_those_behind_fail_until_nobody_waits_any_more(clock: Clock) -> None:
    waiting = dict.fromkeys("abc")
    handshakes = line(waiting, max_handshake_wait=10)

    def make(engine: str, seconds: float) -> str:
        def handshake() -> str:
            clock.now += seconds
            handshakes.rank_answered()
            return engine

        try:
            return handshakes.make(handshake)
        finally:
            del waiting[engine]

    assert make("a", 10.0) == "a"
    assert make("b", 0.1) == "b", "it has waited 10 s, and no more"
    waiting |= dict.fromkeys("de")
    for engine in "cde":
        with pytest.raises(TimeoutError, match=r"more than 10 s \(max_handshake_wait"):
            make(engine, 0.0)
    waiting |= dict.fromkeys("ab")
    assert make("a", 0.0) == "a", "the line was empty"
    assert make("b", 0.0) == "b"


def test_a_handshake_that_fails_leaves_an_empty_line_too(clock: Clock) -> None:
    waiting: dict[str, Any] = {"a": None}
    handshakes = line(waiting, max_handshake_wait=10)

    def fails() -> None:
        clock.now += 11.0
        raise RuntimeError("of the peer")

    with pytest.raises(RuntimeError, match="of the peer"):
        handshakes.make(fails)
    assert handshakes.make(lambda: "made") == "made"


def test_one_handshake_takes_no_longer_than_it_may(clock: Clock) -> None:
    """A client says how many ranks a peer has, and whoever listens may answer slowly."""
    handshakes = line({"a": None}, max_handshake_wait=10)
    handshakes.rank_answered()  # of no handshake

    def answers_slowly() -> None:
        for _ in range(1000):
            clock.now += 4.9
            handshakes.rank_answered()

    with pytest.raises(TimeoutError, match="not all ranks have answered within 10 s"):
        handshakes.make(answers_slowly)
    assert clock.now < 15
    handshakes.rank_answered()  # of no handshake


def test_without_the_option_nothing_is_bounded(clock: Clock) -> None:
    handshakes = line({"a": None, "b": None})

    def takes_long() -> str:
        clock.now += 1e9
        handshakes.rank_answered()
        return "made"

    assert [handshakes.make(takes_long) for _ in range(3)] == ["made"] * 3


def test_of_a_worker_without_a_configuration_nothing_is_asked() -> None:
    worker = SimpleNamespace(_handshake_futures={}, _handshake_lock=threading.RLock())
    assert HandshakeLine(worker).make(lambda: "made") == "made"


@pytest.mark.parametrize("seconds", [0, -1, True, "10", [10], float("nan")])
def test_what_is_no_number_of_seconds_is_refused(seconds: object) -> None:
    config = make_vllm_config(extra_config={"max_handshake_wait": seconds}).kv_transfer_config
    assert config is not None
    with pytest.raises(ValueError, match="Expected a number of seconds"):
        max_handshake_wait(config)


def test_a_handshake_that_comes_up_too_late_is_a_failed_one() -> None:
    """With a worker's own threads and tables."""
    worker = make_worker(extra_config={"max_handshake_wait": 0.05})
    over = threading.Event()

    def handshake(engine_id: str, tp_size: int) -> dict[Any, str]:
        if engine_id == "slow":
            over.wait(10)
            raise TimeoutError("slow does not answer")
        return register_peer(worker, engine_id, tp_size)

    script_handshake(worker, handshake)
    scripted = worker._nixl_handshake
    worker._nixl_handshake = lambda *args: finds_network_part_done(
        lambda _, *rest: scripted(*rest)
    )(worker, *args)
    receive(worker, "first", engine_id="slow")
    receive(worker, "second", engine_id="P")
    threading.Timer(0.2, over.set).start()
    await_handshakes(worker)
    assert received(worker) == {"first", "second"}
    assert not worker._remote_agents
    receive(worker, "third", engine_id="P")
    await_handshakes(worker)
    assert set(worker._remote_agents) == {"P"}


def test_what_was_heard_aside_stands_in_the_same_line() -> None:
    """Else the line would never be seen to be empty."""
    with Fleet(extra_config={"max_handshake_wait": 5}) as fleet:
        fleet.serve("P")
        fleet.leave("left", "P")
        assert fleet.until(fleet.heard)
        await_handshakes(fleet.worker)
        assert line_of(fleet.worker)._since is None


def test_the_notifiers_thread_is_in_no_line() -> None:
    with Fleet() as fleet:
        worker = fleet.worker
        vars(worker)["_handshake_line"] = None  # whoever looks at it fails
        seen: list[str] = []

        def note(*_: object) -> str:
            seen.append("noted")
            return "0"

        vars(worker)["_notifications"] = SimpleNamespace(
            here=lambda: SimpleNamespace(note=note),
            take_heard=lambda _: None,
        )
        made: Any = finds_network_part_done(lambda *_: "made")
        assert made(worker, "host", 1, 1, "P") == "made"
        registered: Any = notes_aside(lambda *_: "registered")
        assert registered(worker, object()) == "0"
        assert seen == ["noted"]


def test_slow_ranks_are_given_up_by_the_worker_itself() -> None:
    worker = make_worker(extra_config={"max_handshake_wait": 0.05})
    line_of(worker)._began = 0.0  # long ago
    with pytest.raises(TimeoutError, match="max_handshake_wait"):
        register_peer(worker, "P")
    assert nixl_of(worker).called("add_remote_agent") == []
