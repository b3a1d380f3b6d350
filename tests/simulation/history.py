"""Histories from a seed: engines of random shapes, and events that make sense where they stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from tests.simulation.checks import FoundError, settle
from tests.simulation.engine import Shape
from tests.simulation.slots import Mode
from tests.simulation.world import Event, Setting, Stage, World
from tests.support.nixl_worker import GroupKind
from tests.support.release import since

_Choice = TypeVar("_Choice")


@dataclass(frozen=True)
class Profile:
    """What may happen in a history, and how often.

    Attributes:
        events: how many events, before everything is let come to its end.
        jobs: how many requests of clients at most.
        weights: of each kind of event; one without a weight does not happen.
        times: seconds that may pass at once.
        ranks: pairs of tensor-parallel sizes of P and D.
        engines: pairs of how many P and how many D there may be.
        guesses: see `Shape`.
        groups, mla, asynchronous, policies, lookahead, nodes, edge: see `Shape`, each one of these.
        blocks: the smallest and the largest cache; `p_blocks` those of P, if they differ.
        lengths: tokens of the shortest and the longest prompt.
        readers: into how many requests D's API server may make one.
        refusals: calls that NIXL may refuse.
        lasting: engines that do not restart.
        keeps: see `Shape`.
        modes: see `Shape`, one of these for each engine.
        apart: each engine guesses as many tokens as it likes, not all the same.
        units, exports: see `Shape`, one of these for each engine.
        more: tokens of the shortest and the longest prompt that follows an answer.
        branches: how often another one follows it, of all that could.
    """

    events: int = 70
    jobs: int = 6
    weights: Mapping[str, float] = field(default_factory=dict)
    times: tuple[float, ...] = (0.01, 0.2, 1.0)
    ranks: tuple[tuple[int, int], ...] = ((1, 1),)
    engines: tuple[tuple[int, int], ...] = ((1, 1),)
    groups: tuple[tuple[GroupKind, ...], ...] = (("full",),)
    mla: tuple[bool, ...] = (False,)
    asynchronous: tuple[bool, ...] = (False,)
    policies: tuple[str, ...] = ("recompute",)
    lookahead: tuple[int, ...] = (0,)
    guesses: bool = False
    nodes: tuple[int, ...] = (1,)
    edge: tuple[bool, ...] = (False,)
    blocks: tuple[int, int] = (14, 24)
    p_blocks: tuple[int, int] | None = None
    lengths: tuple[int, int] = (1, 30)
    readers: tuple[int, ...] = (1,)
    refusals: tuple[str, ...] = ()
    lasting: tuple[str, ...] = ()
    keeps: int | None = None
    modes: tuple[Mode, ...] = ("none",)
    apart: bool = False
    units: tuple[int | None, ...] = (None,)
    exports: tuple[bool, ...] = (False,)
    more: tuple[int, int] = (1, 8)
    branches: float = 0.02


QUIET: Mapping[str, float] = {
    "ask": 3,
    "forward": 4,
    "tick": 12,
    "model": 2,
    "job": 3,
    "move": 6,
    "deliver": 4,
    "time": 1,
}
"""Clients ask and get answers; nothing goes wrong, but everything may take its time."""


def profile_of(more: Mapping[str, float] | None = None, **changes: Any) -> Profile:  # noqa: ANN401
    """What may happen besides the quiet things, and what else is not as usual."""
    return Profile(weights={**QUIET, **(more or {})}, **changes)


_RANKS = ((1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2), (1, 4))

_EXPORTS = (False, True) if since("0.30.0") else (False,)

_HYBRIDS = profile_of(
    {"ask": 6, "plain": 3, "forward": 8, "tick": 20, "job": 8, "move": 10, "abort": 0.5},
    groups=(("full", "mamba"),),
    asynchronous=(False, True),
    policies=("recompute", "fail"),
    blocks=(30, 50),
    p_blocks=(30, 80),
    lengths=(2, 30),
    jobs=12,
    events=140,
)

_TURNS = profile_of(
    {"ask": 0.5, "again": 8, "fail": 0.5, "abort": 0.2, "tick": 20, "job": 8, "move": 8},
    keeps=30,
    times=(0.01, 0.2, 1.0, 9.0),
    ranks=((1, 1), (2, 1), (1, 2), (2, 2)),
    groups=(("full",), ("full", "sliding")),
    asynchronous=(False, True),
    policies=("recompute", "fail"),
    blocks=(60, 80),
    p_blocks=(20, 34),
    lengths=(1, 20),
    jobs=12,
    events=200,
)

_SLOT_TURNS = dataclasses.replace(
    _TURNS,
    ranks=((1, 1),),
    groups=(("full", "mamba"),),
    modes=("align", "align", "none"),
    lookahead=(0, 0, 1, 2),
    guesses=True,
    apart=True,
    p_blocks=(40, 60),
)

PROFILES: Mapping[str, Profile] = {
    "quiet": profile_of(),
    "clients": profile_of({"abort": 1.5, "reject": 1, "drop": 0.3}, policies=("recompute", "fail")),
    "reads": profile_of({"fail": 1.5, "abort": 0.7}, policies=("recompute", "fail")),
    "hybrid": profile_of(
        {"fail": 1.5, "abort": 0.3},
        groups=(("full", "sliding"),),
        policies=("recompute", "fail"),
        blocks=(28, 40),
    ),
    "window": profile_of(groups=(("full", "sliding"),), edge=(True,), blocks=(28, 40)),
    "ranks": profile_of({"fail": 0.7, "abort": 0.7}, ranks=_RANKS[2:]),
    "latent": profile_of({"abort": 0.3}, mla=(True,), ranks=((2, 1), (4, 1), (4, 2), (2, 2))),
    "readers": profile_of(readers=(1, 2)),
    "handshakes": profile_of(
        {"job_breaks": 3, "abort": 3},
        engines=((1, 1), (2, 1)),
        groups=(("full",), ("full", "sliding")),
        blocks=(28, 40),
    ),
    "nodes": profile_of({"drop": 0.5}, nodes=(2,), ranks=((2, 2), (2, 1))),
    "leases": profile_of(
        {"time": 4, "drop": 1, "move": 1, "deliver": 8, "ask": 4, "tick": 16},
        times=(0.2, 4.0, 9.0),
        events=120,
        blocks=(30, 40),
    ),
    "async": profile_of(
        {"abort": 4, "ask": 4, "plain": 4, "forward": 10, "tick": 25, "job": 10, "move": 12},
        asynchronous=(True,),
        blocks=(11, 13),
        p_blocks=(60, 80),
        lengths=(14, 30),
        jobs=25,
        events=250,
    ),
    "full": profile_of(
        {"ask": 6, "forward": 8, "plain": 4, "tick": 20, "job": 8, "move": 10},
        asynchronous=(False, True),
        blocks=(11, 14),
        p_blocks=(60, 80),
        jobs=10,
        events=120,
    ),
    "states": profile_of(
        {"ask": 6, "forward": 8, "tick": 20, "job": 8, "move": 10},
        groups=(("full", "mamba"),),
        asynchronous=(False, True),
        blocks=(13, 18),
        p_blocks=(60, 80),
        lengths=(2, 30),
        jobs=10,
        events=120,
    ),
    "prefixes": profile_of(
        {"ask": 6, "plain": 3, "forward": 8, "tick": 20, "job": 8, "move": 10},
        groups=(("full", "mamba"),),
        modes=("align", "align", "none"),
        asynchronous=(False, True),
        blocks=(16, 40),
        p_blocks=(16, 80),
        lengths=(2, 30),
        jobs=12,
        events=140,
    ),
    "slots": dataclasses.replace(
        _HYBRIDS,
        modes=("align", "align", "none"),
        lookahead=(0, 1, 2, 3),
        guesses=True,
        apart=True,
    ),
    "blockwise": dataclasses.replace(
        _HYBRIDS,
        modes=("align" if since("0.33.0") else "all",),  # which 0.33.0 does not take any more
    ),
    "parts_of_blocks": dataclasses.replace(
        _HYBRIDS,
        modes=("align",),
        lookahead=(0, 0, 1),
        guesses=True,
        apart=True,
        units=(2, 2, None) if since("0.26.0") else (None,),
        exports=_EXPORTS,
    ),
    "exports": dataclasses.replace(
        _HYBRIDS,
        modes=("align",),
        lookahead=(0, 1, 2, 3),
        guesses=True,
        apart=True,
        exports=_EXPORTS,
    ),
    "crowded": profile_of(
        {"ask": 5, "plain": 5, "model": 1},
        asynchronous=(False, True),
        blocks=(11, 14),
        jobs=12,
        events=120,
    ),
    "lookahead": profile_of(lookahead=(2, 3)),
    "guesses": profile_of(
        {"ask": 5, "plain": 3, "forward": 8, "tick": 20, "job": 8, "move": 10, "abort": 0.5},
        groups=(("full",), ("full", "sliding")),
        lookahead=(1, 2, 3),
        guesses=True,
        asynchronous=(False, True),
        policies=("recompute", "fail"),
        blocks=(26, 40),
        p_blocks=(30, 80),
        jobs=12,
        events=140,
    ),
    "restarts": profile_of(
        {"cut": 0.4, "mend": 1, "restart": 0.4, "abort": 0.5},
        engines=((1, 1), (2, 1), (1, 2)),
        policies=("recompute", "fail"),
    ),
    "refusals": profile_of(
        {"refuse": 1.5, "fail": 0.5, "abort": 0.5},
        refusals=("send_notif", "transfer", "make_prepped_xfer", "release_xfer_handle"),
    ),
    "turns": _TURNS,
    "slot_turns": _SLOT_TURNS,
    "long_turns": dataclasses.replace(
        _SLOT_TURNS,
        modes=("align",),
        lookahead=(0, 0, 1),
        more=(8, 40),
        branches=0.5,
        exports=_EXPORTS,
    ),
    "all": profile_of(
        {
            "abort": 1,
            "reject": 0.4,
            "drop": 0.2,
            "fail": 0.4,
            "job_breaks": 0.3,
            "cut": 0.1,
            "mend": 1,
            "restart": 0.08,
            "refuse": 0.1,
            "plain": 0.3,
        },
        jobs=9,
        events=100,
        ranks=_RANKS,
        engines=((1, 1), (1, 1), (2, 1), (1, 2), (2, 2)),
        mla=(False, False, True),
        asynchronous=(False, True),
        policies=("recompute", "fail"),
        readers=(1, 1, 1, 2),
        refusals=("send_notif", "transfer", "make_prepped_xfer"),
    ),
}


def _one(chance: Random, among: Sequence[_Choice]) -> _Choice:
    """No choice among one: of the profiles that were here before, histories stay what they were."""
    return chance.choice(among) if len(among) > 1 else among[0]


def setting_of(profile: Profile, chance: Random) -> Setting:
    """Engines of a random shape."""
    p_ranks, d_ranks = chance.choice(profile.ranks)
    p_count, d_count = chance.choice(profile.engines)
    groups = chance.choice(profile.groups)
    mla = chance.choice(profile.mla) and len(groups) == 1
    lookahead, edge = chance.choice(profile.lookahead), chance.choice(profile.edge)

    def shape(ranks: int, blocks: tuple[int, int]) -> Shape:
        mode = _one(chance, profile.modes)
        guessed = chance.choice(profile.lookahead) if profile.apart else lookahead
        return Shape(
            ranks=ranks,
            nodes=min(ranks, chance.choice(profile.nodes)),
            blocks=chance.randint(*blocks) + (2 if guessed else 0),
            budget=chance.choice((8, 16, 64)),
            seqs=chance.choice((2, 4, 8)),
            groups=groups,
            mla=mla,
            asynchronous=chance.choice(profile.asynchronous),
            policy=chance.choice(profile.policies),
            lookahead=guessed,
            guesses=profile.guesses and bool(guessed),
            edge=edge,
            keeps=profile.keeps,
            mode=mode,
            unit=_one(chance, profile.units),
            exports=_one(chance, profile.exports),
        )

    return Setting(
        tuple(shape(p_ranks, profile.p_blocks or profile.blocks) for _ in range(p_count)),
        tuple(shape(d_ranks, profile.blocks) for _ in range(d_count)),
    )


@dataclass
class Played:
    """A history, as far as it came.

    Attributes:
        events: its own, without those that let everything come to its end.
        found: what was wrong; None if nothing was.
        world: where it was played.
    """

    events: list[Event]
    found: FoundError | None
    world: World


def play(setting: Setting, stage: Stage, events: Iterator[Event] | list[Event]) -> Played:
    """Let events happen one after the other, and then everything come to its end."""
    return _play(World(setting, stage), iter(events))


def play_random(profile: Profile, stage: Stage, seed: str) -> Played:
    """Play a history of a seed."""
    chance = Random(seed)  # noqa: S311 - repeatable is what it has to be
    world = World(setting_of(profile, chance), stage)
    return _play(world, choose(profile, chance, world))


def _play(world: World, events: Iterator[Event]) -> Played:
    happened: list[Event] = []
    found = None
    try:
        for event in events:
            happened.append(event)
            world.apply(event)
        world.note("router", "-- all that is under way comes to its end --")
        settle(world)
    except FoundError as error:
        found = error
        world.note("router", f"!! {error}")
    world.close()
    return Played(happened, found, world)


def choose(profile: Profile, chance: Random, world: World) -> Iterator[Event]:
    """Yield random events, each of which makes sense in the world as it is then."""
    for _ in range(profile.events):
        possible = list(_possible(profile, chance, world))
        by_kind: dict[str, list[Event]] = {}
        for event in possible:
            by_kind.setdefault(event[0], []).append(event)
        kinds = [kind for kind in by_kind if profile.weights.get(kind)]
        (kind,) = chance.choices(kinds, [profile.weights[kind] for kind in kinds])
        yield chance.choice(by_kind[kind])


def _possible(profile: Profile, chance: Random, world: World) -> Iterator[Event]:
    p_names = [name for name in world.engines if name[0] == "P"]
    d_names = [name for name in world.engines if name[0] == "D"]
    if len(world.jobs) < profile.jobs:
        family, shared = chance.randrange(2), chance.choice((0, 4, 8, 13, 40))
        length, tokens = chance.randint(*profile.lengths), chance.randint(1, 8)
        what = family, shared, length, tokens
        yield "ask", world.asked, chance.choice(p_names), *what
        yield "plain", world.asked, chance.choice((*p_names, *d_names)), *what
    continued = {job.earlier.number for job in world.jobs.values() if job.earlier}
    for number, job in world.jobs.items():
        if not job.answered and not job.dropped:
            yield "abort", number, "P"
        elif job.at_router:
            yield "forward", number, chance.choice(d_names), chance.choice(profile.readers)
            yield "reject", number, chance.choice(d_names)
            yield "drop", number
        elif not job.over:
            yield "abort", number, "D"
        if job.kept is None or not job.over or len(world.jobs) >= profile.jobs:
            continue
        if number not in continued or chance.random() < profile.branches:
            more, tokens = chance.randint(*profile.more), chance.randint(1, 8)
            yield "again", world.asked, number, chance.choice(p_names), more, tokens
    for name, engine in world.engines.items():
        yield "tick", name
        if any(step.tokens is None for step in engine.steps):
            yield "model", name
    for jobs in world.executors:
        if len(jobs):
            yield "job", *jobs.place
            yield "job_breaks", *jobs.place
    for read in world.wire.reads:
        number, rank = read.tag["number"], read.reader.place.rank
        rest = len(read.pairs) - read.copied
        yield "move", number, rank, chance.choice((rest, max(1, rest // 2), max(1, rest // 5)))
        yield "fail", number, rank
    for channel in world.wire.channels:
        yield "deliver", *channel
    yield "time", chance.choice(profile.times)
    p, d = chance.choice(p_names), chance.choice(d_names)
    yield "cut", p, d
    name, anew = chance.choice((p, d)), chance.random() < 0.5
    if name not in profile.lasting:
        yield "restart", name, anew
    for pair in world.wire.cut:
        yield "mend", *sorted(pair)
    for call in profile.refusals:
        yield "refuse", d, call


def described(setting: Setting) -> str:
    """The engines in a line each: what differs from the defaults."""
    plain = Shape()

    def one(name: str, shape: Shape) -> str:
        said = [
            f"{f.name}={getattr(shape, f.name)}"
            for f in dataclasses.fields(Shape)
            if getattr(shape, f.name) != getattr(plain, f.name)
        ]
        return f"{name}: {', '.join(said) or 'as by default'}"

    return "\n".join(
        one(f"{role}{i}", shape)
        for role, shapes in (("P", setting.prefill), ("D", setting.decode))
        for i, shape in enumerate(shapes)
    )
