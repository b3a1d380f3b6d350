"""Every check sees what it is there for: a fault is planted, and found.

Run on any build: `nox -s tests -- tests/simulation`. What is found without a planted fault, on
which release, is the business of `nox -s simulate`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.simulation import checks
from tests.simulation.checks import FoundError, settle
from tests.simulation.engine import Engine, Shape, Step, Told, Work
from tests.simulation.history import PROFILES, play, play_random
from tests.simulation.slots import Slots
from tests.simulation.text import Text, prompt
from tests.simulation.world import Setting, Stage, World
from tests.support.nixl_worker import GroupKind

HYBRID: tuple[GroupKind, ...] = ("full", "mamba")
HYBRID_GUESSES: Any = {"groups": HYBRID, "blocks": 40, "lookahead": 2, "guesses": True}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    logging.disable(logging.CRITICAL)
    made = Stage()
    with made.open():
        yield made
    logging.disable(logging.NOTSET)


@pytest.fixture
def world(stage: Stage) -> Iterator[World]:
    made = World(Setting(), stage)
    yield made
    made.close()


def prefilled(world: World, number: int = 0, length: int = 18) -> None:
    world.apply(("ask", number, "P0", 0, 0, length, 4))
    while not world.jobs[number].answered:
        world.apply(("tick", "P0"))


def reading(world: World, number: int = 0) -> None:
    """A request on D whose read has been posted, and nothing of it copied."""
    prefilled(world, number)
    world.apply(("forward", number, "D0", 1))
    while not world.wire.reads:
        world.apply(("tick", "D0"))
        world.apply(("job", "D0", 0))


@pytest.mark.parametrize(
    "setting",
    [
        Setting(),
        Setting((Shape(ranks=4, nodes=2),), (Shape(ranks=2),)),
        Setting((Shape(),), (Shape(ranks=2),)),
        Setting((Shape(mla=True, asynchronous=True),), (Shape(mla=True, asynchronous=True),)),
        Setting((Shape(budget=8), Shape()), (Shape(seqs=1), Shape(policy="fail"))),
        Setting(decode=(Shape(lookahead=3, guesses=True),)),
        Setting(decode=(Shape(lookahead=3, guesses=True, asynchronous=True),)),
        Setting((Shape(groups=HYBRID, mode="align"),), (Shape(groups=HYBRID),)),
        *(
            Setting((Shape(**HYBRID_GUESSES, mode=mode),), (Shape(**HYBRID_GUESSES, mode=mode),))
            for mode in ("none", "align")
        ),
    ],
)
def test_nothing_is_found_where_nothing_goes_wrong(stage: Stage, setting: Setting) -> None:
    world = World(setting, stage)
    for number in range(3):
        world.apply(("ask", number, "P0", 0, 8, 9 + 7 * number, 5))
    settle(world)
    for number, job in world.jobs.items():
        ((finish, said),) = zip(job.readers.values(), [job.told[f"r{number}-d0"]], strict=True)
        text = Text(prompt(0, 8, number, job.length))
        assert finish == "length"
        assert said == [text.token(job.length + i) for i in range(5)]
    world.close()


@pytest.mark.parametrize("profile", ["all", "ranks"])
def test_the_same_seed_is_the_same_history(stage: Stage, profile: str) -> None:
    one, other = (play_random(PROFILES[profile], stage, f"{profile}/0/1") for _ in range(2))
    assert one.events == other.events
    assert one.world.lines == other.world.lines
    again = play(one.world.setting, stage, one.events)
    assert again.world.lines == one.world.lines


def guessing(stage: Stage) -> World:
    """Engines that guess, with a request that a client of D has asked for without P."""
    shape = Shape(lookahead=3, guesses=True, asynchronous=True)
    world = World(Setting((shape,), (shape,)), stage)
    world.apply(("plain", 0, "D0", 0, 0, 9, 30))
    return world


def test_of_guesses_some_are_right_and_some_are_not(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, rejected = guessing(stage), set[tuple[int, int]]()
    output = Engine._output

    def watched(engine: Engine, step: Step) -> None:
        rejected.update((len(work.guesses), work.rejected) for work in step.work)
        output(engine, step)

    monkeypatch.setattr(Engine, "_output", watched)
    settle(world)
    assert {(3, 0), (3, 1), (3, 2), (3, 3)} <= rejected
    world.close()


def test_what_a_step_in_flight_rejects_is_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Work, "late", 0)
    with pytest.raises(FoundError, match="wrong KV at D"):
        settle(guessing(stage))


def test_the_state_of_another_slot_is_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(**HYBRID_GUESSES)
    world = World(Setting((shape,), (shape,)), stage)
    world.apply(("plain", 0, "D0", 0, 0, 9, 30))
    monkeypatch.setattr(Slots, "read", lambda *_: 0)
    with pytest.raises(FoundError, match="wrong KV at D"):
        settle(world)


def test_kv_that_changes_while_it_is_read(world: World) -> None:
    reading(world)
    (read,) = world.wire.reads
    world.apply(("move", 0, 0, 3))
    cells = world.engines["P0"].ranks[0].cells
    table = sorted(world.engines["P0"].blocks_of("r0-p"))
    other = Text(prompt(1, 40, 1, 18))
    cells.write(0, table, 0, other.kv(0, 18))
    world.apply(("move", 0, 0, len(read.pairs)))
    with pytest.raises(FoundError, match="wrong KV at D"):
        settle(world)


def test_a_token_of_wrong_kv_is_found_though_only_one_head_is_wrong(world: World) -> None:
    reading(world)
    (read,) = world.wire.reads
    world.apply(("move", 0, 0, len(read.pairs)))
    view, _ = world.engines["D0"].ranks[0].cells._layers[0][1]
    block = sorted(world.engines["D0"].blocks_of("r0-d0"))[1]
    view[block, 2, 7, 1, 0] ^= 1
    with pytest.raises(FoundError, match="wrong KV at D"):
        settle(world)


def test_a_read_into_the_block_of_another(stage: Stage) -> None:
    world = World(Setting(decode=(Shape(blocks=12),)), stage)
    reading(world)
    d = world.engines["D0"]
    request = d.scheduler.requests["r0-d0"]
    d.scheduler.kv_cache_manager.free(request)
    for queue in ("waiting", "skipped_waiting"):  # later releases have one for both
        if hasattr(d.scheduler, queue):
            getattr(d.scheduler, queue).remove_requests([request])
    del d.scheduler.requests["r0-d0"]
    world.apply(("plain", 1, "D0", 0, 0, 30, 8))
    for _ in range(8):
        world.apply(("tick", "D0"))
    with pytest.raises(FoundError, match="another's block"):
        world.apply(("move", 0, 0, 99))
    world.close()


def test_a_read_into_blocks_that_were_given_up(world: World) -> None:
    """Found when it is posted, though the worker takes what is raised then for NIXL's."""
    prefilled(world)
    world.apply(("forward", 0, "D0", 1))
    world.apply(("tick", "D0"))
    d = world.engines["D0"]
    d.scheduler.kv_cache_manager.free(d.scheduler.requests["r0-d0"])
    with pytest.raises(FoundError, match="blocks of nobody"):
        for _ in range(4):
            world.apply(("job", "D0", 0))
            world.apply(("tick", "D0"))


def test_an_engine_that_dies(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled(world)
    monkeypatch.setattr(world.engines["D0"].scheduler, "requests", None)
    with pytest.raises(FoundError, match="an engine died: D, a request"):
        world.apply(("forward", 0, "D0", 1))


def test_a_receive_that_is_reported_twice(world: World) -> None:
    reading(world)
    world.engines["D0"].reported["r0-d0"] = 2
    with pytest.raises(FoundError, match="reported too often"):
        world.apply(("time", 0.1))


def test_a_request_that_ends_twice(world: World) -> None:
    prefilled(world)
    with pytest.raises(FoundError, match="ended twice"):
        world._tell(world.engines["P0"], Told("r0-p", [7], "length"))


def test_a_handle_that_is_released_twice(world: World) -> None:
    reading(world)
    (read,) = world.wire.reads
    agent = world.engines["D0"].ranks[0].agent
    agent.release_xfer_handle(read.handle)
    with pytest.raises(Exception, match="released or never was"):
        agent.release_xfer_handle(read.handle)
    with pytest.raises(FoundError, match="misuse of NIXL"):
        world.apply(("time", 0.1))


def test_a_request_that_never_ends(world: World) -> None:
    prefilled(world)
    d = world.engines["D0"]
    world.apply(("forward", 0, "D0", 1))
    request = d.scheduler.requests["r0-d0"]
    d.scheduler.waiting.remove_requests([request])
    with pytest.raises(FoundError, match="a request never ends"):
        settle(world)


def test_a_lease_that_goes_on(world: World) -> None:
    prefilled(world)
    p = world.engines["P0"]
    p.ranks[0].worker._reqs_to_send["r0-p"] = float("-inf")
    p.stepped = True
    with pytest.raises(FoundError, match="a lease goes on"):
        checks.overdue(world, p)


def test_blocks_that_nobody_will_read(world: World) -> None:
    reading(world)
    (read,) = world.wire.reads
    world.apply(("move", 0, 0, len(read.pairs)))
    world.wire.channels.clear()  # the word is lost, and nothing says so
    with pytest.raises(FoundError, match="held until the lease is over"):
        settle(world)


def test_another_d_may_be_asked_for_what_ended_with_an_error(stage: Stage) -> None:
    world = World(Setting(decode=(Shape(policy="fail"),)), stage)
    reading(world)
    world.apply(("fail", 0, 0))
    settle(world)
    assert [*world.jobs[0].readers.values()] == ["error"]


def test_a_lease_ends_where_the_word_was_lost(world: World) -> None:
    reading(world)
    world.apply(("cut", "P0", "D0"))
    settle(world)


@pytest.mark.parametrize("table", ["_recving_metadata", "_reqs_to_process", "some_other_table"])
def test_a_table_that_still_names_a_request(world: World, table: str) -> None:
    prefilled(world)
    worker = world.engines["D0"].ranks[0].worker
    held = vars(worker).setdefault(table, set())
    held.update({"r0-d0": None} if isinstance(held, dict) else {"r0-d0"})
    world.apply(("forward", 0, "D0", 1))
    for _ in range(3):
        world.round(0.05)
    held.update({"r0-d0": None} if isinstance(held, dict) else {"r0-d0"})
    assert f"the worker's {table}" in list(checks.left(world, world.engines["D0"]))


def test_a_handle_that_is_kept(world: World) -> None:
    reading(world)
    found = list(checks.left(world, world.engines["D0"]))
    assert "a NIXL handle" in found
    assert any("blocks" in each for each in found)
