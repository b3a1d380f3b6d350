"""Plugins' classes in the place of vLLM's: what they may do on stock they may do on patched."""

from __future__ import annotations

from typing import Any

from tests.parity.scenario import Observed, scenario
from tests.support.hybrid_engine import states
from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.overlapped_engine import OverlappedEngine
from tests.support.plugins import (
    derive,
    leave_last_token,
    own_coordinators,
    put_own_pool,
    read_by_position,
)
from tests.support.serving_app import REMOTE


def _engine() -> IdleEngine:
    engine = IdleEngine()
    connect(engine.worker, REMOTE["remote_engine_id"])
    return engine


def _lives(engine: IdleEngine) -> Observed:
    """Step with reads that complete; what was computed and who has finished, read and told."""
    nixl, steps = nixl_of(engine.worker), []
    for _ in range(5):
        step = engine.step()
        steps.append([step.computed, step.finished])
        nixl.finish(*nixl.in_flight())
    heard = {agent: [word.decode() for word in words] for agent, words in nixl.heard.items()}
    return {"steps": steps, "reads": len(nixl.reads), "heard": heard}


def _offer(blocks: list[int]) -> dict[str, Any]:
    return {**REMOTE, "remote_block_ids": [blocks]}


@scenario()
def a_worker_asks_for_reads_by_position() -> Observed:
    """As one that has a `_read_blocks` of its own around vLLM's may."""
    engine = _engine()
    read_by_position(engine.worker)
    engine.send("req-d", range(40), _offer([1, 2, 3]))
    return _lives(engine)


@scenario()
def samples_of_a_prompt_read_one_lease() -> Observed:
    """Dynamo's connector tells P how many there are; the prefix cache has nothing of them."""
    engine = _engine()
    derive(engine.scheduler.connector)
    for number in range(2):
        engine.send(f"sample {number}", [number] * 40, _offer([1, 2, 3]))
    return _lives(engine)


@scenario()
def p_leaves_out_the_last_token() -> Observed:
    """Two blocks hold the rest of 33, and D's scheduler promises no more."""
    engine = _engine()
    connector: Any = engine.scheduler.connector
    leave_last_token(connector.connector_scheduler)
    engine.send("req-d", range(33), _offer([1, 2]))
    return _lives(engine)


def _shares_its_cache(engine: OverlappedEngine) -> Observed:
    """Three prompts that begin alike: each step, and every end."""
    for number in range(3):
        engine.ask(f"req-{number}", [*range(40), *[number] * 20], max_tokens=24)
    steps: list[Observed] = []
    while (engine.steps or engine.scheduler.has_requests()) and len(steps) < 200:
        decided = engine.advance()
        steps.append(decided and dict(decided.num_scheduled_tokens))
    return [steps, engine.finished, engine.wrong]


@scenario("full", "full, sliding", "derived; full", "derived; full, sliding")
def a_block_pool_of_its_own(variant: str) -> Observed:
    """With a connector: there are blocks for all; a load comes behind what the cache has."""
    *derived, kind = variant.split("; ")
    groups: Any = tuple(kind.split(", "))
    engine = OverlappedEngine(groups=groups, num_blocks=48)
    put_own_pool(engine.scheduler, derived=bool(derived))
    connect(engine.worker, "P")
    shared = _shares_its_cache(engine)
    engine.ask("loads", range(60), [[1, 2, 3, 4]] * len(groups), max_tokens=2)
    return [shared, engine.run(), engine.finished, engine.computed["loads"]]


@scenario("full, sliding", "full, mamba")
def a_coordinator_of_its_own(kind: str) -> Observed:
    """Of a hybrid with prefix caching, without a connector."""
    groups: Any = tuple(kind.split(", "))
    with own_coordinators(), states(16, mode="align"):  # none else has prefixes from 0.33.0 on
        engine = OverlappedEngine(
            groups=groups, num_blocks=24, connected=False, prefix_caching=True
        )
    return _shares_its_cache(engine)
