"""`python -m tests.scripts.hostile.kills`: real commands, killed at any moment, and run once more.

What is written is the old state or the new one, whole. The next run works; after it no file of a
killed one is left, no `.part`, no half pack and no lock of git's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from scripts.commands.apply import main as apply_main
from scripts.patchset.registry import load_registry
from scripts.project import project
from scripts.prove.outcomes import Outcome
from scripts.prove.record import FOLDER, record
from scripts.system.console import entry
from scripts.upstream.cache import cache_folder
from scripts.upstream.history import upstream
from scripts.upstream.tree import release_tree
from tests.scripts import toys
from tests.scripts.checkouts import wheel_bytes, wheel_name
from tests.scripts.hostile.batch import Batch, Broken
from tests.scripts.repos import git

_LEFT = ("*.part", "tmp_*", "*.lock", "fast_import_crash_*", "part-*")
_OUTCOME = Outcome("failed", "AssertionError: " + "x" * 2000)
SECONDS = 300  # for a whole run, on a machine that does other things besides


def start(work: Callable[[], None]) -> int:
    """Run `work` as a command in a process group of its own; return the id of its process."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        entry(work)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    finally:
        os._exit(99)


def ended(child: int) -> int:
    """Wait for the end of a process; return its status."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"it did not end within {SECONDS} s")


def kill(child: int, rng: Random, after: float) -> None:
    """Kill a process, alone or with all that it started, after a while."""
    time.sleep(after)
    with contextlib.suppress(ProcessLookupError):
        (os.kill if rng.random() < 0.5 else os.killpg)(child, signal.SIGKILL)
    os.waitpid(child, 0)
    until = time.monotonic() + SECONDS
    with contextlib.suppress(ProcessLookupError):  # once nobody of the group is left
        while time.monotonic() < until:  # a git whose input has ended ends by itself
            os.killpg(child, 0)
            time.sleep(0.01)


def left(folder: Path) -> list[str]:
    """Return the files below `folder` that only a killed process leaves."""
    found = (path for pattern in _LEFT for path in folder.rglob(pattern))
    return sorted(str(path.relative_to(folder)) for path in found if path.name != ".lock")


class Apply:
    """`apply`, alone or beside another one."""

    concurrent = False

    def __init__(self, work: Path) -> None:
        self._source = work / wheel_name()
        self._source.write_bytes(wheel_bytes(toys.FILES, native=8_000_000))
        self.folder = work / type(self).__name__
        self._old = b"the old wheel"

    def run(self) -> None:
        """Do what is killed."""
        sys.argv = ["apply", "0.20.2", "--wheel", str(self._source), "--out", str(self.folder)]
        apply_main()

    def reset(self, rng: Random) -> None:
        """Make the old state."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        if rng.random() < 0.5:
            (self.folder / self._name()).write_bytes(self._old)

    @staticmethod
    def _name() -> str:
        return wheel_name(f"0.20.2+kvfix.{project().version}")

    def state(self) -> str:
        """Return what is there for all to see."""
        visible = [path for path in self.folder.iterdir() if not path.name.startswith(".")]
        assert all(path.name == self._name() for path in visible), visible
        if not visible or visible[0].read_bytes() == self._old:
            return "old"
        return hashlib.sha256(visible[0].read_bytes()).hexdigest()


class TwoApplies(Apply):
    """Two of them at once, of which one is killed."""

    concurrent = True


class History:
    """The releases' git repository, made of two sdists."""

    concurrent = False

    def __init__(self, work: Path) -> None:
        self.folder = cache_folder() / "upstream"

    def run(self) -> None:
        """Do what is killed."""
        upstream()

    def reset(self, rng: Random) -> None:
        """Make the old state."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def state(self) -> str:
        """Return which releases are there; what is there has to be whole."""
        repository = self.folder / "upstream.git"
        if not (repository / "refs").is_dir():
            return "old"
        tags = git(repository, "for-each-ref", check=False)
        if "v0.20.1" not in tags or "v0.20.2" not in tags:
            return "old"
        git(repository, "fsck", "--full", "--strict")
        return tags


class Tree:
    """The unpacked sdist of a release."""

    concurrent = False

    def __init__(self, work: Path) -> None:
        self.folder = cache_folder() / "trees"

    def run(self) -> None:
        """Do what is killed."""
        release_tree.__wrapped__("0.20.2")

    def reset(self, rng: Random) -> None:
        """Make the old state."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def state(self) -> str:
        """Return which files there are, and how large."""
        trees = [path for path in self.folder.glob("*") if not path.name.startswith(".")]
        files = (path for tree in trees for path in tree.rglob("*") if path.is_file())
        return str(sorted((path.name, path.stat().st_size) for path in files)) if trees else "old"


class Status:
    """What a run has shown, put on record."""

    concurrent = False

    def __init__(self, work: Path) -> None:
        self.folder = FOLDER
        self._fixes = list(load_registry().fixes.values())
        self._path = FOLDER / "0.20.2.json"

    def run(self) -> None:
        """Do what is killed."""
        self._record("new")

    def reset(self, rng: Random) -> None:
        """Make the old state."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._record("old")

    def _record(self, key: str) -> None:
        outcomes = {
            f"{test}::test_{n}": _OUTCOME
            for fix in self._fixes
            for test in fix.tests
            for n in range(300)
        }
        record("0.20.2", "stock", [(fix, key) for fix in self._fixes], outcomes)

    def state(self) -> str:
        """Return the key that is on record."""
        document = json.loads(self._path.read_text())
        (key,) = {document[fix.id]["stock"]["inputs"] for fix in self._fixes}
        assert all(len(document[fix.id]["stock"]["outcomes"]) == 300 for fix in self._fixes)
        return str(key)


def one(scene: Apply | History | Status | Tree, rng: Random, took: float, whole: str) -> str:
    """Kill one run of `scene`, and check; return whether it had ended before, or what was seen."""
    scene.reset(rng)
    children = [start(scene.run) for _ in range(1 + scene.concurrent)]
    kill(children[0], rng, rng.uniform(0, took * len(children)))
    if scene.concurrent:
        assert ended(children[1]) == 0, "the other run failed"
    seen = scene.state()
    assert seen in ("old", whole), seen
    assert not scene.concurrent or seen == whole, seen
    had_left = bool(left(scene.folder))
    again = ended(start(scene.run))
    assert again == 0, f"the next run ended with {again}"
    assert scene.state() == whole
    assert left(scene.folder) == [], left(scene.folder)
    return f"{type(scene).__name__}: {'new' if seen == whole else 'old'}" + (
        ", with files left for the next run" if had_left else ""
    )


def run(seed: str, count: int, work: Path) -> Batch:
    """Kill `count` runs, of each scene as many."""
    scenes = [kind(work) for kind in (Apply, TwoApplies, History, Status, Tree)]
    took, whole = {}, {}
    for scene in scenes:
        for _ in range(2):
            scene.reset(Random(0))  # noqa: S311
            begin = time.monotonic()
            assert ended(start(scene.run)) == 0, f"{type(scene).__name__} fails undisturbed"
            took[scene] = time.monotonic() - begin
        whole[scene] = scene.state()
    batch = Batch()
    for number in range(count):
        scene, begin = scenes[number % len(scenes)], time.monotonic()
        try:
            batch.outcomes[one(scene, Random(f"{seed} {number}"), took[scene], whole[scene])] += 1  # noqa: S311
        except (AssertionError, OSError, ValueError) as error:
            batch.outcomes["broken"] += 1
            batch.broken.append(Broken(number, "kill", f"{type(scene).__name__}: {error!r}"))
        batch.cases += 1
        batch.slowest = max(batch.slowest, time.monotonic() - begin)
        if number % 25 == 24:
            print(f"kills: {number + 1} of {count}", file=sys.stderr, flush=True)
    return batch


def main() -> None:
    """Run what the command line says; print the result as JSON."""
    seed, count, work = sys.argv[1:]
    batch = run(seed, int(count), Path(work))
    print(json.dumps({**vars(batch), "broken": [vars(one) for one in batch.broken]}))


if __name__ == "__main__":
    main()
