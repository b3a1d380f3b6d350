"""The recorded fact that the engine core has a client's request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from vllm_overlay.v1.engine.admission import (
    Exchange,
    admit,
    current_exchange,
    has_given_up,
    open_exchange,
)

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "P", "remote_request_id": "r"}
CARRIED = {"kv_transfer_params": PARAMS}


class Engine:
    """An engine client whose sends the test watches; `sending` runs in each of them."""

    def __init__(self, sending: Callable[[], Awaitable[None]] | None = None) -> None:
        self.sending = sending
        self.sent: list[Any] = []
        self.aborted: list[str] = []
        self.engine_core = self

    async def add_request_async(self, request: Any) -> None:  # noqa: ANN401
        if self.sending is not None:
            await self.sending()
        self.sent.append(request)

    async def abort(self, request_id: str, internal: bool) -> None:
        assert internal
        self.aborted.append(request_id)


def request_with(extra: dict[str, Any] | None) -> Any:  # noqa: ANN401 - a stand-in
    return SimpleNamespace(request_id="r", sampling_params=SamplingParams(extra_args=extra))


async def ended(exchange: Exchange) -> int:
    """End the exchange; how often it was rejected."""
    calls = []

    async def reject() -> None:
        calls.append(1)

    await exchange.end(PARAMS, reject)
    return len(calls)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("extra", "admitted"),
    [
        (CARRIED, True),
        ({"kv_transfer_params": {"do_remote_decode": True}}, True),
        (None, False),
        ({}, False),
        ({"kv_transfer_params": None}, False),
        ({"kv_transfer_params": {"setting of another connector": 1}}, False),
        ({"kv_transfer_params": "text"}, False),
    ],
)
def test_only_what_carries_the_transfer_is_admission(
    extra: dict[str, Any] | None, admitted: bool
) -> None:
    """A request may become several; the engine core has the transfer with one of them."""

    async def test() -> None:
        engine: Any = Engine()
        with open_exchange() as exchange:
            await admit(engine, request_with(extra))
            assert exchange.admitted == admitted
            assert len(engine.sent) == 1
            assert await ended(exchange) == (not admitted)
            assert has_given_up(PARAMS) == (not admitted) and not exchange.refused
        assert current_exchange() is None

    asyncio.run(test())


def test_outside_an_exchange_nothing_is_recorded() -> None:
    async def test() -> None:
        engine: Any = Engine()
        assert current_exchange() is None and not has_given_up(PARAMS)
        await admit(engine, request_with(CARRIED))
        assert len(engine.sent) == 1

    asyncio.run(test())


def test_what_is_pooled_transfers_nothing() -> None:
    async def test() -> None:
        engine: Any = Engine()
        pooled: Any = SimpleNamespace(request_id="r", sampling_params=None)
        with open_exchange() as exchange:
            await admit(engine, pooled)
            assert engine.sent == [pooled] and not exchange.admitted

    asyncio.run(test())


def test_a_send_that_does_not_wait_lets_nothing_else_run() -> None:
    """Nothing may come back from the engine between the samples of one request."""

    async def test() -> None:
        ran: list[int] = []
        asyncio.get_running_loop().call_soon(ran.append, 1)
        engine: Any = Engine()
        with open_exchange() as exchange:
            await admit(engine, request_with(CARRIED))
            assert exchange.admitted and not ran

    asyncio.run(test())


@pytest.mark.parametrize("cancels", [1, 3])
@pytest.mark.parametrize("works", [True, False])
def test_a_send_that_waits_ends_whoever_is_cancelled(works: bool, cancels: int) -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def slow() -> None:
            await go_on.wait()
            if not works:
                raise OSError

        engine: Any = Engine(slow)
        with open_exchange() as exchange:
            admission = asyncio.create_task(admit(engine, request_with(CARRIED)))
            await settle()
            for _ in range(cancels):
                admission.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await admission
            assert not exchange.admitted
            end = asyncio.create_task(ended(exchange))
            await settle()
            assert not end.done() and exchange.released is None  # it is not known yet
            assert not engine.aborted
            go_on.set()
            assert await end == (not works)
            await settle()
            assert exchange.admitted == works
            assert len(engine.sent) == works
            assert engine.aborted == ["r"]

    asyncio.run(test())


@pytest.mark.parametrize("wait", [True, False])
def test_a_send_that_fails_is_no_admission(wait: bool) -> None:
    async def test() -> None:
        async def broken() -> None:
            if wait:
                await asyncio.sleep(0)
            raise OSError

        engine: Any = Engine(broken)
        with open_exchange() as exchange:
            with pytest.raises(OSError):
                await admit(engine, request_with(CARRIED))
            assert not exchange.admitted
            assert await ended(exchange) == 1

    asyncio.run(test())


def test_one_that_is_admitted_does_not_wait_for_others_to_end() -> None:
    async def test() -> None:
        go_on = asyncio.Event()
        engine: Any = Engine()
        with open_exchange() as exchange:
            await admit(engine, request_with(CARRIED))
            engine.sending = go_on.wait
            second = asyncio.create_task(admit(engine, request_with(CARRIED)))
            await settle()
            assert await asyncio.wait_for(ended(exchange), 5) == 0
            go_on.set()
            await second

    asyncio.run(test())


def test_a_send_that_is_cancelled_itself_is_no_admission() -> None:
    async def test() -> None:
        async def cancelled() -> None:
            await asyncio.sleep(0)
            raise asyncio.CancelledError

        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
        engine: Any = Engine(cancelled)
        with open_exchange() as exchange:
            with pytest.raises(asyncio.CancelledError):
                await admit(engine, request_with(CARRIED))
            assert await ended(exchange) == 1
        assert errors == []

    asyncio.run(test())


def test_what_comes_after_the_end_computes_itself() -> None:
    """The prefill server has been told; its blocks are somebody else's by now."""

    async def test() -> None:
        engine: Any = Engine()
        request = request_with({**CARRIED, "other": 1})
        params = request.sampling_params
        with open_exchange() as exchange:
            assert await ended(exchange) == 1
            await admit(engine, request)
            assert engine.sent == [request]
            assert request.sampling_params.extra_args == {"other": 1}
            assert params.extra_args == {**CARRIED, "other": 1}  # shared with others
            assert not exchange.admitted

    asyncio.run(test())


def test_an_end_that_is_cancelled_still_rejects() -> None:
    async def test() -> None:
        rejected, go_on = asyncio.Event(), asyncio.Event()

        async def reject() -> None:
            await go_on.wait()
            rejected.set()

        with open_exchange() as exchange:
            end = asyncio.create_task(exchange.end(PARAMS, reject))
            await settle()
            end.cancel()
            with pytest.raises(asyncio.CancelledError):
                await end
            go_on.set()
            await asyncio.wait_for(rejected.wait(), 5)

    asyncio.run(test())


def test_what_is_left_to_do_is_kept_until_it_is_done_and_no_longer() -> None:
    """The loop holds its tasks weakly."""

    async def test() -> None:
        kept: list[weakref.ref[Any]] = []

        async def reject() -> None:
            waits = asyncio.get_running_loop().create_future()
            kept.extend(map(weakref.ref, (waits, asyncio.current_task())))
            await waits

        with open_exchange() as exchange:
            end = asyncio.create_task(exchange.end(PARAMS, reject))
            await settle()
            end.cancel()
            await asyncio.wait([end])
        del end, exchange
        gc.collect()
        waits, task = kept
        future = waits()
        assert future is not None
        future.set_result(None)
        await settle()
        gc.collect()
        assert task() is None

    asyncio.run(test())


@pytest.mark.parametrize("what", ["remote_engine_id", "remote_request_id"])
def test_what_others_send_after_the_end_reads(what: str) -> None:
    """An engine client may have made its one task in the first exchange that there was."""

    async def test() -> None:
        engine: Any = Engine()
        other = {**PARAMS, what: "another"}
        request = request_with({"kv_transfer_params": other})
        with open_exchange() as exchange:
            assert await ended(exchange) == 1
            assert not has_given_up(other)
            await admit(engine, request)
            assert request.sampling_params.extra_args == {"kv_transfer_params": other}
            assert engine.sent == [request]

    asyncio.run(test())


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("works", [True, False])
def test_admission_is_heard_of(works: bool, wait: bool) -> None:
    async def test() -> None:
        async def sending() -> None:
            if wait:
                await asyncio.sleep(0)
            if not works:
                raise OSError

        heard: list[int] = []
        engine: Any = Engine(sending)
        with open_exchange(on_admission=lambda: heard.append(1)):
            with contextlib.suppress(OSError):
                await admit(engine, request_with(CARRIED))
            await settle()
        assert len(heard) == works

    asyncio.run(test())


def test_exchanges_do_not_mix() -> None:
    async def visit(number: int) -> bool:
        engine: Any = Engine()
        with open_exchange() as exchange:
            await asyncio.sleep(0)
            if number % 2:
                await asyncio.create_task(admit(engine, request_with(CARRIED)))
            await asyncio.sleep(0)
            assert current_exchange() is exchange
            return exchange.admitted

    async def test() -> None:
        assert await asyncio.gather(*map(visit, range(6))) == [False, True] * 3
        assert current_exchange() is None

    asyncio.run(test())
