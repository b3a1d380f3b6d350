"""Thousands of requests, with failures of every kind, in one life of engines: what is left of them.

After each part of the run everything is let come to its end, and looked at as at the end of a
history; then the clients are forgotten, and the same engines go on. So a table that has kept
something of what is over has more entries the next time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.simulation.checks import FoundError, settling
from tests.simulation.engine import DiedError
from tests.simulation.history import Profile, choose, profile_of, setting_of
from tests.simulation.sizes import Sizes, sizes
from tests.simulation.world import Event, Stage, World

PART = 40
"""Requests between two times at which all comes to its end."""

PROFILE = profile_of(
    {
        "ask": 4,
        "plain": 0.3,
        "tick": 25,
        "job": 8,
        "move": 12,
        "forward": 8,
        "deliver": 8,
        "abort": 1.5,
        "reject": 0.7,
        "drop": 0.3,
        "fail": 0.7,
        "job_breaks": 0.3,
        "cut": 0.1,
        "mend": 1,
        "restart": 0.15,
        "refuse": 0.3,
    },
    times=(0.01, 0.2, 1.0, 9.0),
    events=10**9,  # a part ends with its requests
    jobs=PART,
    ranks=((2, 2), (2, 1), (1, 2)),
    engines=((2, 2),),
    policies=("recompute", "fail"),
    readers=(1, 1, 1, 2),
    blocks=(24, 34),
    refusals=("send_notif", "transfer", "make_prepped_xfer", "release_xfer_handle"),
    lasting=("P0", "D0"),
)
"""Every kind of failure. P1 and D1 restart, so that P0 and D0 have peers that come and go."""


@dataclass
class Life:
    """What was seen of engines over time.

    Attributes:
        requests, steps: how many clients have asked for something, and how many events there were.
        samples: requests so far -> the tables of the engines that last.
        events: how often each kind of event was played.
        ends: how requests ended.
        found: what was not as it has to be, and how often.
        lines: what happened last before each of these was found first.
    """

    requests: int = 0
    steps: int = 0
    samples: dict[int, Sizes] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    lines: dict[str, list[Any]] = field(default_factory=dict)


def live(
    stage: Stage,
    requests: int,
    seed: str,
    without: frozenset[str] = frozenset(),
    heard: Callable[[Life], None] = lambda life: None,
) -> Life:
    """Let engines serve so many requests, and measure them ten or more times.

    Args:
        stage: where it is played.
        requests: how many.
        seed: of everything that happens.
        without: kinds of events that do not happen.
        heard: called after each measurement.
    """
    weights = {kind: w for kind, w in PROFILE.weights.items() if kind not in without}
    profile = Profile(**{**vars(PROFILE), "weights": weights})
    chance = Random(seed)  # noqa: S311 - repeatable is what it has to be
    world = World(setting_of(profile, chance), stage)
    life = Life()
    between = max(PART, requests // 40 // PART * PART)
    while life.requests < requests:
        _play(life, world, choose(profile, chance, world), life.requests + PART)
        _settle(life, world)
        life.requests, life.steps = world.asked, world.steps
        life.ends.update(_ends(world))
        world.forget()
        if life.requests // between > len(life.samples):
            lasting = {name: world.engines[name] for name in profile.lasting}
            life.samples[life.requests] = sizes(lasting)
            heard(life)
    world.close()
    return life


def _play(life: Life, world: World, events: Any, until: int) -> None:  # noqa: ANN401
    for event in events:
        life.events[event[0]] += 1
        _apply(life, world, event)
        if world.asked >= until:
            return


def _apply(life: Life, world: World, event: Event) -> None:
    try:
        world.apply(event)
    except FoundError as error:
        _note(life, world, error)


def _settle(life: Life, world: World) -> None:
    for _ in range(5):  # what is found in between ends it
        try:
            for error in settling(world):
                _note(life, world, error)
        except FoundError as error:
            _note(life, world, error)
        else:
            return


def _note(life: Life, world: World, error: FoundError) -> None:
    label = str(error)
    life.found[label] += 1
    world.note("router", f"!! {label}")
    life.lines.setdefault(label, world.lines[-80:])
    if isinstance(error.__cause__, DiedError):  # it is started again, and its tables are empty
        _apply(life, world, ("restart", error.__cause__.engine, True))


def _ends(world: World) -> Mapping[str, int]:
    ends: Counter[str] = Counter()
    for job in world.jobs.values():
        if job.dropped:
            ends["left before D had it"] += 1
        elif not job.readers:
            ends["rejected by D"] += 1
        else:
            ends.update(f"at D: {finish}" for finish in job.readers.values())
    return ends
