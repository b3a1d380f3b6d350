"""The installer, killed or failing before each of its steps on the file system in turn.

Python tells an audit hook of each such step before it is done, so none is left out.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from scripts.ship.runtime.install import check, install, take_out
from scripts.ship.runtime.refusal import RefusalError
from scripts.ship.runtime.switch import is_half_done
from tests.scripts.ship.environments import Seen, bundle, content, copied, given, seen, stock_site
from tests.scripts.wheels import WORKER

STEPS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.utime", "os.chmod", "os.chown"}
KILLED, FAILED, INTERRUPTED = 9, 10, 11


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def full() -> None:
    raise OSError(errno.ENOSPC, "no space")


def run(work: Callable[[], object], at: int, meets: Callable[[], None] | None = None) -> int:
    """Run `work` in a child that is killed before step `at`, or meets something from there on.

    That is a signal before each step, or an error before the first; returns how the child ended.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code, count = 99, 0

    def look(event: str, words: tuple[object, ...]) -> None:
        nonlocal count
        writes = event == "open" and isinstance(words[2], int) and words[2] & os.O_WRONLY
        if event not in STEPS and not writes:
            return
        count += 1
        if count == at and not meets:
            os._exit(KILLED)
        if meets and (count == at or (count > at and meets is interrupt)):
            meets()

    sys.addaudithook(look)
    try:
        work()
        code = 0
    except OSError:
        code = FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        os._exit(code)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no disk: what a process has written outlives it."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("made")
    stock = stock_site(folder)
    if os.geteuid() == 0:
        given(stock, 1234, 2345)  # so there is something to give back
    patched = copied(stock, folder / "patched")
    install(patched, bundle())
    return stock, patched


def put_in(site: Path) -> str:
    return install(site, bundle())


def steps(
    start: Path, folder: Path, work: Callable[[Path], object], *, fail: bool = False
) -> Iterator[tuple[Path, int]]:
    """Yield, for each step, a copy of `start` on which `work` ended there, and how it ended."""
    for at in range(1, 1000):
        site = copied(start, folder / str(at))
        ended = run(partial(work, site), at, full if fail else None)
        if ended == 0 and not fail:
            assert at > 30  # or no step was seen
            return
        yield site, ended
        if ended == 0 and at > 120:
            return


def stands(site: Path, stock: Seen, patched: Seen) -> str:
    """Return what is there: as `--check` says it, and as the files are."""
    if is_half_done(site):
        with pytest.raises(RefusalError, match="half done"):
            check(site, bundle())
        return "half"
    said = check(site, bundle()).partition(":")[0]
    if said == "stock":
        assert seen(site) == stock
    else:
        assert content(seen(site)) == content(patched)
    return said


@pytest.mark.parametrize("mend", ["install", "undo"])
@pytest.mark.parametrize(
    ("start", "killed"), [(0, put_in), (1, take_out)], ids=["installer", "undo"]
)
def test_what_was_killed_is_mended(
    sites: tuple[Path, Path], tmp_path: Path, start: int, killed: Callable[[Path], str], mend: str
) -> None:
    stock, patched = map(seen, sites)
    found = set()
    for site, ended in steps(sites[start], tmp_path, killed):
        assert ended == KILLED
        found.add(stands(site, stock, patched))
        if mend == "install":
            put_in(site)
            assert content(seen(site)) == content(patched)
        else:
            take_out(site)
            assert seen(site) == stock
        assert not (site / ".kvfix").exists()
    assert found == {"stock", "half", "patched"}


def test_what_mends_may_be_killed_as_well(sites: tuple[Path, Path], tmp_path: Path) -> None:
    stock = seen(sites[0])
    starts = steps(sites[0], tmp_path / "first", put_in)
    half = [site for site, _ in starts if is_half_done(site)]
    for number, start in enumerate((half[0], half[len(half) // 2], half[-1])):
        for site, _ in steps(start, tmp_path / str(number), take_out):
            take_out(site)
            assert seen(site) == stock


def test_what_was_changed_meanwhile_is_spared(sites: tuple[Path, Path], tmp_path: Path) -> None:
    starts = steps(sites[0], tmp_path, put_in)
    half = next(site for site, _ in starts if is_half_done(site))
    (half / WORKER).write_text("ours")
    for mend in (take_out, put_in):
        with pytest.raises(RefusalError, match="changed since") as caught:
            mend(half)
        assert f"remove {half / '.kvfix'}" in caught.value.advice
        assert (half / WORKER).read_text() == "ours"


def test_a_full_disk_leaves_what_was_there(sites: tuple[Path, Path], tmp_path: Path) -> None:
    stock, patched = map(seen, sites)
    rolled_back = 0
    for site, ended in steps(sites[0], tmp_path, put_in, fail=True):
        assert ended in (0, FAILED)
        said = stands(site, stock, patched)
        if ended == FAILED:
            rolled_back += 1
            assert said == "stock"
    assert rolled_back > 30


@pytest.mark.parametrize(("start", "work"), [(0, put_in), (1, take_out)], ids=["installer", "undo"])
def test_whoever_interrupts_again_and_again_leaves_nothing(
    sites: tuple[Path, Path], tmp_path: Path, start: int, work: Callable[[Path], str]
) -> None:
    stock, patched = map(seen, sites)
    found = set()
    for at in range(1, 300, 7):
        site = copied(sites[start], tmp_path / str(at))
        ended = run(partial(work, site), at, interrupt)
        assert ended in (0, INTERRUPTED)
        found.add((ended, stands(site, stock, patched)))
        assert not (site / ".kvfix").exists()
        if at > 120 and not start and ended == 0:
            break
    if start:  # of what puts back nothing is interrupted
        assert found == {(0, "stock")}
    else:
        assert found >= {(INTERRUPTED, "stock"), (0, "patched")}


def test_undo_on_a_full_disk_leaves_what_was_there_or_can_go_on(
    sites: tuple[Path, Path], tmp_path: Path
) -> None:
    stock, patched = map(seen, sites)
    found = set()
    for at in range(1, 30):
        site = copied(sites[1], tmp_path / str(at))
        assert run(partial(take_out, site), at, full) in (0, FAILED)
        found.add(said := stands(site, stock, patched))
        assert (site / ".kvfix").exists() == (said == "half")
    assert found >= {"patched", "half"}
