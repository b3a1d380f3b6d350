"""The first signal ends an installer; those after it change nothing any more."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from scripts.ship.runtime.signals import end_once, undisturbed


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_only_the_first_counts(second: int) -> None:
    end_once()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    send(second)
    with undisturbed():
        send(second)
    send(second)


def test_told_to_end_it_ends_with_the_code_for_that() -> None:
    end_once()
    with pytest.raises(SystemExit) as caught:
        send(signal.SIGTERM)
    assert caught.value.code == 143
    send(signal.SIGINT)


def test_what_was_ignored_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_once()
    send(signal.SIGINT)


def test_what_cleans_up_is_not_disturbed_and_afterwards_it_counts() -> None:
    end_once()
    with undisturbed():
        send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
