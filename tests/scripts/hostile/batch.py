"""`python -m tests.scripts.hostile.batch`: hostile cases in this process, and what came of them.

The process runs the tools of a small checkout, as `entry` runs them. These are the rules; each
case that breaks one is saved:

- `traceback`: a command ends with an exit code and, if it refuses, an error that says why;
- `slow`, `memory`: within 5 s, and the process stays below 500 MB;
- `outside`: nothing is written elsewhere than told (an audit hook sees each file that is opened);
- `left`: what is written is the wheel, whole, and no other file;
- `terminal`: what is printed holds no control character;
- `bytes`: `verify` accepts what `apply` writes, byte for byte, and nothing else;
- `oracle`: what applies here applies with git or GNU patch too, to the same text.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from packaging.specifiers import SpecifierSet

from scripts.patchset.overlay import provenance
from scripts.patchset.patch import apply_patches, parse_patch
from scripts.patchset.registry import load_registry
from scripts.project import PATCHES
from scripts.system import errors
from scripts.system.console import entry
from scripts.system.errors import KvfixError, NotLockedError, RegistryError
from scripts.upstream.lock import load_lock, render
from scripts.wheel.reader import WheelReader
from scripts.wheel.record import verify_record
from tests.scripts.checkouts import wheel_name
from tests.scripts.hostile import patches, registries, wheels
from tests.scripts.repos import BARE

SECONDS = 5  # of CPU time: what the machine does besides is not the tools' doing
MEGABYTES = 500
_HANGS = 60  # seconds of wall clock after which a case is given up, however busy the machine
_ADDRESS_SPACE = 3 << 30  # so that a case that needs more ends, and not the machine

_CLASSES = {
    one.exit_code: one.__name__
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, KvfixError)
}
_WHEEL_NAMES = (
    "vllm-0.20.2\n-cp38-abi3-linux_x86_64.whl", "vllm-0.20.2-\x1b[31m-none-any.whl", "vllm.whl",
    "vllm-0.20.2-cp38-abi3-linux_x86_64\n.whl", "vllm\n-0.20.2-py3-none-any.whl", "\udcff.whl",
    "vllm-0.20.2-1\x1b[1m-py3-none-any.whl", "vllm-0.20.3-py3-none-any.whl",
    "vllm-x-py3-none-any.whl",
    "vllm-0.20.2+kvfix.0.1.0-py3-none-any.whl", "VLLM-0.20.2-py3-none-any.whl",
    f"vllm-{'9' * 200}-py3-none-any.whl", "vllm-0.20.2-py3-none-\u202e.whl",
)  # fmt: skip


@dataclass
class Broken:
    """A rule that a case broke."""

    case: int
    rule: str
    detail: str
    saved: str = ""


@dataclass
class Batch:
    """What came of some cases: how each ended, the slowest, and which rules were broken."""

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    peak_mb: float = 0.0
    broken: list[Broken] = field(default_factory=list)


class BrokenRule(Exception):  # noqa: N818
    """A rule is broken: its name, and in which way."""


class Watch:
    """Sees each file that this process opens for writing, makes, moves or removes."""

    def __init__(self, allowed: Path) -> None:
        self._allowed = os.path.realpath(allowed) + "/"
        self.outside: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, words: tuple[object, ...]) -> None:
        if event == "open":
            flags = words[2]
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            self._see(event, words[0])
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.truncate"):
            self._see(event, words[0])
        elif event in ("os.rename", "os.link"):
            self._see(event, words[0])
            self._see(event, words[1])

    def _see(self, event: str, path: object) -> None:
        if isinstance(path, str | bytes):
            # The folder's real path: what is written through a link lies where that leads.
            name = os.fsdecode(path)
            real = os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))  # noqa: PTH118, PTH120, PTH119
            if not real.startswith((self._allowed, "/dev/null")):
                self.outside.append(f"{event} {name!r}")


def call(tool: str, *words: str | Path) -> tuple[str, str]:
    """Run a command in this process; return what it ended with, and all that it printed."""
    main = importlib.import_module(f"scripts.commands.{tool}").main
    printed = io.StringIO()
    before, sys.argv = sys.argv, [tool, *map(str, words)]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            entry(main)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        return _CLASSES.get(code, f"exit {code}") if code else "accepted", printed.getvalue()
    finally:
        sys.argv = before


def _is_plain(text: str) -> bool:
    return all(one.isprintable() or one == "\n" for one in text)


class Wheels:
    """Stock wheels for `apply`, and patched ones for `verify`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stock = folder / "stock" / wheel_name()
        self._stock.parent.mkdir()
        self._stock.write_bytes(wheels.pack(wheels.sound()))
        self._dist = folder / "dist"
        end, said = call("apply", "0.20.2", "--wheel", self._stock, "--out", folder / "sound")
        assert end == "accepted", said
        (self._patched,) = (folder / "sound").iterdir()
        self._sound = self._patched.read_bytes()

    def run(self, rng: Random) -> tuple[str, bytes]:
        """Make a case and return it with how it ended."""
        if rng.random() < 0.3:
            return self._verify(rng)
        name = rng.choice(_WHEEL_NAMES) if rng.random() < 0.04 else self._stock.name
        path, data = self._folder / name, wheels.hostile(rng)
        path.write_bytes(data)
        try:
            with saving(data):
                return self._apply(path), data
        finally:
            path.unlink()
            shutil.rmtree(self._dist, ignore_errors=True)

    def _apply(self, path: Path) -> str:
        end, said = call("apply", "0.20.2", "--wheel", path, "--out", self._dist)
        _printed(said)
        written = sorted(self._dist.iterdir()) if self._dist.exists() else []
        if end != "accepted":
            if written:
                raise BrokenRule("left", f"{end} and {written}")
            return end
        if len(written) != 1:
            raise BrokenRule("left", f"{written}")
        again, said = call("verify", written[0], "--stock", path)
        _printed(said)
        if again == "accepted":
            return end
        # What no fix changes is copied as it lies: only what was damaged before may be now.
        with WheelReader(path) as stock:
            if not _damages(stock):
                raise BrokenRule("bytes", f"apply wrote it and verify refuses it: {said}")
        return "accepted with the damage that it had"

    def _verify(self, rng: Random) -> tuple[str, bytes]:
        data = wheels.tampered(rng, self._sound)
        path = self._folder / "tampered" / self._patched.name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        with saving(data):
            end, said = call("verify", path, "--stock", self._stock)
            _printed(said)
            if (end == "accepted") != (data == self._sound):
                raise BrokenRule("bytes", f"verify says {end}")
        return f"{end} by verify", data


def _damages(stock: WheelReader) -> list[str]:
    """Return what is wrong with the content of a wheel, which need not end with its RECORD."""
    faults = verify_record(stock, stock.records)
    return [fault for fault in faults if "is not the last file" not in fault]


class Patches:
    """Patches, each applied to a text here, by git and by GNU patch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tree"
        self._file = self._folder / patches.PATH
        self._file.parent.mkdir(parents=True)
        self._patch = folder / "1.patch"

    def run(self, rng: Random) -> tuple[str, bytes]:
        """Make a case and return it with how it ended."""
        case = patches.hostile(rng)
        data = f"{case.text}\n=== {case.target!r}".encode("utf-8", "surrogatepass")
        with saving(data):
            try:
                patch = parse_patch(patches.NAME, case.text)
                texts, _ = apply_patches([patch], lambda path: self._read(path, case.target))
            except KvfixError as error:
                _printed_error(error)
                return type(error).__name__, data
            self._compare(case, texts)
        return "accepted", data

    @staticmethod
    def _read(path: str, target: str) -> str:
        if path.startswith("/") or ".." in path.split("/"):
            raise BrokenRule("outside", f"reads {path!r}")
        if path != patches.PATH:
            raise RegistryError(f"no file {path}", expected="one", next_step="none")
        return target

    def _compare(self, case: patches.Case, texts: dict[str, str]) -> None:
        ours = texts.get(patches.PATH, case.target)
        self._patch.write_bytes(case.text.encode())
        said = []
        for command in (
            ["git", "apply", "--whitespace=nowarn", str(self._patch)],
            ["patch", "-p1", "--fuzz=0", "--force", "--silent", "-r-", "-i", str(self._patch)],
        ):
            self._file.write_bytes(case.target.encode())
            done = subprocess.run(
                command,
                cwd=self._folder,
                env={**os.environ, **BARE, "GIT_CEILING_DIRECTORIES": str(self._folder.parent)},
                capture_output=True,
                check=False,
            )
            found = self._file.read_bytes() if self._file.exists() else None
            if done.returncode == 0 and found == ours.encode():
                return
            said.append(f"{command[0]}: {done.returncode} {done.stderr!r} {found!r}")
        raise BrokenRule("oracle", f"ours: {ours!r}; " + "; ".join(said))


class Registries:
    """Registries and locks, loaded, and asked what the tools ask them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, rng: Random) -> tuple[str, bytes]:
        """Make a case and return it with how it ended."""
        lock = rng.random() < 0.3
        data = registries.hostile_lock(rng) if lock else registries.hostile(rng)
        path = self._folder / ("upstream.lock" if lock else "fixes.toml")
        path.write_bytes(data)
        with saving(data):
            try:
                self._use_lock(path) if lock else self._use(path)
            except KvfixError as error:
                _printed_error(error)
                return type(error).__name__, data
        return "accepted", data

    @staticmethod
    def _use(path: Path) -> None:
        registry = load_registry(path)
        releases = ("0.18.0", "0.20.2", "0.33.0")
        for fix in registry.fixes.values():
            if (PATCHES / fix.name).resolve().parent != PATCHES.resolve():
                raise BrokenRule("outside", f"patches of {fix.name!r}")
            for release in releases:
                fix.needed_on(release), fix.spared_on(release), fix.left_open_on(release)
                for test in fix.upstream_tests:
                    SpecifierSet(test.releases)
                for later in fix.forward_tests:
                    later.runs_on(release)
            registry.with_dependencies({fix.id})
            compile(provenance(fix)[1], "provenance", "exec")
            message = registry.message(fix)
            if not _is_plain(message):
                raise BrokenRule("terminal", repr(message))

    @staticmethod
    def _use_lock(path: Path) -> None:
        releases = load_lock(path)
        for release in releases.values():
            with contextlib.suppress(NotLockedError):
                release.wheel_for("x86_64")
        render(releases)


def _printed(text: str) -> None:
    if not _is_plain(text):
        raise BrokenRule("terminal", repr(text[-2000:]))


def _printed_error(error: KvfixError) -> None:
    if not (error.found and error.expected and error.next_step):
        raise BrokenRule("traceback", f"{type(error).__name__} says too little: {vars(error)}")


_saved = b""


@contextlib.contextmanager
def saving(data: bytes) -> Iterator[None]:
    """Keep `data` as the case at hand, should a rule be broken."""
    global _saved
    _saved = data
    yield


def _cpu() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def peak_mb() -> float:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


KINDS: dict[str, Callable[[Path], Wheels | Patches | Registries]] = {
    "wheels": Wheels,
    "patches": Patches,
    "registries": Registries,
}


def run(kind: str, seed: str, first: int, count: int, work: Path, save: Path) -> Batch:
    """Run the cases `first` to `first + count` of `seed`."""
    cases, batch = KINDS[kind](work), Batch()
    watch = Watch(work)
    for number in range(first, first + count):
        rng, begin, batch.cases = Random(f"{seed} {kind} {number}"), _cpu(), batch.cases + 1  # noqa: S311
        faulthandler.dump_traceback_later(_HANGS, exit=True)
        rule, detail, data, end = "", "", b"", "broken"
        try:
            end, data = cases.run(rng)
        except BrokenRule as broken:
            rule, detail = broken.args
        except Exception:  # all that is no exit code: that is what is looked for
            rule, detail = "traceback", traceback.format_exc()[-3000:]
        faulthandler.cancel_dump_traceback_later()
        seconds = _cpu() - begin
        if not rule and seconds > SECONDS:
            rule, detail = "slow", f"{seconds:.1f} s"
        if not rule and batch.peak_mb < MEGABYTES < peak_mb():
            rule, detail = "memory", f"{peak_mb():.0f} MB"
        if watch.outside:
            rule, detail, watch.outside = "outside", "; ".join(watch.outside[:5]), []
        batch.outcomes[end] += 1
        batch.slowest, batch.peak_mb = max(batch.slowest, seconds), peak_mb()
        if rule:
            name = save / f"{kind}-{number}-{rule}"
            batch.broken.append(Broken(number, rule, detail, f"{name}"))
            _keep(name, data or _saved, detail)
    return batch


def _keep(name: Path, data: bytes, detail: str) -> None:
    """Write a case through a process of its own: the watch allows none of it here."""
    for suffix, content in (("", data), (".txt", detail.encode("utf-8", "replace"))):
        words = ["sh", "-c", 'cat > "$1"', "sh", f"{name}{suffix}"]
        subprocess.run(words, input=content, check=True)


def main() -> None:
    """Run what the command line says; print the result as JSON."""
    kind, seed, first, count, work, save = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    batch = run(kind, seed, int(first), int(count), Path(work), Path(save))
    print(json.dumps({**vars(batch), "broken": [vars(one) for one in batch.broken]}))


if __name__ == "__main__":
    main()
