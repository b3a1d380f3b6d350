"""What has to hold, whatever happens.

- what a client is told was computed from its own prompt's KV, and nothing else;
- no engine ends;
- a read writes into nobody else's blocks;
- a receive is reported once, a request ends once, and every request ends;
- NIXL's handles are used as NIXL allows;
- blocks that nobody will read are given back without waiting for the lease, unless the word was
  lost with a connection or nobody knew of them; and when the lease is over at the latest, as where
  D cannot read them and answers with an error;
- when all is over, no block is held, no handle kept, and no table names a request.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tests.simulation.text import WRONG

if TYPE_CHECKING:
    from tests.simulation.engine import DiedError, Engine, Told
    from tests.simulation.world import Job, World


class FoundError(Exception):
    """Something is not as it has to be.

    Args:
        kind: which promise is broken.
        cause: by what, as far as the simulation knows; the same for the same defect.
    """

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(f"{kind}: {cause}")


def cause_of(died: DiedError) -> str:
    """What the release raised, and where: the innermost frame of its own."""
    error = died.__cause__
    frames = traceback.extract_tb(error.__traceback__) if error else []
    own = [f for f in frames if "/vllm/" in f.filename or "/vllm_overlay/" in f.filename]
    where = f" in {own[-1].name}" if own else ""
    what = died.args[0].split(" dies in ")[1]
    words = str(error).splitlines()[0][:80] if str(error) else ""
    said = f"{died.engine[0]}, {what}: {type(error).__name__}({words}){where}"
    # Names and numbers differ from history to history.
    return re.sub(r"0x[0-9a-f]+|\d+", "N", re.sub(r"\b[rk]\d+-\w+", "a request", said))


def answer(world: World, engine: Engine, job: Job, told: Told) -> None:
    """A client, or the router, is told tokens."""
    if WRONG in told.tokens:
        bad = world.bad_reads.get(told.req_id)
        cause = f"stale read: {bad.split(': ')[1]}" if bad else _origin(world, engine, told.req_id)
        raise FoundError(f"wrong KV at {engine.name[0]}", cause)


def _origin(world: World, engine: Engine, req_id: str) -> str:
    """Whose KV it was instead, and how it may have come there."""
    words = engine.wrong[req_id]
    job, found = world.requests[req_id], int(words.split("holds ")[1], 16)
    if " in block 0 " in words:
        return "of a block that was given up"
    if req_id in world.failed:
        return "of a read that failed"
    for other in world.jobs.values():
        # The model's own is turned round where it came from wrong KV; see `Engine.compute`.
        places = map(other.text.find, (found, found ^ 2**64 - 1))
        at = next((place for place in places if place is not None), None)
        if at is not None:
            world.note(engine.name, f"that is r{other.number}'s, position {at}")
            return "its own, of another position" if other is job else "another request's"
    return "nobody's"


def after_event(world: World) -> None:
    """What can be seen at any time."""
    if world.caught:
        raise world.caught.pop(0)
    if world.wire.misuse:
        raise FoundError("misuse of NIXL", world.wire.misuse[0])
    for engine in world.engines.values():
        for req_id, times in engine.reported.items():
            if times > engine.asked[req_id]:
                raise FoundError("a receive was reported too often", engine.name[0])


def overdue(world: World, engine: Engine) -> None:
    """After an engine's workers took a step: a lease that is over has ended."""
    for rank in engine.ranks if engine.stepped else ():
        with world.clock.at(rank.place):
            now = world.clock.read()
        for deadline in rank.worker._reqs_to_send.values():
            if now > deadline + 1.0:
                raise FoundError("a lease goes on when it is over", engine.name[0])


def settle(world: World) -> None:
    """Let everything come to its end, and look what is left.

    Raises:
        FoundError: something is.
    """
    for error in settling(world):
        raise error


def settling(world: World) -> Iterator[FoundError]:
    """The same, for those who want to know all that is left."""
    _quiet(world)
    held = {
        req_id: job
        for job in world.jobs.values()
        if job.p in world.engines and job.over and not job.excused and not _asked_again(world, job)
        for req_id in [job.prefill_id]
        if world.engines[job.p].blocks_of(req_id)
    }
    if held:
        req_id, job = next(iter(held.items()))
        world.note(job.p, f"{req_id}'s blocks are still held, and nobody will read them")
        yield FoundError("blocks are held until the lease is over", _why_held(job))
    things = _left(world)
    for _ in range(LEASES):
        if not things and not _waiting(world):
            return
        for name in world.engines:
            world.kick(name)
        for _ in range(3):
            world.round(4.0)
        _drain(world)
        things = _left(world)
    for job in _waiting(world):
        yield FoundError("a request never ends", "at D" if job.d else "at P")
    for thing in things:
        yield FoundError("something is left", thing)


LEASES = 100
"""Twelve seconds each: longer than two of the longest leases (480 s), one behind the other, as
where a D that keeps answers for so long (0.21.0) waits for the blocks of the first."""


def _waiting(world: World) -> list[Job]:
    return [job for job in world.jobs.values() if not job.over]


def _left(world: World) -> list[str]:
    return [f"{e.name[0]}: {thing}" for e in world.engines.values() for thing in left(world, e)]


def _drain(world: World) -> None:
    """Give no more requests, and let engines finish those that they have."""
    for _ in range(20):
        world.round(0.05)
        if not any(engine.busy for engine in world.engines.values()):
            return


def _asked_again(world: World, job: Job) -> bool:
    """Whether the client may ask another D, which is to find the blocks: after a 500."""
    if not job.d or world.shapes[job.d].policy != "fail":
        return False
    return any(why == "error" or req_id in world.failed for req_id, why in job.readers.items())


def _why_held(job: Job) -> str:
    reasons = set(job.readers.values())
    if not job.readers:
        return "D had rejected the request"
    return "D's request ended: " + ", ".join(sorted(str(reason) for reason in reasons))


def _quiet(world: World) -> None:
    """Go on until nothing changes any more; every engine gets steps to hear what it is told."""
    calm = 0
    for i in range(400):
        if i % 8 == 0:
            for name in world.engines:
                world.kick(name)
        before = len(world.lines)
        world.round(0.05)
        under_way = world.wire.reads or world.wire.channels or any(map(len, world.executors))
        words = [line.words for line in world.lines[before:]]
        calm = calm + 1 if not under_way and not any(map(_news, words)) else 0
        if calm > 24:
            break
    _drain(world)


def _news(words: str) -> bool:
    return not words.startswith(("schedules k", "the model has run", "tells", "rank"))


def left(world: World, engine: Engine) -> Iterator[str]:
    """What an engine still has when all is over."""
    used = engine.shape.blocks - 1 - engine.free_blocks()
    if used:
        yield f"{used} blocks in use" if used < 3 else "blocks in use"
    for rank in engine.ranks:
        if rank.agent.unreleased():
            yield "a NIXL handle"
        yield from (f"the worker's {name}" for name in naming(rank.worker, world.requests))
    side = engine._connector_scheduler
    yield from (f"the scheduler side's {name}" for name in naming(side, world.requests))
    yield from (f"the scheduler's {name}" for name in naming(engine.scheduler, world.requests))
    yield from (f"the aggregator's {name}" for name in naming(engine._aggregator, world.requests))


def naming(thing: object, ids: Mapping[str, Any]) -> Iterator[str]:
    """The tables of an object that name one of these requests; also those of the overlay's objects
    in it."""
    for name, value in vars(thing).items():
        if _names(value, ids, depth=5 if _is_overlays(value) else 3):
            yield name


def _names(value: object, ids: Mapping[str, Any], depth: int) -> bool:
    if isinstance(value, str):
        return value in ids
    inside: Iterable[object] = ()
    if depth == 0:
        return False
    if isinstance(value, dict):
        inside = [*value, *value.values()]
    elif isinstance(value, (set, frozenset, list, tuple)):
        inside = [*value]
    elif _is_overlays(value):
        inside = vars(value).values()
    return any(_names(each, ids, depth - 1) for each in inside)


def _is_overlays(value: object) -> bool:
    return type(value).__module__.startswith("vllm_overlay.") and hasattr(value, "__dict__")
