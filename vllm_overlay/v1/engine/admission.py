# SPDX-License-Identifier: Apache-2.0
"""Has the engine core taken over a client's request? One fact, recorded where it happens.

A prefill server keeps a request's KV blocks until somebody reads them or tells it that nobody
will. The engine core does one or the other for every request that it was sent. For a request
that never got there the API server must speak up, and it must not for one that did: so it has to
know, and status codes, exceptions and disconnects do not say (a stream answers 200 before its
request is even validated, and a client may leave a moment after its request was sent).

An `Exchange` is one request of a client, from its arrival to the end of its answer. `admit` sends
an engine request and records that it was sent; the exchange is found through a context variable,
which tasks and generators inherit, so nothing has to be passed through the serving code.
All of it runs in one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM

_ROLES = {"do_remote_prefill", "do_remote_decode"}
_exchange: ContextVar[Exchange | None] = ContextVar("kvfix_exchange", default=None)
_tasks: set[asyncio.Task[None]] = set()  # asyncio itself holds tasks weakly


class Exchange:
    """What became of one client request's `kv_transfer_params`.

    Attributes:
        admitted: the engine core was sent a request that carries them. Never unset.
        closed: somebody else answers for them from now on; the engine must not use them.
    """

    __slots__ = ("_background", "_sends", "admitted", "closed")

    def __init__(self) -> None:
        self.admitted = False
        self.closed = False
        self._sends: set[asyncio.Task[None]] = set()
        self._background: asyncio.Task[Any] | None = None

    async def send(self, sending: Coroutine[Any, Any, None]) -> None:
        """Await `sending` and record that it worked.

        Once begun it runs to its end even when the caller is cancelled: else nobody could say
        whether the engine core has the request. Mostly it ends without ever waiting, and then
        nothing else may run in between: the first of several samples must not come back from
        the engine before the last has been added, or vLLM takes it for the whole answer.
        """
        try:
            awaited = sending.send(None)
        except StopIteration:
            self.admitted = True
            return
        task = asyncio.ensure_future(_go_on(sending, awaited))
        self._sends.add(task)
        task.add_done_callback(self._sent)
        await asyncio.shield(task)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sends.discard(task)
        if not task.cancelled() and task.exception() is None:
            self.admitted = True

    def outlived_by(self, task: asyncio.Task[Any]) -> None:
        """The answer is over before the request: `task` goes on working on it."""
        self._background = task

    async def end(self, reject: Callable[[], Awaitable[None]]) -> None:
        """Close the exchange; await `reject` if the engine core was never sent its request.

        `reject` runs in a task of its own, so that it also happens when the caller is already
        being cancelled. It must not raise.
        """
        if self.admitted:
            return
        task = _keep(self._end(reject))
        if self._background is None:
            await asyncio.shield(task)

    async def _end(self, reject: Callable[[], Awaitable[None]]) -> None:
        if self._background is not None:
            await asyncio.wait({self._background})
        while self._sends:
            await asyncio.wait(self._sends)
        self.closed = True
        if not self.admitted:
            await reject()


@types.coroutine
def _go_on(begun: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:  # noqa: ANN401
    """The rest of a coroutine that has begun elsewhere and waits for `awaited`."""
    yield awaited
    yield from begun


def _keep(work: Awaitable[None]) -> asyncio.Task[None]:
    task = asyncio.ensure_future(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


@contextlib.contextmanager
def open_exchange() -> Iterator[Exchange]:
    """Make what runs inside, and the tasks and generators made there, one exchange."""
    exchange = Exchange()
    token = _exchange.set(exchange)
    try:
        yield exchange
    finally:
        _exchange.reset(token)


def current_exchange() -> Exchange | None:
    """The exchange that the running code works for, if any."""
    return _exchange.get()


def outlive_exchange(task: asyncio.Task[Any]) -> None:
    """Say that `task` goes on working for the current exchange after its answer has ended."""
    if (exchange := _exchange.get()) is not None:
        exchange.outlived_by(task)


async def admit(engine: AsyncLLM, request: EngineCoreRequest) -> None:
    """Send a request to the engine core and record it in the current exchange.

    Raises:
        CancelledError: the client left meanwhile. The request is aborted as soon as it has been
            sent; nobody else knows yet that there is something to abort.
        Exception: whatever sending raises; the request then counts as never sent.
    """
    exchange = _exchange.get()
    if exchange is None or not _carries_params(request):
        await engine.engine_core.add_request_async(request)
        return
    if exchange.closed:
        _drop_params(request)
        await engine.engine_core.add_request_async(request)
        return
    try:
        await exchange.send(engine.engine_core.add_request_async(request))
    except asyncio.CancelledError:
        _keep(_abort_once_sent(engine, exchange, request.request_id))
        raise


def _carries_params(request: EngineCoreRequest) -> bool:
    """Whether the engine core learns from this request whose blocks to read, or to keep."""
    sampling = request.sampling_params
    params = sampling and sampling.extra_args and sampling.extra_args.get("kv_transfer_params")
    return isinstance(params, dict) and not params.keys().isdisjoint(_ROLES)


def _drop_params(request: EngineCoreRequest) -> None:
    """Have the request's prompt computed here: its prefill server was already told."""
    params = copy.copy(request.sampling_params)
    if params is not None and params.extra_args is not None:
        extra = {k: v for k, v in params.extra_args.items() if k != "kv_transfer_params"}
        params.extra_args = extra
    request.sampling_params = params


async def _abort_once_sent(engine: AsyncLLM, exchange: Exchange, request_id: str) -> None:
    while exchange._sends:
        await asyncio.wait(exchange._sends)
    await engine.abort(request_id, internal=True)
