"""K02: a failed receive of a model with several KV groups is recomputed or failed.

Worker and scheduler have to agree that the blocks of all groups are lost. If the worker reports
such a receive without invalid blocks, the scheduler takes the prompt as computed, and the client
gets HTTP 200 with an answer to something else.
"""

from __future__ import annotations

import pytest

from tests.support.decode_engine import DecodeEngine, Step
from tests.support.nixl_worker import (
    GroupKind,
    attempt,
    await_handshakes,
    connect,
    nixl_of,
    raising,
    script_handshake,
)

PROMPT = range(100, 140)  # 40 tokens in 3 blocks of 16
GROUPS: list[tuple[GroupKind, ...]] = [
    ("full", "sliding"),
    ("sliding", "full"),
    ("full", "mamba"),
    ("full", "sliding", "sliding"),
]
FAILURES = ("handshake", "posting", "reading")


def lose_a_receive(engine: DecodeEngine, how: str, then: int) -> list[Step]:
    """Ask for "req-d", whose KV does not arrive, and take that step and `then` more."""
    if how == "handshake":

        def refuse(engine_id: str, tp_size: int) -> dict[int, str]:
            raise RuntimeError("NIXL compatibility hash mismatch")

        script_handshake(engine.worker, refuse)
    else:
        connect(engine.worker, "P")
    nixl = nixl_of(engine.worker)
    if how == "posting":
        nixl.on["transfer"] = raising(RuntimeError("no route"))
    if how == "reading":
        nixl.on["check_xfer_state"] = lambda handle: "ERR"
    groups = engine.worker.kv_cache_config.kv_cache_groups
    is_state = [type(group.kv_cache_spec).__name__ == "MambaSpec" for group in groups]
    engine.ask("req-d", PROMPT, [[5] if state else [5, 6, 7] for state in is_state])
    steps = [engine.step()]
    await_handshakes(engine.worker)
    return steps + [engine.step() for _ in range(then)]


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("groups", GROUPS, ids="-".join)
def test_with_recompute_the_whole_prompt_is_computed_here(
    groups: tuple[GroupKind, ...], how: str
) -> None:
    engine = DecodeEngine(groups=groups, policy="recompute")
    steps = attempt(lose_a_receive, engine, how, then=4)
    assert isinstance(steps, list)
    computed = [step.computed["req-d"] for step in steps if "req-d" in step.computed]
    assert computed[:1] == [(0, len(PROMPT))]
    assert [step.finished for step in steps if step.finished] == [{"req-d": "length"}]


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("groups", GROUPS, ids="-".join)
def test_with_fail_the_request_ends_in_an_error_and_its_blocks_are_free(
    groups: tuple[GroupKind, ...], how: str
) -> None:
    engine = DecodeEngine(groups=groups, policy="fail")
    everything = engine._reusable()
    steps = attempt(lose_a_receive, engine, how, then=3)
    assert isinstance(steps, list)
    assert [step.computed for step in steps if step.computed] == []
    assert [step.finished for step in steps if step.finished] == [{"req-d": "error"}]
    assert engine.scheduler.requests == {}
    assert steps[-1].reusable == everything
