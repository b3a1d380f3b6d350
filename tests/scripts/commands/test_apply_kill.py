"""A SIGKILL at any moment: there is the old state, or the new one, and nothing else to be seen."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.project import project
from tests.scripts import checkouts, toys
from tests.scripts.checkouts import Checkout, wheel_bytes, wheel_name
from tests.scripts.repos import git

KILLS = 50
OLD = b"the old wheel"

# Runs the tool again and again, each time in a new process that has its imports behind it, so
# that kills fall into what it does: half of them anywhere, half from when `writing` is true on.
# Prints, for each, whether it was killed, and what was seen.
DRIVER = """
import importlib, json, os, random, signal, subprocess, sys, time
from pathlib import Path

tool, kills, look, reset, writing, *words = sys.argv[1:]
random.seed(20)
sys.argv = [tool, *words]
main = importlib.import_module(f"scripts.commands.{tool}").main
from scripts.system.console import entry

def start():
    child = os.fork()
    if not child:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        entry(main)
    return child

def seen():
    done = subprocess.run(look, shell=True, capture_output=True, text=True, check=True)
    return done.stdout

exec(reset)
took = []
for _ in range(2):
    begin = time.monotonic()
    _, status = os.waitpid(start(), 0)
    took.append(time.monotonic() - begin)
    assert status == 0, status
    whole = seen()
    exec(reset)
before = seen()
runs = []
for number in range(int(kills)):
    child, ended, status = start(), 0, 0
    if number % 2:
        time.sleep(random.uniform(0, took[-1]))
    else:
        while not ended and not eval(writing):
            time.sleep(0.0005)
            ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(random.uniform(0, 0.1 * took[-1]))
    if not ended:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    runs.append((status != 0, seen()))
    exec(reset)
print(json.dumps({"before": before, "whole": whole, "runs": runs, "took": took}))
"""


@dataclass
class Kills:
    """What was seen before, after a whole run, and after each kill that met a living process."""

    before: str
    whole: str
    seen: list[str]


def kills(
    checkout: Checkout,
    tool: str,
    count: int,
    look: str,
    reset: str,
    writing: str,
    *words: str | Path,
) -> Kills:
    """Kill `tool` with these words `count` times, and look after each.

    `look` is a command, what it prints is compared; `reset` and `writing` are Python.
    """
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, tool, str(count), look, reset, writing, *map(str, words)],
        cwd=checkout.folder,
        env=checkout.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    seen = [what for killed, what in found["runs"] if killed]
    assert len(seen) >= count / 4, f"most runs were quicker than the kill: {found['took']}"
    return Kills(found["before"], found["whole"], seen)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return checkouts.small(tmp_path_factory.mktemp("kill"))


@pytest.mark.parametrize("old", [True, False], ids=["over an old wheel", "into an empty folder"])
def test_dist_holds_the_old_wheel_or_the_whole_new_one(
    checkout: Checkout, tmp_path: Path, old: bool
) -> None:
    source, dist = tmp_path / wheel_name(), tmp_path / "dist"
    source.write_bytes(wheel_bytes(toys.FILES, native=24_000_000))
    dist.mkdir()
    target = dist / wheel_name(f"0.20.2+kvfix.{project().version}")
    reset = f"p = Path({str(target)!r}); p.unlink(missing_ok=True)"
    if old:
        reset += f"; p.write_bytes({OLD!r})"
    look = f"cd {dist}; sha256sum *.whl 2>/dev/null; ls -A | grep -c part; true"
    writing = f"any(n.endswith('.part') for n in os.listdir({str(dist)!r}))"
    words = ("0.20.2", "--wheel", source, "--out", dist)
    found = kills(checkout, "apply", KILLS // 2, look, reset, writing, *words)

    def visible(what: str) -> tuple[str, ...]:
        return tuple(what.splitlines()[:-1])

    whole = visible(found.whole)
    before = (f"{hashlib.sha256(OLD).hexdigest()}  {target.name}",) if old else ()
    assert visible(found.before) == before
    assert len(whole) == 1
    assert {visible(what) for what in found.seen} <= {before, whole}
    # Some kills met the writing itself; else this test would show nothing.
    assert sum(int(what.split()[-1]) for what in found.seen) >= 3

    # The next run does not mind, and sweeps what the killed ones have left.
    exec(reset, {"Path": Path})  # noqa: S102
    done = checkout.run("apply", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in dist.iterdir()] == [target.name]
    assert whole == (f"{hashlib.sha256(target.read_bytes()).hexdigest()}  {target.name}",)


def test_a_repository_has_no_branch_or_the_whole_one(checkout: Checkout, tmp_path: Path) -> None:
    clone = toys.clone_of_vllm(tmp_path / "vllm")
    look = f"cd {clone}; git for-each-ref; git symbolic-ref HEAD; git status --porcelain"
    reset = (
        f"subprocess.run(['git', '-C', {str(clone)!r}, 'branch', '-D', 'kvfix/v0.20.2'], "
        "capture_output=True)"
    )
    written = f"os.path.exists({str(clone / '.git' / 'refs' / 'heads' / 'kvfix')!r})"
    found = kills(checkout, "export", 10, look, reset, written, "0.20.2", "--into", clone)
    assert set(found.seen) <= {found.before, found.whole}
    assert found.before != found.whole
    assert "kvfix" in found.whole
    git(clone, "fsck", "--strict")
    done = checkout.run("export", "0.20.2", "--into", clone)
    assert done.returncode == 0, done.stderr
