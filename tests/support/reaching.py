"""Up to 0.31.0 the overlay tries whether a peer is there (55471): here it finds out at once."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from types import ModuleType
from typing import Any
from unittest import mock


class AtOnce:
    """Stands in for a `ThreadPoolExecutor`: what it is given has run when `submit` returns."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *args: object) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@contextlib.contextmanager
def reaching_peers(away: Container[int] = ()) -> Iterator[None]:
    """Have every port be listened at inside, but for those that are `away`."""

    def connect(address: tuple[str, int], timeout: float) -> Any:  # noqa: ANN401
        if address[1] in away:
            raise ConnectionRefusedError(address)
        return mock.Mock()

    module = _renewal()
    with contextlib.ExitStack() as stack:
        if module is not None:
            stack.enter_context(mock.patch.object(module, "ThreadPoolExecutor", AtOnce))
            stack.enter_context(mock.patch.object(module, "create_connection", connect))
        yield


def _renewal() -> ModuleType | None:
    """The module that tries it, where the release has one."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(
            "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.renewal"
        )
    return None
