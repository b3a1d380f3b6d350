"""How many lines of log a loop of bad requests costs a decode server.

`python -m tests.programs.log_lines KIND REQUESTS` sends that many, one after the other, and prints
as JSON: `sent`, `lines` in all, `ours` of these, `kinds` (the beginning of each kind of line, and
how many), `seconds`, and `ended`, what the engine ended with, if it did: then none was sent any
more.

A request goes through the API server's own application, and what that sends to the engine core
through the engine core's `add_request`, its scheduler and NIXL's worker, all of them the build's.
Not real are HTTP (so the access log, a line for each request, is not counted), the model, and the
network: whoever is not there fails a handshake at once, where a real one may take 5 s.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.support import vllm_cpu

vllm_cpu.prepare()

from tests.support.idle_engine import IdleEngine  # noqa: E402 - the platform has to be settled
from tests.support.nixl_worker import (  # noqa: E402
    await_handshakes,
    connect,
    nixl_of,
    script_handshake,
)
from tests.support.serving_app import REMOTE, body, serving  # noqa: E402

PATH = "/v1/completions"
_BEGINNING = 50
_STEPS = 20  # for one request; one that reads takes three

_P = REMOTE["remote_engine_id"]


def _gone(number: int) -> dict[str, Any]:
    return {"remote_engine_id": f"gone-{number}", "remote_port": 1 + number % 65_535}


KINDS: dict[str, Callable[[int], tuple[dict[str, Any], dict[str, Any]]]] = {
    "parameters that cannot be used": lambda n: ({"remote_port": "x"}, {}),
    "too few blocks": lambda n: ({"remote_block_ids": [[1]]}, {}),
    "refused for its length": lambda n: ({}, {"max_tokens": 10**6}),
    "the same, of a P that is gone": lambda n: (_gone(n), {"max_tokens": 10**6}),
    "parameters of another request": lambda n: ({"remote_request_id": "cmpl-p"}, {}),
    "a P that is gone": lambda n: (_gone(n), {}),
}
"""What differs from good parameters, and from a good body, in the n-th request."""


class _Lines(logging.Handler):
    """Counts the lines of records, a traceback's too, as vLLM's own handler would write them."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()
        self.ours = 0

    def emit(self, record: logging.LogRecord) -> None:
        lines = 1 + self.format(record).count("\n")
        self.kinds[f"{record.levelname} {str(record.msg)[:_BEGINNING]}"] += lines
        self.ours += lines * record.name.startswith("vllm.vllm_overlay")


async def measure(kind: str, requests: int) -> dict[str, Any]:
    """Send `requests` of a kind to a decode server and count what it logs."""
    engine = IdleEngine(num_blocks=128)
    connect(engine.worker, _P)
    script_handshake(engine.worker, _nobody)
    ended, sent = "", 0
    async with serving() as server:
        server.engine.log_requests = False  # as `vllm serve` by default
        lines = _counted()
        begin = time.monotonic()
        for sent in range(1, requests + 1):
            params, changes = KINDS[kind](sent)
            params = {**REMOTE, "remote_request_id": f"cmpl-p-{sent}", **params}
            prompt = f"{sent:06d}".ljust(40, "x")  # none has another's prefix
            await server.post(PATH, body(PATH, params, **{"prompt": prompt, **changes}))
            added, server.core.requests = server.core.requests, []
            try:
                for request in added:
                    engine.add(request)
                _to_the_end(engine)
            except Exception as error:  # whatever ends an engine
                ended = str(error).splitlines()[0][:200]
                break
        return {
            "sent": sent,
            "lines": sum(lines.kinds.values()),
            "ours": lines.ours,
            "kinds": dict(lines.kinds.most_common()),
            "seconds": round(time.monotonic() - begin, 1),
            "ended": ended,
        }


def _counted() -> _Lines:
    """Count the lines of vLLM's logger from now on, and write none."""
    lines = _Lines()
    logger = logging.getLogger("vllm")
    logger.handlers[:], logger.propagate = [lines], False
    return lines


def _nobody(engine_id: str, tp_size: int) -> dict[Any, str]:
    raise TimeoutError(f"no answer of {engine_id}")


def _to_the_end(engine: IdleEngine) -> None:
    """Step until no request is left and nobody is to be told any more."""
    nixl = nixl_of(engine.worker)
    for _ in range(_STEPS):
        if not engine.scheduler.has_requests() and not _to_tell(engine):
            break
        engine.step()
        nixl.finish(*nixl.in_flight())
        await_handshakes(engine.worker)
    nixl.reads.clear()


def _to_tell(engine: IdleEngine) -> bool:
    notifications: Any = vars(engine.worker).get("_notifications")
    return notifications is not None and bool(notifications.pending())


def main(kind: str, requests: str) -> None:
    """Measure one kind."""
    print(json.dumps(asyncio.run(measure(kind, int(requests)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
