"""The installer's code on a small vLLM that pip has installed: in, out, and what it refuses."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from zipfile import ZipFile

import pytest

from scripts.ship.runtime import lock, switch
from scripts.ship.runtime.install import check, install, take_out
from scripts.ship.runtime.installed import find_site
from scripts.ship.runtime.lock import alone, beside_readers
from scripts.ship.runtime.refusal import RefusalError
from scripts.ship.runtime.switch import is_half_done
from scripts.wheel.record import record_row
from tests.scripts.ship.environments import (
    LOCAL,
    OVERLAY,
    bundle,
    copied,
    folders,
    given,
    seen,
    stock_site,
)
from tests.scripts.wheels import SCRIPT, WORKER

PATCHED = f"vllm-0.20.2+{LOCAL}.dist-info"
STOCK = "vllm-0.20.2.dist-info"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stock_site(tmp_path_factory.mktemp("made"))


@pytest.fixture
def site(made: Path, tmp_path: Path) -> Path:
    return copied(made, tmp_path / "site")


def in_child(work: Callable[[], object]) -> int:
    """Do something in a process of its own; return how that ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(99)


def put_in(site: Path) -> str:
    return install(site, bundle())


def look(site: Path) -> str:
    return check(site, bundle())


def record(site: Path, dist_info: str = PATCHED) -> list[list[str]]:
    return [*csv.reader(io.StringIO((site / dist_info / "RECORD").read_text()))]


class TestInstall:
    def test_puts_in_what_it_holds(self, site: Path) -> None:
        before = seen(site)
        said = install(site, bundle())
        assert f"is now 0.20.2+{LOCAL}: 3 files changed, 5 added, 1 fixes" in said
        after = seen(site)
        for path, data in bundle().files.items():
            assert after[path][0] == data
        assert after[SCRIPT][1] == before[SCRIPT][1]  # it can still be run
        assert not (site / STOCK).exists()
        assert not (site / ".kvfix").exists()
        touched = {WORKER, SCRIPT, "vllm/_version.py"}
        for path in before.keys() - touched:
            if STOCK not in path and not path.endswith(".pyc"):
                assert after[path] == before[path]

    def test_states_its_version_wherever_one_is_stated(self, site: Path) -> None:
        install(site, bundle())
        metadata = (site / PATCHED / "METADATA").read_text()
        assert f"\nVersion: 0.20.2+{LOCAL}\n" in metadata
        assert "\nVersion: not this one\n" in metadata
        code = "import vllm, importlib.metadata as m; print(vllm.__version__, m.version('vllm'))"
        said = subprocess.check_output(
            [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = [{str(site)!r}]; {code}"],
            text=True,
        )
        assert said.split() == [f"0.20.2+{LOCAL}"] * 2
        sbom = json.loads((site / PATCHED / "sboms/kvfix.cdx.json").read_text())
        component = sbom["metadata"]["component"]
        assert component["version"] == f"0.20.2+{LOCAL}"
        assert component["pedigree"]["ancestors"][0]["version"] == "0.20.2"
        assert "hashes" not in component["pedigree"]["ancestors"][0]
        assert {one["ref"] for one in sbom["dependencies"]} >= {component["bom-ref"]}

    def test_leaves_a_record_of_every_file(self, site: Path) -> None:
        before = record(site, STOCK)
        install(site, bundle())
        rows = record(site)
        names = [row[0] for row in rows]
        assert len(names) == len({*names})
        assert names == sorted(names) or before != sorted(before)
        script = {"../../bin/vllm"}  # where pip has it before --target
        assert {*names} - script == {*seen(site)} - {"bin/vllm"}
        for path, digest, size in rows:
            if digest and path not in script:
                assert (digest, size) == record_row((site / path).read_bytes())

    def test_compiles_what_was_compiled(self, site: Path, tmp_path: Path) -> None:
        install(site, bundle())
        assert [*(site / "vllm_overlay/deep/er/__pycache__").iterdir()]
        other = copied(site, tmp_path / "other")
        take_out(other)
        for path in other.rglob("*.pyc"):
            path.unlink()
        install(other, bundle())
        assert not [*other.rglob("*.pyc")]

    def test_again_changes_nothing(self, site: Path) -> None:
        install(site, bundle())
        before = seen(site)
        assert install(site, bundle()).startswith("nothing has changed: ")
        assert seen(site) == before

    def test_keeps_the_local_part_of_a_build(self, tmp_path: Path) -> None:
        site = stock_site(tmp_path, "0.20.2+cu129")
        before = seen(site)
        install(site, bundle())
        assert (site / f"vllm-0.20.2+cu129.{LOCAL}.dist-info").is_dir()
        assert f"(0, 20, 2, 'cu129.{LOCAL}')" in (site / "vllm/_version.py").read_text()
        assert check(site, bundle()).startswith("patched: ")
        take_out(site)
        assert seen(site) == before

    def test_writes_no_byte_that_others_share(self, site: Path, tmp_path: Path) -> None:
        """What uv installs it links to its cache: the same file by two names."""
        shared = shutil.copytree(site, tmp_path / "cache", copy_function=os.link)
        before = seen(shared)
        install(site, bundle())
        assert seen(shared) == before
        take_out(site)
        assert seen(shared) == before


class TestOwners:
    """An installer that root runs over a user's environment leaves it to the user."""

    @pytest.fixture
    def shared(self, site: Path) -> Path:
        """Return a site that a group shares, with a folder in the metadata that has nothing."""
        (site / STOCK / "licenses" / "none").mkdir(parents=True)
        for folder in (site, *(site / name for name in folders(site))):
            folder.chmod(0o2775)
        (site / STOCK / "licenses").chmod(0o2770)
        (site / STOCK / "METADATA").chmod(0o640)
        return site

    def test_folders_of_the_metadata_keep_their_modes(self, shared: Path) -> None:
        before, files = folders(shared), seen(shared)
        install(shared, bundle())
        after = folders(shared)
        for path in ("", "/licenses", "/licenses/none"):
            assert after[f"{PATCHED}{path}"] == before[f"{STOCK}{path}"]
        take_out(shared)
        assert folders(shared) == before
        assert seen(shared) == files

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
    def test_all_that_is_new_belongs_to_whom_the_folder_does(self, shared: Path) -> None:
        given(shared, 1234, 2345)
        os.chown(shared / STOCK / "licenses", 1234, 2346)
        os.chown(shared / WORKER, 1235, 2345)
        before, files = folders(shared), seen(shared)
        install(shared, bundle())
        for path, (*_, uid, gid) in seen(shared).items():
            assert (path, uid, gid) == (path, 1235 if path == WORKER else 1234, 2345)
        for path, (_, uid, gid) in folders(shared).items():
            group = 2346 if path == f"{PATCHED}/licenses" else 2345
            assert (path, uid, gid) == (path, 1234, group)
        take_out(shared)
        assert folders(shared) == before
        assert seen(shared) == files

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
    def test_what_root_left_half_done_its_owner_mends(
        self, shared: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given(shared, 1234, 2345)
        before = seen(shared)
        monkeypatch.setattr(switch, "put_folder", lambda *_: os._exit(9))
        assert in_child(lambda: install(shared, bundle())) == 9
        monkeypatch.undo()
        assert is_half_done(shared)

        def mend() -> None:
            os.chdir(shared)  # nobody else may go through the folders above it
            os.setgroups([])
            os.setgid(2345)
            os.setuid(1234)
            take_out(Path())

        assert in_child(mend) == 0
        assert seen(shared) == before
        assert not (shared / ".kvfix").exists()

    @pytest.mark.parametrize("code", [errno.EPERM, errno.EINVAL])
    def test_who_may_not_give_files_away_installs_all_the_same(
        self, site: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        asked: list[tuple[object, ...]] = []

        def refused(*words: object) -> None:
            asked.append(words[1:])
            raise OSError(code, "refused")

        monkeypatch.setattr(os, "chown", refused)
        monkeypatch.setattr(switch, "owner_at", lambda _: (1234, 2345))
        before = {name: each[0] for name, each in seen(site).items()}
        install(site, bundle())
        assert {*asked} == {(1234, 2345), (-1, 2345)}
        take_out(site)
        assert {name: each[0] for name, each in seen(site).items()} == before

    def test_what_an_earlier_installer_kept_has_no_owners(self, site: Path) -> None:
        before = seen(site)
        install(site, bundle())
        kept = site / PATCHED / "kvfix-undo.zip"
        with ZipFile(kept) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        manifest = json.loads(members["manifest.json"])
        del manifest["folders"]
        for facts in manifest["kept"].values():
            del facts["uid"], facts["gid"]
        members["manifest.json"] = json.dumps(manifest).encode()
        with ZipFile(kept, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        take_out(site)
        assert seen(site) == before


class TestUndo:
    def test_restores_every_byte_mode_and_date(self, site: Path) -> None:
        before = seen(site)
        install(site, bundle())
        code = "import vllm, vllm.worker, vllm_overlay.deep.er.worker"
        subprocess.run([sys.executable, "-c", code], cwd=site, check=True)  # leaves byte code
        assert take_out(site).startswith("stock again: ")
        assert seen(site) == before
        assert not (site / "vllm_overlay").exists()
        assert not (site / ".kvfix").exists()

    def test_of_stock_is_nothing(self, site: Path) -> None:
        assert take_out(site).startswith("nothing has changed: ")

    def test_spares_what_somebody_has_changed_since(self, site: Path) -> None:
        install(site, bundle())
        (site / WORKER).write_text("ours")
        before = seen(site)
        with pytest.raises(RefusalError, match=f"{WORKER} in .* changed since"):
            take_out(site)
        assert seen(site) == before

    def test_of_a_wheel_is_not_for_us(self, site: Path) -> None:
        install(site, bundle())
        (site / PATCHED / "kvfix-undo.zip").unlink()
        with pytest.raises(RefusalError, match="no installer of this kind"):
            take_out(site)

    def test_from_a_broken_archive_is_refused(self, site: Path) -> None:
        install(site, bundle())
        (site / PATCHED / "kvfix-undo.zip").write_bytes(b"PK")
        before = seen(site)
        with pytest.raises(RefusalError, match="cannot be read"):
            take_out(site)
        assert seen(site) == before


def _write(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")


def _overlay(site: Path) -> None:
    _write(site / OVERLAY)


def _link_file(site: Path) -> None:
    (site / WORKER).rename(site.parent / "elsewhere.py")
    (site / WORKER).symlink_to(site.parent / "elsewhere.py")


def _folder(site: Path) -> None:
    (site / WORKER).unlink()
    (site / WORKER).mkdir()


def _link_folder(site: Path) -> None:
    (site / "vllm").rename(site.parent / "elsewhere")
    (site / "vllm").symlink_to(site.parent / "elsewhere")


def _editable(site: Path) -> None:
    (site / STOCK / "direct_url.json").write_text(
        '{"url": "file:///x", "dir_info": {"editable": true}}'
    )


def _another_release(site: Path) -> None:
    for name in ("METADATA", "RECORD"):
        path = site / STOCK / name
        path.write_text(path.read_text().replace("0.20.2", "0.21.0"))
    (site / STOCK).rename(site / STOCK.replace("0.20.2", "0.21.0"))


HOSTILE: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "a changed file": (
        lambda site: (site / WORKER).write_bytes((site / WORKER).read_bytes() + b"#"),
        17,
        rf"1 files that are not the release's own:\n  {WORKER}: [0-9a-f]{{64}}, expected",
    ),
    "a missing file": (lambda site: (site / SCRIPT).unlink(), 17, f"{SCRIPT}: is missing"),
    "a folder": (
        _folder,
        17,
        f"{WORKER}: is no file",
    ),
    "a link": (_link_file, 17, f"{WORKER}: is a symbolic link, to .*elsewhere.py"),
    "a linked folder": (_link_folder, 17, f"{WORKER}: is a symbolic link"),
    "a metadata that its RECORD does not know": (
        lambda site: (site / STOCK / "METADATA").write_text("Name: vllm\nVersion: 0.20.2\n\n"),
        17,
        "METADATA: [0-9a-f]+, its RECORD has another",
    ),
    "an overlay": (_overlay, 16, "patched already|is missing"),
    "an overlay's other module": (
        lambda site: _write(site / "vllm_overlay/deep/er/worker.py"),
        17,
        "vllm_overlay/deep/er/worker.py: is there already, .* remove it",
    ),
    "a file for an overlay": (
        lambda site: (site / "vllm_overlay").write_bytes(b""),
        17,
        "vllm_overlay: is no folder: remove it",
    ),
    "a link for an overlay": (
        lambda site: (site / "vllm_overlay").symlink_to(site.parent),
        17,
        "vllm_overlay: is a symbolic link: remove it",
    ),
    "no metadata": (lambda site: shutil.rmtree(site / STOCK), 14, "editable install or a checkout"),
    "an editable install": (_editable, 14, "editable install"),
    "two of them": (
        lambda site: shutil.copytree(site / STOCK, site / "vllm-0.20.1.dist-info"),
        14,
        "has several vLLM: vllm-0.20.1.dist-info, vllm-0.20.2.dist-info",
    ),
    "another release": (_another_release, 15, "is release 0.21.0"),
    "a RECORD that is none": (
        lambda site: (site / STOCK / "RECORD").write_text('vllm/_version.py,"\n'),
        14,
        "RECORD of the installed vLLM has",
    ),
    "two versions": (
        lambda site: (site / STOCK / "METADATA").write_text("Name: vllm\nVersion: 1\nVersion: 2\n"),
        14,
        "2 headers 'Version'",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_the_release_is_refused_and_left(site: Path, name: str) -> None:
    spoil, code, said = HOSTILE[name]
    spoil(site)
    before = seen(site)
    for act in (install, check):
        with pytest.raises(RefusalError, match=said) as caught:
            act(site, bundle())
        assert caught.value.code == code
        assert caught.value.expected
        assert caught.value.advice
        assert seen(site) == before
        assert not (site / ".kvfix").exists()


LEFT = "vllm_overlay/old/__pycache__/gone.cpython-312.opt-1.pyc"


def test_what_pip_leaves_of_an_overlay_is_no_obstacle(site: Path) -> None:
    """Byte code that it did not install, and the folders that this lies in."""
    (site / "vllm_overlay/deep/empty").mkdir(parents=True)
    _write(site / "vllm_overlay/__pycache__/__init__.cpython-312.opt-1.pyc")
    _write(site / LEFT)
    assert check(site, bundle()).startswith("stock: ")
    assert "is now" in install(site, bundle())
    assert check(site, bundle()).startswith("patched: ")
    said = take_out(site)
    assert said.splitlines()[1:] == [
        "left there, since no installer has put it there; remove it if you like:",
        f"  {LEFT}",
    ]
    assert check(site, bundle()).startswith("stock: ")
    shutil.rmtree(site / "vllm_overlay")
    (site / "vllm_overlay/empty").mkdir(parents=True)
    install(site, bundle())
    assert take_out(site).endswith("remove it if you like:\n  vllm_overlay")


def test_an_overlay_that_no_release_owns_is_to_be_removed(site: Path) -> None:
    _overlay(site)
    with pytest.raises(RefusalError) as caught:
        install(site, bundle())
    assert f"remove {site / 'vllm_overlay'} if that is still there" in caught.value.advice


def test_another_patch_set_comes_out_first(site: Path) -> None:
    install(site, bundle())
    newer = bundle(local="kvfix.0.2.0", files={**bundle().files, WORKER: b"# newer\n"})
    before = seen(site)
    with pytest.raises(RefusalError, match="is patched already") as caught:
        install(site, newer)
    assert caught.value.code == 16
    assert "--undo" in caught.value.advice
    assert seen(site) == before
    with pytest.raises(RefusalError, match="not what this installer makes"):
        check(site, newer)
    take_out(site)
    install(site, newer)


def test_what_is_there_of_a_wheel_and_whole_is_left(site: Path) -> None:
    install(site, bundle())
    (site / PATCHED / "kvfix-undo.zip").unlink()
    assert install(site, bundle()).startswith("nothing has changed")
    (site / OVERLAY).write_text("")
    with pytest.raises(RefusalError) as caught:
        install(site, bundle())
    assert "install the stock release again" in caught.value.advice


class TestLock:
    def test_two_installers_do_not_meet(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lock, "PATIENCE", 0.2)
        for act in (install, check):
            with alone(site), pytest.raises(RefusalError, match="another installer") as caught:
                act(site, bundle())
            assert caught.value.code == 20
        with beside_readers(site), pytest.raises(RefusalError, match="another installer"):
            take_out(site)

    def test_checks_do_not_keep_each_other_out(
        self, site: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lock, "PATIENCE", 0.0)
        with beside_readers(site):
            assert check(site, bundle()).startswith("stock: ")

    @pytest.mark.parametrize("other", [alone, beside_readers])
    @pytest.mark.parametrize("act", [put_in, take_out, look])
    def test_one_waits_for_the_other(
        self,
        site: Path,
        other: Callable[[Path], AbstractContextManager[None]],
        act: Callable[[Path], str],
    ) -> None:
        holds = threading.Event()

        def hold() -> None:
            with other(site):
                holds.set()
                time.sleep(0.5)

        holder = threading.Thread(target=hold)
        holder.start()
        holds.wait()
        assert act(site)
        holder.join()


def test_check_says_what_there_is(site: Path) -> None:
    before = seen(site)
    assert check(site, bundle()).startswith("stock: ")
    assert seen(site) == before
    install(site, bundle())
    assert check(site, bundle()).startswith("patched: ")


def test_the_site_is_found_or_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_site(str(site)) == site
    with pytest.raises(RefusalError, match=r"no vllm/__init__\.py in"):
        find_site(str(site / "vllm"))
    with pytest.raises(RefusalError, match="no vLLM for this Python"):
        find_site(None)
    monkeypatch.syspath_prepend(str(site))
    assert find_site(None) == site
