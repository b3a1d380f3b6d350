"""When an engine without requests has a step to take: for clean-up, and to look, not else."""

from __future__ import annotations

from tests.support.idle_engine import IdleEngine


def test_an_idle_engine_has_nothing_to_do() -> None:
    assert not IdleEngine().scheduler.has_requests()


def test_workers_hear_which_requests_have_finished() -> None:
    engine = IdleEngine()
    engine.ask("a", range(20))
    engine.abort("a")
    assert engine.scheduler.has_requests()
    engine.step()
    assert not engine.scheduler.has_requests()


def test_a_look_is_work_while_it_is_taken() -> None:
    engine = IdleEngine()
    connector = engine.scheduler.connector
    connector.looking = True
    assert engine.scheduler.has_requests()
    connector.looking = False
    assert not engine.scheduler.has_requests()


def test_a_connector_that_wants_no_looks_is_not_asked() -> None:
    engine = IdleEngine()
    engine.scheduler.connector = None
    assert not engine.scheduler.has_requests()
