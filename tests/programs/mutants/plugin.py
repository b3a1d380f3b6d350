"""A pytest plugin: runs mutants of some modules against the tests that were collected.

`KVFIX_MUTANTS` names a JSON file with `modules` (files by the name they are imported by),
`workers`, `patience` (seconds), `out`, in `only` the mutants to try if not all, and in `sample` how
many of those, chosen at random by `seed`, if not all. Nothing is imported twice: the tests are
collected once, run once in a fork to learn which of them executes which line, and then every mutant
is a fork that swaps in its code and runs the tests that execute the changed lines, up to the first
that fails.

`out` gets a JSON object a line: what was learned, a fault if a test fails where every module is put
in place by the same means as it is, then each mutant with its verdict:

- "killed": a test failed, or the process died of it, or nobody could import it;
- "hung": a test took ten times as long as without it, and `patience` more;
- "survived": all of them passed;
- "not covered": no test executes the line in this process;
- "import": the line ran when the module was imported, before there was a mutant. It counts as
  nothing.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import socket
import sys
import threading
import time
import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.programs.mutants.children import DIED, HUNG, Children, Say
from tests.programs.mutants.swap import Source, UnloadableError, living_functions

_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_LEARNING = 900.0  # seconds that a test may take while lines are traced
_TIMES = 10.0
_IMPORTING = "importing it"  # by which a mutant is killed that nobody could import


class _Lines:
    """Notes which lines of some files are executed."""

    def __init__(self, files: Iterable[str]) -> None:
        self.files = frozenset(files)
        self.seen: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401
        if frame.f_code.co_filename not in self.files:
            return None
        self.seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self

    def start(self) -> None:
        threading.settrace(self)
        sys.settrace(self)

    def stop(self) -> set[tuple[str, int]]:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type, unused-ignore]
        seen, self.seen = self.seen, set()
        return seen


def _settings() -> dict[str, Any]:
    said: dict[str, Any] = json.loads(Path(os.environ["KVFIX_MUTANTS"]).read_text(encoding="utf-8"))
    return said


# From here on: plugins that come after this one import what is to be mutated.
_lines = _Lines(_settings()["modules"].values())
_lines.start()


def pytest_configure() -> None:
    """Have hypothesis try the same in every process, and leave a failure as it was found."""
    try:
        from hypothesis import Phase, settings
    except ImportError:
        return
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutants", derandomize=True, deadline=None, database=None, phases=phases
    )
    settings.load_profile("mutants")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run mutants rather than tests."""
    settings = _settings()
    if session.testsfailed or not session.items:
        raise pytest.UsageError("tests could not be collected, or there are none")
    with Path(settings["out"]).open("w", encoding="utf-8", buffering=1) as out:
        for row in _Run(session, settings).rows():
            out.write(json.dumps(row) + "\n")
    return True


class _Run:
    def __init__(self, session: pytest.Session, settings: dict[str, Any]) -> None:
        self.items = {item.nodeid: item for item in session.items}
        self.workers: int = settings["workers"]
        self.patience: float = settings["patience"]
        self.sources = {
            name: Source(name, Path(file)) for name, file in settings["modules"].items()
        }
        self.chosen = self._choose(settings["only"], settings["sample"], settings["seed"])
        self.seconds: dict[str, float] = {}
        self.reached: dict[tuple[str, int], set[str]] = {}
        self.failing: set[str] = set()
        self.imported = _lines.stop()
        self.killers: dict[tuple[str, str], list[str]] = {}

    def rows(self) -> Iterator[dict[str, Any]]:
        self._learn()
        yield {
            "tests": len(self.items),
            "seconds": round(sum(self.seconds.values()), 1),
            "failing": sorted(self.failing),
        }
        functions = living_functions()
        for source in self.sources.values():
            source.find_functions(functions)
        gc.collect()
        gc.freeze()  # forks share what nobody writes to
        tried: list[tuple[Source, int]] = []
        untried: list[tuple[Source, int]] = []
        reaching: set[str] = set()
        for source, number in self.chosen:
            tests = self._reaching(source, number)
            reaching |= tests
            (tried if tests else untried).append((source, number))
        for _, answer in Children(self._try_none, self.workers).run(self._shares(reaching)):
            if answer:
                yield {"fault": f"{answer} fails without a mutant, once all is compiled anew"}
        tasks = self._tasks(tried)
        for (source, number, tests), answer in Children(self._try, self.workers).run(tasks):
            yield self._row(source, number, tests, answer)
        for source, number in untried:
            mutant = source.mutants[number]
            lines = range(mutant.first, mutant.last + 1)
            on_import = any((str(source.path), line) in self.imported for line in lines)
            verdict = "import" if on_import and mutant.within else "not covered"
            yield self._row(source, number, [], verdict)

    def _choose(
        self, only: Sequence[Sequence[str]], sample: int, seed: int
    ) -> list[tuple[Source, int]]:
        """Return the mutants to try: a sample by chance, of which a part is one, too."""
        named = set(map(tuple, only))
        every = [
            (source, number)
            for source in self.sources.values()
            for number, mutant in enumerate(source.mutants)
            if not only or (source.name, mutant.function, mutant.change) in named
        ]
        if not sample:
            return every
        return random.Random(seed).sample(every, min(sample, len(every)))  # noqa: S311 - no secret

    # ------------------------------------------------------------ once, without a mutant

    def _learn(self) -> None:
        """Run the tests of a file in one fork, and note what they executed and took."""
        loaded: set[str] = set()
        shares = self._shares(self.items)
        for _, answer in Children(self._learn_share, self.workers, _LEARNING).run(shares):
            if answer in (HUNG, DIED):
                raise pytest.UsageError(f"the tests {answer} without a mutant")
            self.seconds.update(answer["seconds"])
            self.failing.update(answer["failing"])
            loaded.update(answer["loaded"])
            for file, line, test in answer["reached"]:
                self.reached.setdefault((file, line), set()).add(test)
        for name in sorted(loaded):  # what tests import late is imported before the forks
            with warnings.catch_warnings(), suppress(Exception):
                warnings.simplefilter("ignore")
                importlib.import_module(name)

    def _shares(self, tests: Container[str]) -> list[list[str]]:
        """Share tests out among the workers, those of a file to one."""
        files: dict[str, list[str]] = {}
        for name in filter(tests.__contains__, self.items):
            files.setdefault(name.partition("::")[0], []).append(name)
        shares: list[list[str]] = [[] for _ in range(self.workers)]
        for file in sorted(files, key=lambda file: -len(files[file])):
            min(shares, key=len).extend(files[file])
        return [share for share in shares if share]

    def _learn_share(self, names: Sequence[str], say: Say) -> dict[str, Any]:
        before = set(sys.modules)
        reached: list[tuple[str, int, str]] = []
        failing, seconds = [], {}
        for name, following in _pairs(names):
            say(_LEARNING)
            _lines.start()
            start = time.monotonic()
            failed = self._fails(name, following)
            seconds[name] = time.monotonic() - start
            reached += [(file, line, name) for file, line in sorted(_lines.stop())]
            if failed:
                failing.append(name)
        loaded = [
            name
            for name in set(sys.modules) - before
            if name.partition(".")[0] in ("vllm", "vllm_overlay", "scripts")
        ]
        return {
            "reached": reached, "seconds": seconds, "failing": failing, "loaded": loaded,
        }  # fmt: skip

    # ------------------------------------------------------------ a mutant

    def _tasks(
        self, mutants: Iterable[tuple[Source, int]]
    ) -> Iterator[tuple[Source, int, list[str]]]:
        """Yield mutants with their tests, those first that are likely to fail."""
        for source, number in mutants:
            key = (source.name, source.mutants[number].function)
            tests = self._reaching(source, number)
            yield source, number, sorted(tests, key=lambda test: self._order(key, test))

    def _reaching(self, source: Source, number: int) -> set[str]:
        mutant = source.mutants[number]
        file = str(source.path)
        found: set[str] = set()
        if mutant.within is not None:
            for line in range(mutant.first, mutant.last + 1):
                found |= self.reached.get((file, line), set())
        else:  # to read a constant executes no line: the files whose tests run any of the module
            reaching = set[str]().union(*(t for at, t in self.reached.items() if at[0] == file))
            files = {test.partition("::")[0] for test in reaching}
            found.update(test for test in self.items if test.partition("::")[0] in files)
        return found - self.failing

    def _order(self, key: tuple[str, str], test: str) -> tuple[int, bool, float, str]:
        """Order tests: those that killed one of the function, the module's own, the quick ones."""
        killers = self.killers.get(key, [])
        at = killers.index(test) if test in killers else len(killers)
        own = f"/test_{key[0].rpartition('.')[2]}.py::"
        return at, own not in f"/{test}", self.seconds[test], test

    def _try(self, task: tuple[Source, int, list[str]], say: Say) -> str:
        """Return the test that fails with the mutant; an empty text if all pass."""
        source, number, tests = task
        try:
            source.install(source.mutants[number])
        except UnloadableError:
            return _IMPORTING
        return self._first_failing(tests, say)

    def _try_none(self, tests: list[str], say: Say) -> str:
        """Return the test that fails with every module as it is, put there by the same means."""
        for source in self.sources.values():
            source.install(None)
        return self._first_failing(tests, say)

    def _first_failing(self, tests: list[str], say: Say) -> str:
        if _PORT in os.environ:
            os.environ[_PORT] = str(_free_port())
        for name, following in _pairs(tests):
            say(self.patience + _TIMES * self.seconds[name])
            if self._fails(name, following):
                return name
        return ""

    def _fails(self, name: str, following: str | None) -> bool:
        item = self.items[name]
        outcome = _Outcome()
        item.config.pluginmanager.register(outcome)
        try:
            item.config.hook.pytest_runtest_protocol(
                item=item, nextitem=self.items[following] if following else None
            )
        except Exception:
            outcome.failed = True  # of what the test left behind: a stack too deep for pytest, too
        finally:
            item.config.pluginmanager.unregister(outcome)
        return outcome.failed

    def _row(
        self, source: Source, number: int, tests: Sequence[str], answer: str
    ) -> dict[str, Any]:
        """Return what is written of a mutant."""
        mutant = source.mutants[number]
        by = ""
        if answer in (HUNG, "import", "not covered"):
            verdict = answer
        else:
            verdict, by = ("killed", answer) if answer else ("survived", "")
        if by and by not in (DIED, _IMPORTING):
            killers = self.killers.setdefault((source.name, mutant.function), [])
            if by in killers:
                killers.remove(by)
            killers.insert(0, by)
        return {
            "module": source.name, "function": mutant.function, "change": mutant.change,
            "line": mutant.first, "verdict": verdict, "by": by, "tests": len(tests),
        }  # fmt: skip


class _Outcome:
    failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed


def _pairs(names: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    return zip(names, [*names[1:], None], strict=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
