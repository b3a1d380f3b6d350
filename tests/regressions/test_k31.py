"""K31: a failed receive of several groups of full attention does not end the engine.

With HiSparse the latent caches of a D are in two such groups. Of several groups a worker may not
name lost blocks, only lost requests: from 0.31.0 on the scheduler minds.
"""

from __future__ import annotations

from typing import Literal

import pytest

from tests.support.decode_engine import DecodeEngine, Step
from tests.support.nixl_worker import (
    GroupKind,
    attempt,
    await_handshakes,
    connect,
    nixl_of,
    script_handshake,
)
from tests.support.release import since

SEVERAL = since("0.30.0")
"""Before, no engine has several such groups; and a failed handshake is 40364's."""

GROUPS: tuple[GroupKind, ...] = ("full", "full") if SEVERAL else ("full",)

PROMPT = range(100, 140)


def lost(engine: DecodeEngine, how: str) -> list[object]:
    """The steps after a receive that fails, up to one that ends the engine."""
    if how == "handshake":

        def refuse(engine_id: str, tp_size: int) -> dict[int, str]:
            raise RuntimeError("NIXL compatibility hash mismatch")

        script_handshake(engine.worker, refuse)
    else:
        connect(engine.worker, "P")
        nixl_of(engine.worker).on["check_xfer_state"] = lambda handle: "ERR"
    engine.ask("req-d", PROMPT, [[5, 6, 7]] * len(GROUPS))
    steps: list[object] = [attempt(engine.step)]
    await_handshakes(engine.worker)
    while isinstance(steps[-1], Step) and len(steps) < 6:
        steps.append(attempt(engine.step))
    return steps


@pytest.mark.parametrize("how", ["reading", "handshake"] if SEVERAL else ["reading"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_policy_decides(policy: Literal["recompute", "fail"], how: str) -> None:
    steps = lost(DecodeEngine(groups=GROUPS, mla=True, policy=policy), how)
    assert all(isinstance(step, Step) for step in steps), steps[-1]
    computed = [step.computed.get("req-d") for step in steps if isinstance(step, Step)]
    ended = [step.finished.get("req-d") for step in steps if isinstance(step, Step)]
    assert ((0, len(PROMPT)) in computed) == (policy == "recompute")
    assert ("error" in ended) == (policy == "fail")
