"""K04: bad kv_transfer_params never crash or leak an engine."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.decode_engine import Step
from tests.support.harness import HarnessError
from tests.support.idle_engine import IdleEngine
from tests.support.nixl_release import GET_META_MSG, NixlConnectorScheduler
from tests.support.nixl_worker import STAGES, attempt, connect, nixl_of, rank_key
from tests.support.release import since
from tests.support.serving_app import ENDPOINTS, REMOTE, body, serving
from tests.support.side_channel import SideChannel

COMPLETIONS = next(iter(ENDPOINTS))
PROMPT = range(40)  # three blocks of 16 tokens
GOOD = {**REMOTE, "remote_engine_id": "P", "remote_request_id": "at-p"}

# The owner of the blocks is known, what to read is not.
UNREADABLE: dict[str, Any] = {
    "no remote_block_ids": {"remote_block_ids": None},
    "empty remote_block_ids": {"remote_block_ids": []},
    "too many groups": {"remote_block_ids": [[1, 2, 3], [1, 2, 3]]},
    "too few blocks": {"remote_block_ids": [[1, 2]]},
    "block named twice": {"remote_block_ids": [[1, 2, 2]]},
    "negative block": {"remote_block_ids": [[1, -2, 3]]},
    "huge block": {"remote_block_ids": [[1, 2, 2**63]]},
    "block of another type": {"remote_block_ids": [[1, "2", 3]]},
    "blocks of another type": {"remote_block_ids": {"0": [1, 2, 3]}},
}
# Nobody knows whom to tell.
UNKNOWN: dict[str, Any] = {
    "no remote_engine_id": {"remote_engine_id": None},
    "no remote_request_id": {"remote_request_id": None},
    "no remote_host": {"remote_host": None},
    "no remote_port": {"remote_port": None},
    "remote_engine_id of another type": {"remote_engine_id": ["P"]},
    "remote_request_id that is half a character": {"remote_request_id": "\ud800"},
    "remote_port of another type": {"remote_port": "5600"},
    "huge remote_port": {"remote_port": 10**30},
    "negative tp_size": {"tp_size": -1},
    "huge tp_size": {"tp_size": 10**9},
}
# Numbers that a worker looks at from a release on.
for number, release in {
    "pp_size": "0.26.0",
    "dcp_size": "0.30.0",
    "remote_registration_generation": "0.33.0",
}.items():
    if since(release):
        UNKNOWN[f"{number} of another type"] = {number: [2]}
        UNKNOWN[f"negative {number} and too few blocks"] = {number: -1, "remote_block_ids": [[1]]}
        UNKNOWN[f"huge {number} and too few blocks"] = {number: 2**63, "remote_block_ids": [[1]]}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """Good parameters with some fields changed; None drops one."""
    return {k: v for k, v in {**GOOD, **changes}.items() if v is not None}


def engine_with(params: object) -> IdleEngine:
    """An engine that has got one request with these parameters, and knows P."""
    engine = IdleEngine()
    connect(engine.worker, "P")
    engine.ask("bad", PROMPT)
    engine.scheduler.requests["bad"].kv_transfer_params = params
    return engine


def assert_computed_here(engine: IdleEngine) -> None:
    """The request is answered from this engine's own KV, and leaves nothing behind."""
    step = attempt(engine.step)
    assert isinstance(step, Step)
    assert step.computed == {"bad": (0, len(PROMPT))}
    assert attempt(engine.run) is True
    assert not engine.scheduler.requests
    assert nixl_of(engine.worker).reads == []


@pytest.mark.parametrize("changes", UNREADABLE.values(), ids=UNREADABLE)
def test_blocks_that_cannot_be_read_are_freed(changes: dict[str, Any]) -> None:
    engine = engine_with(changed(changes))
    assert_computed_here(engine)
    assert nixl_of(engine.worker).heard == {"P/0": [b"at-p:1"]}


@pytest.mark.parametrize("changes", UNKNOWN.values(), ids=UNKNOWN)
def test_an_owner_that_is_not_known_costs_nothing(changes: dict[str, Any]) -> None:
    engine = engine_with(changed(changes))
    assert_computed_here(engine)
    assert nixl_of(engine.worker).heard == {}


@pytest.mark.parametrize("size", ["tp_size", *(["pp_size"] if STAGES else [])])
def test_nobody_is_asked_for_as_many_ranks_as_a_client_likes(size: str) -> None:
    """Not even to be told that its blocks are free; every rank costs a question."""
    engine = IdleEngine()
    with SideChannel(engine.worker, "new") as new:
        engine.ask("bad", PROMPT)
        named = {"remote_engine_id": "new", "remote_port": new.port, "remote_block_ids": [[1]]}
        engine.scheduler.requests["bad"].kv_transfer_params = {**GOOD, **named, size: 2000}
        assert attempt(engine.run) is True
        engine.worker._handshake_initiation_executor.shutdown()
        assert new.asked == []


@pytest.mark.parametrize("params", ["do_remote_prefill", ["do_remote_prefill"], 7], ids=repr)
def test_parameters_that_are_no_object(params: object) -> None:
    assert_computed_here(engine_with(params))


def assert_aborted_in_the_queue(name: str) -> None:
    """As every request that is rejected before admission ends."""
    engine = engine_with(changed({**UNREADABLE, **UNKNOWN}[name]))
    engine.abort("bad")
    assert attempt(engine.run) is True
    assert not engine.scheduler.requests
    told = {"P/0": [b"at-p:1"]} if name in UNREADABLE else {}
    assert nixl_of(engine.worker).heard == told


def test_a_request_without_blocks_that_is_aborted_in_the_queue() -> None:
    for name in UNREADABLE:
        assert_aborted_in_the_queue(name)


# An id that cannot be encoded comes to no harm here once K03 is in, a generation of another type
# with K01 or K09. For a huge one stock shakes hands with whoever is named, and tells nobody.
HARMLESS = (
    "remote_request_id that is half a character",
    "remote_registration_generation of another type",
    "huge remote_registration_generation and too few blocks",
)


@pytest.mark.parametrize("name", [name for name in UNKNOWN if name not in HARMLESS])
def test_a_request_of_nobody_that_is_aborted_in_the_queue(name: str) -> None:
    assert_aborted_in_the_queue(name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_client_hears_which_field_is_bad(endpoint: str, stream: bool) -> None:
    async def test() -> None:
        async with serving() as server:
            for field, value in (("remote_port", "5600"), ("remote_block_ids", [[1], [-2]])):
                params = {**REMOTE, field: value}
                answer = await server.post(endpoint, body(endpoint, params, stream=stream))
                assert answer.status == 400
                assert f"kv_transfer_params.{field}" in answer.error["message"]
            assert server.core.admitted == []

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_sent_stays_on_no_books(stream: bool) -> None:
    """An integer too big for the wire to the engine core, where nobody looks at it."""

    async def test() -> None:
        async with serving() as server:
            params = {"do_remote_prefill": False, "remote_block_ids": 2**70}
            answer = await server.post(COMPLETIONS, body(COMPLETIONS, params, stream=stream))
            assert answer.status == 400
            assert server.engine.output_processor.get_num_unfinished_requests() == 0

    asyncio.run(test())


def test_a_peer_that_asks_for_a_rank_that_p_does_not_have() -> None:
    """Its client lied about P's size. P must still shake hands with everybody else."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    ready, stop = threading.Event(), threading.Event()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        listener = threading.Thread(
            target=_quietly,
            args=(
                NixlConnectorScheduler._nixl_handshake_listener,
                {rank_key(0): b"rank 0"},
                ready,
                stop,
            ),
            kwargs=_address("127.0.0.1", port),
            daemon=True,
        )
        listener.start()
        if not ready.wait(10):
            raise HarnessError("P does not listen after 10 s", f"a listener at port {port}")
        try:
            with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
                peer.setsockopt(zmq.LINGER, 0)
                peer.connect(f"tcp://127.0.0.1:{port}")
                _ask(peer, 0)
                if not _hears(peer, b"rank 0", 10):  # what is sent from now on arrives, in order
                    raise HarnessError("P does not answer after 10 s", "a handshake with rank 0")
                _ask(peer, 7)
                _ask(peer, 0)
                assert _hears(peer, b"rank 0", 3)
        finally:
            stop.set()
            listener.join(10)


def _address(host: str, port: int) -> dict[str, Any]:
    """Where the listener listens; up to 0.21.0 it takes the host from the environment."""
    listener = NixlConnectorScheduler._nixl_handshake_listener
    known = inspect.signature(listener).parameters
    return {name: value for name, value in {"host": host, "port": port}.items() if name in known}


def _quietly(function: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
    """A thread's end is seen by what it no longer does."""
    try:
        function(*args, **kwargs)
    except KeyError:
        return


def _ask(peer: zmq.Socket[bytes], rank: int) -> None:
    key = rank_key(rank)
    question = (GET_META_MSG, *(key if isinstance(key, tuple) else (key,)))
    peer.send_multipart([b"", msgspec.msgpack.encode(question)])


def _hears(peer: zmq.Socket[bytes], answer: bytes, seconds: float) -> bool:
    """Whether P says this within so many seconds, behind an empty frame."""
    until = time.monotonic() + seconds
    while peer.poll(max(0, int(1000 * (until - time.monotonic())))):
        if peer.recv_multipart()[1] == answer:
            return True
    return False
