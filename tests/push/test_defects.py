"""What a defect of pulls looks like where P pushes; one test for each, on stock and on patched.

The first line of a test's docstring says what happens where the defect is there.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import vllm
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX

from tests.support.nixl_worker import EngineDiedError, attempt, nixl_of, raising
from tests.support.push_pair import Pair, PushEngine, misplaced, pair

shows = pytest.mark.shows

PROMPT = range(40)
"""Three blocks of 16 tokens."""

OTHER = range(100, 140)


def ask(wire: Pair, req_id: str = "asked", prompt: Any = PROMPT, **how: Any) -> None:  # noqa: ANN401
    """Have P compute a prompt, and D be asked to answer it."""
    wire.d.send(req_id, prompt, wire.prefill(req_id, prompt), **how)


def answers(wire: Pair, req_id: str = "asked", prompt: Any = PROMPT, hit: int = 0) -> object:  # noqa: ANN401
    """How D answers: "received" or "computed", or what is wrong with that."""
    if (met := attempt(wire.until, lambda: wire.d.computed(req_id))) is not True:
        return met or "waits for ever"
    if wire.d.computed(req_id) >= len(prompt) - hit:
        return "computed"
    return misplaced(wire.d, req_id, prompt, hit) or "received"


def held(engine: PushEngine) -> int:
    """How many blocks nobody else can have."""
    return len(engine.scheduler.kv_cache_manager.block_pool.blocks) - 1 - len(engine._reusable())


def alone(engine: PushEngine, done: Callable[[], object], seconds: float = 3.0) -> bool:
    """Let one engine take steps without the other, for so long at most; whether it is done."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        engine.step()
        time.sleep(0.002)
    return bool(done())


IMPATIENT: dict[str, Any] = {"worker": {"extra_config": {"push_registration_timeout": 0.5}}}
"""A D that is to give a registration up after half a second. What it has not given up in six times
that is taken to wait for ever."""


def fail_a_write(wire: Pair) -> None:
    """Have P's write of what D is asked for end in an error, once it has begun."""
    wire.holds = True
    ask(wire)
    assert wire.until(wire.writes)
    nixl_of(wire.p.worker).fail(*wire.writes())


def registered(wire: Pair) -> list[bytes]:
    """Wait until D has registered with P; its words, which are still under way."""
    words = nixl_of(wire.d.worker).heard[wire.p.agent]
    there = alone(wire.d, lambda: any(w.startswith(PUSH_REG_NOTIF_PREFIX) for w in words), 8.0)
    assert there, "D has not registered with P"
    return words


# ---------------------------------------------------------------- between engines


@shows("K00", mends=">=0.24.0")
def test_a_stock_and_a_patched_engine_shake_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patched D and a stock P refuse each other's handshake."""
    release = vllm.__version__.partition("+")[0]
    monkeypatch.setattr(vllm, "__version__", release)
    p = PushEngine("P")
    monkeypatch.setattr(vllm, "__version__", f"{release}+kvfix.9.9.9")
    d = PushEngine("D")
    wire = Pair(p, d)
    try:
        ask(wire)
        assert answers(wire) == "received"
    finally:
        p.end()
        d.end()


@shows("-")
def test_a_prompt_is_pushed() -> None:
    """D does not get what P computed."""
    with pair() as wire:
        ask(wire)
        assert answers(wire) == "received"
        assert wire.until(lambda: "asked" in wire.d.ended)
        assert nixl_of(wire.p.worker).misuse == []


@shows("-")
def test_what_was_pushed_is_free_on_p() -> None:
    """P keeps what it has pushed until its lease ends."""
    with pair() as wire:
        ask(wire)
        assert answers(wire) == "received"
        assert wire.until(lambda: not held(wire.p), 2.0)


@shows("K23", mends=">=0.24.0")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_what_is_no_handshake_d_registers() -> None:
    """After a message that is no handshake, P's listener answers no new D."""
    with pair() as wire:
        with zmq.Context() as context, context.socket(zmq.REQ) as stranger:
            stranger.setsockopt(zmq.LINGER, 500)
            stranger.connect(f"tcp://127.0.0.1:{wire.p.part.side_channel_port}")
            stranger.send(b"GET /metrics HTTP/1.1\r\n\r\n")
            stranger.poll(500)
        ask(wire)
        assert answers(wire) == "received"


# ---------------------------------------------------------------- what NIXL and peers may do


@shows("K09", mends=">=0.24.0")
@pytest.mark.parametrize("side", ["p", "d"])
def test_a_notification_that_makes_no_sense(side: str) -> None:
    """A notification that is no text ends the engine."""
    with pair() as wire:
        ask(wire)
        nixl_of(getattr(wire, side).worker).inbox = {"X": [b"\xff:1"]}
        assert answers(wire) == "received"


@shows("K09", mends=">=0.24.0")
def test_a_registration_that_makes_no_sense() -> None:
    """With a registration that makes no sense, those beside it are lost: D waits for ever."""
    with pair() as wire:
        wire.prefill("bad", OTHER)
        ask(wire)
        bad = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode({"request_id": "bad"})
        registered(wire).insert(0, bad)
        assert answers(wire) == "received"


@contextlib.contextmanager
def pushed_without(call: str) -> Iterator[Pair]:
    """P and D after a push whose handle NIXL does not serve."""
    with pair() as wire:
        nixl_of(wire.p.worker).on[call] = raising(RuntimeError("broken"))
        ask(wire)
        assert answers(wire) == "received"
        yield wire


@shows("K09", mends=">=0.24.0, <0.30.0")
@pytest.mark.parametrize("call", ["release_xfer_handle", "get_xfer_telemetry"])
def test_a_handle_that_nixl_does_not_serve(call: str) -> None:
    """A write whose handle NIXL does not release, or has no telemetry of, ends P's engine."""
    with pushed_without(call) as wire:
        assert attempt(wire.until, lambda: False, 0.5) is False


@shows("K09", mends=">=0.24.0, !=0.30.0")
@pytest.mark.parametrize("call", ["release_xfer_handle", "get_xfer_telemetry"])
def test_what_was_pushed_is_free_also_then(call: str) -> None:
    """After such a write P keeps its blocks until the lease ends, or its engine ends."""
    with pushed_without(call) as wire:
        assert attempt(wire.until, lambda: not held(wire.p), 2.0) is True


@shows("K09")
def test_a_write_that_fails() -> None:
    """A write that fails ends P's engine, or keeps its blocks."""
    with pair() as wire:
        fail_a_write(wire)
        assert attempt(wire.until, lambda: False, 0.5) is False
        assert not held(wire.p)


@shows("K08")
def test_d_is_told_of_a_write_that_fails() -> None:
    """A write fails: D waits for ever."""
    with pair(d=IMPATIENT) as wire:
        fail_a_write(wire)
        assert alone(wire.d, lambda: wire.d.computed("asked") or "asked" in wire.d.ended)


@shows("K08")
def test_a_registration_that_cannot_be_sent() -> None:
    """NIXL does not send D's registration: D waits for ever."""
    with pair(d=IMPATIENT) as wire:
        broken = raising(RuntimeError("broken"), lambda _, said: not said.startswith(b"HB:"))
        nixl_of(wire.d.worker).on["send_notif"] = broken
        ask(wire)
        assert wire.until(lambda: wire.d.computed("asked") or "asked" in wire.d.ended, 3.0)


@shows("K08")
def test_a_p_that_dies_after_d_has_registered() -> None:
    """P dies after D has registered with it: D waits for ever."""
    with pair(d=IMPATIENT) as wire:
        ask(wire)
        registered(wire)
        wire.p.end()
        assert alone(wire.d, lambda: wire.d.computed("asked") or "asked" in wire.d.ended)


# ---------------------------------------------------------------- what clients may send


@shows("K04", mends=">=0.24.0")
@pytest.mark.parametrize("missing", ["remote_host", "remote_port", "remote_engine_id", "tp_size"])
def test_parameters_that_name_no_p(missing: str) -> None:
    """A request whose parameters do not say where P is ends D's engine."""
    with pair() as wire:
        offer = wire.prefill("asked", PROMPT)
        del offer[missing]
        wire.d.send("asked", PROMPT, offer)
        assert answers(wire) == "computed"


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """Whoever listens on a port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


@shows("K17", mends=">=0.24.0")
def test_nobody_connects_to_a_peer_that_is_not_named(stranger: socket.socket) -> None:
    """A client can have D connect to any host: there is no allowed_peers."""

    def somebody_came() -> bool:
        try:
            stranger.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    with pair(d={"worker": {"extra_config": {"allowed_peers": ["10.8.0.0/16"]}}}) as wire:
        offer = wire.prefill("asked", PROMPT)
        wire.d.send("asked", PROMPT, {**offer, "remote_port": stranger.getsockname()[1]})
        assert attempt(alone, wire.d, somebody_came, 1.5) is False
        assert wire.d.computed("asked") >= len(PROMPT)


@shows("K04", mends=">=0.24.0, <0.26.0")
def test_a_request_that_is_aborted_before_it_is_scheduled() -> None:
    """A request that is aborted unscheduled, and has no remote_block_ids, ends D's engine."""
    with pair() as wire:
        offer = wire.prefill("asked", PROMPT)
        del offer["remote_block_ids"]
        wire.d.send("asked", PROMPT, offer)
        wire.d.leave("asked")
        assert not isinstance(attempt(wire.d.step), EngineDiedError)


@shows("K05")
def test_p_is_told_of_a_request_that_d_rejects() -> None:
    """P keeps what it has computed for a request that D rejects until its lease ends."""
    with pair() as wire:
        ask(wire)
        wire.d.leave("asked")
        assert wire.until(lambda: not held(wire.p), 2.0)


@shows("-")
def test_nothing_stays_of_a_request_that_d_rejects() -> None:
    """A request that D rejects leaves an entry in a table of D's worker, for good."""
    with pair() as wire:
        ask(wire)
        wire.d.leave("asked")
        wire.until(lambda: False, 1.0)
        assert tables_with(wire.d.worker, "asked") == []


def tables_with(worker: Any, req_id: str) -> list[str]:  # noqa: ANN401
    """The names of the worker's tables that have something of a request."""
    tables = {name: it for name, it in vars(worker).items() if isinstance(it, (dict, set))}
    return [name for name, table in tables.items() if req_id in table]


# ---------------------------------------------------------------- what arrives where


@shows("-")
def test_after_a_prefix_hit_the_rest_arrives_where_it_belongs() -> None:
    """D has the start of a prompt in its prefix cache: wrong tokens with HTTP 200."""
    with pair() as wire:
        wire.d.send("before", PROMPT[:17], None, max_tokens=1)
        wire.d.step()
        ask(wire)
        assert answers(wire, hit=16) == "received"


SMALL_KERNEL = {"kernel_block_size": 4}
LARGE: dict[str, Any] = {"block_size": 16, "worker": SMALL_KERNEL}
SMALL: dict[str, Any] = {"block_size": 8, "worker": SMALL_KERNEL}


@shows("K07", mends=">=0.28.0")
def test_a_p_whose_blocks_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """P's blocks are larger than D's, and D registers with it: wrong tokens, or D's engine ends."""
    with pair(LARGE, SMALL) as wire:
        # Whichever thread is first shakes hands for both.
        monkeypatch.setattr(wire.d.worker, "_send_heartbeats", lambda *_: None)
        ask(wire)
        assert answers(wire) in ("received", "computed")


@shows("K07")
def test_a_p_whose_blocks_do_not_fit_and_that_a_heartbeat_meets_first() -> None:
    """P's blocks are larger than D's, and a heartbeat comes first: as above, or D's engine ends."""
    with pair(LARGE, SMALL) as wire:
        offer = wire.prefill("asked", PROMPT)
        met = wire.d.worker._ensure_handshake(
            offer["remote_engine_id"], offer["remote_host"], offer["remote_port"], offer["tp_size"]
        )
        met.result(5.0)
        wire.d.send("asked", PROMPT, offer)
        assert answers(wire) in ("received", "computed")
