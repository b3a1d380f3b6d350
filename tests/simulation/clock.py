"""Virtual time: every process reads a clock of its own, and all go on only when the history says.

`time.perf_counter` and `time.monotonic` count from an origin that a machine chooses, so two
machines' values differ by any amount; two processes of one machine share it. A place is a process:
the scheduler of an engine, or one of its ranks. Modules of the release are given a `VirtualTime`
in place of the module `time`, and read the clock of whatever place is running.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock


class Place(NamedTuple):
    """A process: a rank of an engine, or its scheduler (rank -1)."""

    engine: str
    rank: int = -1


NOWHERE = Place("")
"""Outside of all engines: the router, the history itself. Its clock starts at 0."""


class Clock:
    """The time of the whole simulation, in seconds.

    Attributes:
        now: seconds since the simulation began; nobody inside it can read this.
        here: the place that is running.
        origins: what a place's clocks show at second 0; 0 where none is said.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.here = NOWHERE
        self.origins: dict[Place, float] = {}

    def read(self) -> float:
        """What a monotonic clock shows at the place that is running."""
        return self.now + self.origins.get(self.here, 0.0)

    @contextlib.contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Run what is inside as `place`."""
        before, self.here = self.here, place
        try:
            yield
        finally:
            self.here = before


WALL = 1_000_000_000.0
"""What `time.time` shows at second 0, everywhere: wall clocks are synchronized."""


class VirtualTime:
    """Stands in for the module `time`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def perf_counter(self) -> float:
        return self._clock.read()

    def monotonic(self) -> float:
        return self._clock.read()

    def monotonic_ns(self) -> int:
        return int(self._clock.read() * 1e9)

    def perf_counter_ns(self) -> int:
        return int(self._clock.read() * 1e9)

    def time(self) -> float:
        return WALL + self._clock.now

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def sleep(self, seconds: float) -> None:
        """No time passes but by the history."""


@contextlib.contextmanager
def replacing(replacements: Mapping[str, tuple[object, object]], prefixes: tuple[str, ...]) -> Any:  # noqa: ANN401
    """In loaded modules below `prefixes`, let names stand for something else.

    Args:
        replacements: name -> what it has to stand for now, and what it stands for in between. A
            module in which the name is something else keeps it.
        prefixes: packages.
    """
    with contextlib.ExitStack() as stack:
        for path, module in list(sys.modules.items()):
            if not path.startswith(prefixes):
                continue
            for name, (old, new) in replacements.items():
                if vars(module).get(name) is old:
                    stack.enter_context(mock.patch.object(module, name, new))
        yield


def virtual_time(clock: Clock) -> tuple[object, object]:
    """The replacement of the module `time`, for `replacing`."""
    return time, VirtualTime(clock)
