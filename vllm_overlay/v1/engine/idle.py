# SPDX-License-Identifier: Apache-2.0
"""All releases: an idle engine core looks whether its connector has something to say.

The core's loop blocks on its input queue while there is no work. It goes on doing so; where a
connector asks for it (`WantsLooks`), or something else is awaited, the wait has an end, at which
one step is taken right here, and the wait goes on. Nothing else sees a difference: outside that
step the engine has no work, so what waits for it to be idle (a pause, sleep, a shutdown, a release
of its memory) waits no longer, and an idle rank of several in data parallelism takes part in
nothing, as in the steps that vLLM takes for requests that have finished.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    RARELY,
    WantsLooks,
)

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc


def next_request(
    core: EngineCoreProc, block: bool, awaits: Callable[[EngineCoreProc], bool] = lambda _: False
) -> Any:  # noqa: ANN401 - the queue's item
    """Return the next item of the core's input queue, with steps in between that are asked for.

    Args:
        core: the engine core whose loop this is.
        block: whether to wait for an item.
        awaits: whether there is something to look for besides what the connector asks for. It is
            looked for rarely, and not at once: the peer that ends it works now, at times on the
            same cores, and workers spin for a while after each step.

    Raises:
        queue.Empty: there is none and `block` is false, or a step has left work to do.
    """
    since = time.monotonic()
    while block:
        look = _next_look(core, since + RARELY if awaits(core) else None)
        if look is None:
            break
        try:
            return core.input_queue.get(timeout=max(0.0, look - time.monotonic()))
        except queue.Empty:
            _look(core)
            since = time.monotonic()
            if core.has_work():
                raise
    return core.input_queue.get(block=block)


def step_or_look(core: EngineCoreProc) -> bool:
    """Take a step of a data-parallel rank, which does not wait for requests while others have some.

    One that has none itself takes it for the connector, if that asks for one now.

    Returns:
        Whether the model was run.
    """
    look = None if core.scheduler.has_requests() else _next_look(core, None)
    if look is not None and look <= time.monotonic():
        return _look(core)
    return core._process_engine_step()


def _next_look(core: EngineCoreProc, awaited: float | None) -> float | None:
    """When to take the next step: for what is `awaited` besides, or for the connector."""
    connector = core.scheduler.get_kv_connector()
    looks = [awaited, connector.next_look() if isinstance(connector, WantsLooks) else None]
    first = min((look for look in looks if look is not None), default=None)
    if first is None or core.is_scheduler_paused() or core.model_executor.is_sleeping:
        return None  # the workers may be busy with other things than steps
    return first


def _look(core: EngineCoreProc) -> bool:
    connector: Any = core.scheduler.get_kv_connector()
    if isinstance(connector, WantsLooks):
        connector.looks()
    connector.looking = True
    try:
        return core._process_engine_step()
    finally:
        connector.looking = False
