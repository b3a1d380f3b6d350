# SPDX-License-Identifier: Apache-2.0
"""All releases: has the engine core taken over a client's request?

It is one fact, recorded where it happens. A prefill server keeps a request's KV blocks until
somebody reads them or tells it that nobody will. The engine core does one or the other for every
request that it was sent. For a request that never got there the API server may have to speak up,
and it must not for one that did: so it has to know, and what the client is answered does not say (a
refusal of one prompt may follow when another has been sent). That nothing was recorded proves
nothing either: an engine client may reach the engine core some other way.
`vllm_overlay.entrypoints.verdict` has the other half.

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
        refused: the handler refused the request for good, whatever its endpoint answers.
        released: names the blocks (the prefill server's engine, its request) that may be
            somebody else's from now on; the engine must not read them. None while there are none.
    """

    __slots__ = ("_on_admission", "_sends", "admitted", "refused", "released")

    def __init__(self, on_admission: Callable[[], None] = lambda: None) -> None:
        self.admitted = False
        self.refused = False
        self.released: tuple[object, object] | None = None
        self._sends: set[asyncio.Task[None]] = set()
        self._on_admission = on_admission

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
            self._admit()
            return
        task = asyncio.ensure_future(_go_on(sending, awaited))
        self._sends.add(task)
        task.add_done_callback(self._sent)
        await asyncio.shield(task)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sends.discard(task)
        if not task.cancelled() and task.exception() is None:
            self._admit()

    def _admit(self) -> None:
        self.admitted = True
        self._on_admission()

    async def end(self, params: dict[str, Any], reject: Callable[[], Awaitable[None]]) -> None:
        """Release what `params` name; await `reject` if the engine core was never sent them.

        `reject` runs in a task of its own, so that it also happens when the caller is already
        being cancelled. It must not raise.
        """
        if not self.admitted:
            await asyncio.shield(_keep(self._end(params, reject)))

    async def _end(self, params: dict[str, Any], reject: Callable[[], Awaitable[None]]) -> None:
        while self._sends:
            await asyncio.wait(self._sends)
        if not self.admitted:
            self.released = _blocks(params)
            await reject()


def _blocks(params: dict[str, Any]) -> tuple[object, object]:
    return params.get("remote_engine_id"), params.get("remote_request_id")


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
def open_exchange(on_admission: Callable[[], None] = lambda: None) -> Iterator[Exchange]:
    """Make what runs inside, and the tasks and generators made there, one exchange.

    `on_admission` is called when the engine core has been sent the request, once for each of
    several that carry the transfer. It must not raise.
    """
    exchange = Exchange(on_admission)
    token = _exchange.set(exchange)
    try:
        yield exchange
    finally:
        _exchange.reset(token)


def current_exchange() -> Exchange | None:
    """The exchange that the running code works for, if any."""
    return _exchange.get()


def has_given_up(params: dict[str, Any]) -> bool:
    """Whether the running code works for an exchange that has released what `params` name."""
    exchange = _exchange.get()
    return exchange is not None and exchange.released == _blocks(params)


async def admit(engine: AsyncLLM, request: EngineCoreRequest) -> None:
    """Send a request to the engine core and record it in the current exchange.

    Raises:
        CancelledError: the client left meanwhile. The request is aborted as soon as it has been
            sent; nobody else knows yet that there is something to abort.
        Exception: whatever sending raises; the request then counts as never sent.
    """
    exchange = _exchange.get()
    params = _transfer(request)
    if exchange is None or params is None:
        await engine.engine_core.add_request_async(request)
        return
    if exchange.released is not None:
        # A task that was begun in an exchange may serve others long after it.
        if exchange.released == _blocks(params):
            _drop_params(request)
        await engine.engine_core.add_request_async(request)
        return
    try:
        await exchange.send(engine.engine_core.add_request_async(request))
    except asyncio.CancelledError:
        _keep(_abort_once_sent(engine, exchange, request.request_id))
        raise


def _transfer(request: EngineCoreRequest) -> dict[str, Any] | None:
    """What the engine core learns from this request of blocks to read, or to keep."""
    sampling = request.sampling_params
    params = sampling and sampling.extra_args and sampling.extra_args.get("kv_transfer_params")
    if isinstance(params, dict) and not params.keys().isdisjoint(_ROLES):
        return params
    return None


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
