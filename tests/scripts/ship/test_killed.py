"""The installer, killed or failing before each of its steps on the file system in turn.

Python tells an audit hook of each such step before it is done, so none is left out.
"""

from __future__ import annotations

import errno
import gc
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

Meets = Callable[[int], None]
"""What happens before a step, which has a number from 1 on."""


def killed(at: int) -> Meets:
    def kill(step: int) -> None:
        if step == at:
            os._exit(KILLED)

    return kill


def interrupted(at: int) -> Meets:
    def interrupt(step: int) -> None:
        if step >= at:
            os.kill(os.getpid(), signal.SIGINT)

    return interrupt


def full(at: int) -> Meets:
    def refuse(step: int) -> None:
        if step == at:
            raise OSError(errno.ENOSPC, "no space")

    return refuse


def run(work: Callable[[], object], meets: Meets) -> int:
    """Run `work` in a child with what it meets before each step, and return how the child ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    gc.disable()  # it would write to, and so copy, every page that the child shares
    code, count, busy = 99, 0, False

    def look(event: str, words: tuple[object, ...]) -> None:
        nonlocal count, busy
        writes = event == "open" and isinstance(words[2], int) and words[2] & os.O_WRONLY
        if busy or (event not in STEPS and not writes):
            return
        count += 1
        busy = True  # with steps of its own
        try:
            meets(count)
        finally:
            busy = False

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


def left_by_kills(start: Path, folder: Path, work: Callable[[Path], object]) -> Iterator[Path]:
    """Yield, for each step of `work`, what a kill before it leaves of a copy of `start`.

    Who is killed takes along what it had not written, so that is what lies there before the step.
    """
    site = copied(start, folder / "site")

    def keep(step: int) -> None:
        copied(site, folder / str(step))

    assert run(partial(work, site), keep) == 0
    left = sorted((path for path in folder.iterdir() if path != site), key=lambda p: int(p.name))
    assert len(left) > 30  # or no step was seen
    yield from left


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


def everything(site: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Return mode, owner and content of all there is.

    Byte code has a date and a path in it, and while it is written a number in its name.
    """
    found = {}
    for path in sorted(site.rglob("*")):
        name, compiled, _ = str(path.relative_to(site)).partition(".pyc")
        facts = path.stat()
        data = path.read_bytes() if path.is_file() and not compiled else b""
        found[name + compiled] = (facts.st_mode, facts.st_uid, facts.st_gid, data)
    return found


@pytest.mark.parametrize(("start", "work"), [(0, put_in), (1, take_out)], ids=["installer", "undo"])
def test_a_kill_leaves_what_lies_there_before_the_step(
    sites: tuple[Path, Path], tmp_path: Path, start: int, work: Callable[[Path], str]
) -> None:
    left = list(left_by_kills(sites[start], tmp_path / "left", work))
    for at in {*range(1, len(left), 7), len(left)}:
        site = copied(sites[start], tmp_path / str(at))
        assert run(partial(work, site), killed(at)) == KILLED
        assert everything(site) == everything(left[at - 1])
    site = copied(sites[start], tmp_path / "whole")
    assert run(partial(work, site), killed(len(left) + 1)) == 0


@pytest.mark.parametrize("mend", ["install", "undo"])
@pytest.mark.parametrize(("start", "work"), [(0, put_in), (1, take_out)], ids=["installer", "undo"])
def test_what_was_killed_is_mended(
    sites: tuple[Path, Path], tmp_path: Path, start: int, work: Callable[[Path], str], mend: str
) -> None:
    stock, patched = map(seen, sites)
    found = set()
    for site in left_by_kills(sites[start], tmp_path, work):
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
    starts = left_by_kills(sites[0], tmp_path / "first", put_in)
    half = [site for site in starts if is_half_done(site)]
    for number, start in enumerate((half[0], half[len(half) // 2], half[-1])):
        for site in left_by_kills(start, tmp_path / str(number), take_out):
            take_out(site)
            assert seen(site) == stock


def test_what_was_changed_meanwhile_is_spared(sites: tuple[Path, Path], tmp_path: Path) -> None:
    starts = left_by_kills(sites[0], tmp_path, put_in)
    half = next(site for site in starts if is_half_done(site))
    (half / WORKER).write_text("ours")
    for mend in (take_out, put_in):
        with pytest.raises(RefusalError, match="changed since") as caught:
            mend(half)
        assert f"remove {half / '.kvfix'}" in caught.value.advice
        assert (half / WORKER).read_text() == "ours"


def test_a_full_disk_leaves_what_was_there(sites: tuple[Path, Path], tmp_path: Path) -> None:
    stock, patched = map(seen, sites)
    rolled_back = 0
    for at in range(1, 1000):
        site = copied(sites[0], tmp_path / str(at))
        ended = run(partial(put_in, site), full(at))
        assert ended in (0, FAILED)
        said = stands(site, stock, patched)
        if ended == FAILED:
            rolled_back += 1
            assert said == "stock"
        elif at > 120:
            break
    assert rolled_back > 30


@pytest.mark.parametrize(("start", "work"), [(0, put_in), (1, take_out)], ids=["installer", "undo"])
def test_whoever_interrupts_again_and_again_leaves_nothing(
    sites: tuple[Path, Path], tmp_path: Path, start: int, work: Callable[[Path], str]
) -> None:
    stock, patched = map(seen, sites)
    found = set()
    for at in range(1, 300, 7):
        site = copied(sites[start], tmp_path / str(at))
        ended = run(partial(work, site), interrupted(at))
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
        assert run(partial(take_out, site), full(at)) in (0, FAILED)
        found.add(said := stands(site, stock, patched))
        assert (site / ".kvfix").exists() == (said == "half")
    assert found >= {"patched", "half"}
