# SPDX-License-Identifier: Apache-2.0
"""Up to 0.30.0: a pause that fails once the engine is idle is told to who asked for it.

A pause that comes between two steps ends later, in the engine core's own loop, and nobody there
expects it to fail. It does where blocks are held by something that a pause does not move: a
transfer. What it leaves is what a pause leaves that fails at once: paused, until who asked resumes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

_Finish = TypeVar("_Finish", bound=Callable[..., None])


def tells_who_asked(finish: _Finish) -> _Finish:
    """Have what `finish` raises become the failure of the future that it is to resolve."""

    @functools.wraps(finish)
    def wrapper(engine: EngineCoreProc, future: Future[Any]) -> None:
        try:
            finish(engine, future)
        except Exception as error:
            future.set_exception(error)

    return cast("_Finish", wrapper)
