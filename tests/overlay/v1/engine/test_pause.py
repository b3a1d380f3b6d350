"""What becomes of a pause that ends, or fails to end, once the engine is idle."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("vllm_overlay.v1.engine.pause", reason="up to 0.30.0")
from vllm_overlay.v1.engine.pause import tells_who_asked

ENGINE: Any = object()


def test_a_failure_is_told_to_who_asked_as_it_was_raised() -> None:
    future: Future[Any] = Future()
    failure = RuntimeError("the blocks are held")

    @tells_who_asked
    def finish(engine: Any, future: Future[Any]) -> None:  # noqa: ANN401
        raise failure

    finish(ENGINE, future=future)
    assert future.exception(timeout=0) is failure


def test_a_pause_that_ends_is_told_once() -> None:
    future: Future[Any] = Future()
    told: list[Any] = []
    future.add_done_callback(lambda done: told.append(done.result()))

    @tells_who_asked
    def finish(engine: Any, future: Future[Any]) -> None:  # noqa: ANN401
        assert engine is ENGINE
        future.set_result("paused")

    finish(ENGINE, future=future)
    assert told == ["paused"]


def test_what_is_to_end_the_engine_ends_it() -> None:
    future: Future[Any] = Future()

    @tells_who_asked
    def finish(engine: Any, future: Future[Any]) -> None:  # noqa: ANN401
        raise SystemExit

    with pytest.raises(SystemExit):
        finish(ENGINE, future=future)
    assert not future.done()
