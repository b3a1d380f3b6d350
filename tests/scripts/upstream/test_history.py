from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from scripts.project import ROOT
from scripts.system.errors import GitError, NotLockedError, UnknownReleaseError
from scripts.upstream import history as module
from scripts.upstream.history import Upstream, upstream
from scripts.upstream.lock import LockedFile, LockedRelease
from tests.scripts.checkouts import sdist_bytes
from tests.scripts.repos import commit, git

FILES = {
    "vllm/__init__.py": "",
    "vllm/größe.py": "a = 1\n",
    "tests/test_a.py": "",
    "docs/a.md": "not kept\n",
    "setup.py": "setup()\n",
}
RELEASES = {
    "0.9.1": FILES,
    "0.10.0": {**FILES, "vllm/größe.py": "a = 2\n"},
    "0.10.1": {**FILES, "vllm/more.py": "b = 1\n"},
}


class Releases:
    """What is pinned, and the files of it, in a cache of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.pinned: dict[str, LockedRelease] = {}
        monkeypatch.setattr(module, "load_lock", lambda: dict(self.pinned))
        monkeypatch.setattr(module, "fetch", lambda file: folder / file.name)

    def pin(self, *names: str) -> None:
        self.pinned = {}
        for name in names:
            data = sdist_bytes(RELEASES[name], name)
            file = LockedFile(f"vllm-{name}.tar.gz", name.replace(".", "").zfill(64))
            (self.folder / file.name).write_bytes(data)
            self.pinned[name] = LockedRelease(name, file, ())

    def make(self, cache: str, monkeypatch: pytest.MonkeyPatch) -> Upstream:
        monkeypatch.setenv("KVFIX_CACHE", str(self.folder / cache))
        return upstream()


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Releases:
    return Releases(tmp_path, monkeypatch)


def ids(made: Upstream) -> dict[str, str]:
    tags = made.repository.run("tag", "--list").split()
    return {tag: made.repository.run("rev-parse", tag).strip() for tag in tags}


def test_one_commit_and_tag_for_each_release_in_order(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases.pin("0.9.1", "0.10.0", "0.10.1")
    made = releases.make("cache", monkeypatch)
    assert made.releases() == ["0.9.1", "0.10.0", "0.10.1"]
    log = made.repository.run("log", "--format=%s %D", "v0.10.1").splitlines()
    assert log == [f"vLLM {name} tag: v{name}" for name in reversed(made.releases())]
    paths = made.repository.run("ls-tree", "-rz", "--name-only", "v0.10.1").split("\0")
    assert paths[:-1] == [
        "setup.py",
        "tests/test_a.py",
        "vllm/__init__.py",
        "vllm/größe.py",
        "vllm/more.py",
    ]
    assert made.repository.read("v0.10.0", "vllm/größe.py") == "a = 2\n"
    assert made.repository.run("fsck", "--strict") == ""
    changed = made.repository.run("diff", "--name-only", "-z", "v0.9.1", "v0.10.0")
    assert changed == "vllm/größe.py\0"


def test_ids_do_not_depend_on_when_each_release_came(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases.pin("0.9.1", "0.10.0", "0.10.1")
    together = ids(releases.make("together", monkeypatch))
    for names in (("0.9.1",), ("0.9.1", "0.10.1"), ("0.9.1", "0.10.0", "0.10.1")):
        releases.pin(*names)
        made = releases.make("one by one", monkeypatch)
    assert ids(made) == together
    releases.pin("0.10.0", "0.10.1")  # another checkout's lock, in the same cache
    releases.make("one by one", monkeypatch)
    releases.pin("0.9.1", "0.10.0", "0.10.1")
    assert ids(releases.make("one by one", monkeypatch)) == together


def test_what_is_there_is_not_read_again(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases.pin("0.9.1", "0.10.0")
    before = ids(releases.make("cache", monkeypatch))
    for path in releases.folder.glob("*.tar.gz"):
        path.unlink()
    assert ids(releases.make("cache", monkeypatch)) == before


def test_another_sdist_is_another_release(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases.pin("0.9.1")
    releases.make("cache", monkeypatch)
    file = LockedFile("other.tar.gz", "f" * 64)
    (releases.folder / file.name).write_bytes(sdist_bytes({"vllm/a.py": "x\n"}, "0.9.1"))
    releases.pinned["0.9.1"] = LockedRelease("0.9.1", file, ())
    made = releases.make("cache", monkeypatch)
    assert made.repository.run("ls-tree", "-r", "--name-only", "v0.9.1") == "vllm/a.py\n"
    assert made.repository.run("rev-list", "--count", "v0.9.1") == "1\n"


def test_the_executable_bit_is_kept_and_links_are_not(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases.pin("0.9.1")
    with tarfile.open(releases.folder / "vllm-0.9.1.tar.gz", "w:gz") as tar:
        for name, mode in (("a.sh", 0o775), ("b.py", 0o600)):
            info = tarfile.TarInfo(f"vllm-0.9.1/vllm/{name}")
            info.mode, info.size = mode, 3
            tar.addfile(info, io.BytesIO(b"abc"))
        link = tarfile.TarInfo("vllm-0.9.1/vllm/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    made = releases.make("cache", monkeypatch)
    rows = made.repository.run("ls-tree", "-r", "v0.9.1").splitlines()
    assert [(row[:6], row.rpartition("\t")[2]) for row in rows] == [
        ("100755", "vllm/a.sh"),
        ("100644", "vllm/b.py"),
    ]


def test_nothing_pinned(releases: Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotLockedError):
        releases.make("cache", monkeypatch)


def test_a_tag_that_is_not_there(releases: Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    releases.pin("0.9.1")
    with pytest.raises(UnknownReleaseError, match=r"no tag v0\.10\.0"):
        releases.make("cache", monkeypatch).tag("0.10.0")


_SLOW = """
import sys
from pathlib import Path
from scripts.upstream import history as upstream
from scripts.upstream.lock import LockedFile, LockedRelease
folder = Path(sys.argv[1])
names = ("0.9.1", "0.10.0")
files = {n: LockedFile(f"vllm-{n}.tar.gz", n.replace(".", "").zfill(64)) for n in names}
upstream.load_lock = lambda: {n: LockedRelease(n, f, ()) for n, f in files.items()}
upstream.fetch = lambda file: folder / file.name
upstream.upstream()
"""


def test_a_kill_half_way_leaves_no_half_release(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases.pin("0.9.1", "0.10.0")
    archive = releases.folder / "vllm-0.10.0.tar.gz"
    whole = archive.read_bytes()
    archive.unlink()
    os.mkfifo(archive)  # the second release's bytes never end
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, str(releases.folder)],
        cwd=ROOT,
        env={**os.environ, "KVFIX_CACHE": str(releases.folder / "cache")},
        stderr=subprocess.PIPE,
    )
    with process, archive.open("wb") as pipe:
        pipe.write(whole[: len(whole) // 2])
        pipe.flush()
        bare = releases.folder / "cache" / "upstream" / "upstream.git"
        for _ in range(1000):
            if "v0.9.1" in git(bare, "tag", "--list"):
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert git(bare, "tag", "--list").split() == ["v0.9.1"]
    archive.unlink()
    archive.write_bytes(whole)
    resumed = ids(releases.make("cache", monkeypatch))
    assert resumed == ids(releases.make("fresh", monkeypatch))


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with a release branch, a merge, and tags that are no releases."""
    monkeypatch.setenv("KVFIX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "a clone"
    commit(folder, {"vllm/a.py": "1\n"}, "first")
    git(folder, "switch", "--quiet", "--create", "releases/v0.20")
    commit(folder, {"vllm/b.py": "1\n"}, "[Bugfix] Picked (#7)")
    git(folder, "tag", "v0.20.0")
    git(folder, "switch", "--quiet", "main")
    git(folder, "switch", "--quiet", "--create", "topic")
    commit(folder, {"vllm/c.py": "1\n"}, "[Bugfix] Merged (#70)")
    git(folder, "switch", "--quiet", "main")
    git(folder, "merge", "--quiet", "--no-ff", "-m", "Merge topic", "topic")
    git(folder, "tag", "v0.21.0rc1")
    git(folder, "tag", "-a", "-m", "words", "v0.21.0")
    git(folder, "tag", "v-next")
    git(folder, "tag", "nightly")
    commit(folder, {"vllm/c.py": "2\n"}, "later (#8)")
    return folder


def test_a_clone_has_its_own_tags(clone: Path) -> None:
    made = upstream(str(clone))
    assert made.releases() == ["0.20.0", "0.21.0"]
    assert made.repository.read(made.tag("0.21.0"), "vllm/c.py") == "1\n"
    assert made.mentions("owner/vllm#70", "0.20.0", "0.21.0") == [
        made.repository.run("log", "-1", "--format=%h %s", "v0.21.0^{commit}^2").strip()
    ]
    assert made.mentions("owner/vllm#7", "0.20.0", "0.21.0") == []  # on the other branch
    assert len(made.mentions("owner/vllm#7", "0.21.0", "0.20.0")) == 1
    assert made.mentions("owner/vllm#8", "0.20.0", "0.21.0") == []
    assert made.mentions("", "0.20.0", "0.21.0") == []


def test_a_clone_is_brought_up_to_date(clone: Path) -> None:
    upstream(str(clone))
    git(clone, "tag", "v0.22.0")
    assert upstream(f"file://{clone}").releases()[-1] == "0.22.0"  # by URL: another copy
    assert upstream(str(clone)).releases() == ["0.20.0", "0.21.0", "0.22.0"]


def test_a_tag_that_has_moved_stops_everything(clone: Path) -> None:
    was = ids(upstream(str(clone)))
    git(clone, "tag", "--force", "v0.20.0", "main")
    with pytest.raises(GitError, match=r"would clobber existing tag") as caught:
        upstream(str(clone))
    assert "rm -r" in caught.value.next_step
    bare = next((clone.parent / "cache" / "upstream").glob("*.git"))
    assert git(bare, "rev-parse", "v0.20.0").strip() == was["v0.20.0"]


@pytest.mark.parametrize("origin", ["nowhere", "/dev/null", "--upload-pack=touch x"])
def test_no_repository(clone: Path, origin: str) -> None:
    with pytest.raises(GitError, match="fetch failed"):
        upstream(origin)


def test_what_a_killed_import_has_left_goes_with_the_next(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases.pin("0.9.1")
    repository = releases.make("cache", monkeypatch).repository.path
    left = [
        repository / "objects" / "pack" / "tmp_pack_abc",
        repository / "fast_import_crash_7",
        repository / "refs" / "tags" / "v0.10.0.lock",
    ]
    for path in left:
        path.touch()
    releases.pin("0.9.1", "0.10.0")
    assert releases.make("cache", monkeypatch).releases() == ["0.9.1", "0.10.0"]
    assert not any(path.exists() for path in left)
