"""`nox -s lint` on a small patch set: what it finds, and that it finds all of it at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.checks import code
from tests.scripts import checkouts
from tests.scripts.checkouts import Checkout
from tests.scripts.repos import write

README = "# Tools\n<!-- matrix, made by a tool -->\nold\n<!-- end of matrix -->\nend\n"
LINT = (
    "import scripts.commands.lint as lint; lint.code_faults = lambda: []; "
    "from scripts.system.console import entry; "
)
HOOKED = "vllm_overlay/distributed/kv_transfer/kv_transfer_state.py"
TEST = "tests/overlay/distributed/kv_transfer/test_kv_transfer_state.py"
OVERLAY = {
    "vllm_overlay/distributed/__init__.py": "",
    "vllm_overlay/distributed/kv_transfer/__init__.py": "",
    HOOKED: '"""From 0.20.0 on: what a hook calls."""\n'
    "def _sync_engine_id_across_tp(x: int) -> None:\n    print(x)\n",
    TEST: "",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return a patch set without faults."""
    made = checkouts.small(tmp_path_factory.mktemp("sound"))
    checkouts.empty_overlay(made)
    write(made.folder, OVERLAY)
    (made.folder / "README.md").write_text(README)
    (made.folder / "CHANGELOG.md").write_text("- 1: this\n- 2: that\n")
    result = made.run("edit", "--restamp")
    assert result.returncode == 0, result.stderr
    assert faults(made) == []  # copies have what mypy keeps of this run
    return made


@pytest.fixture
def checkout(sound: Checkout, tmp_path: Path) -> Checkout:
    return Checkout(shutil.copytree(sound.folder, tmp_path / "kvfix"), sound.cache)


def faults(checkout: Checkout) -> list[str]:
    """Lint the patch set, leave out the Python of the tools, and return the faults."""
    result = subprocess.run(
        [sys.executable, "-c", LINT + "entry(lint.main)"],
        cwd=checkout.folder,
        env=checkout.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in result.stderr, result.stderr
    found = [row[2:] for row in result.stderr.splitlines() if row.startswith("✗ ")]
    assert result.returncode == (30 if found else 0), result.stderr
    if found:
        assert f"error: {len(found)} fault" in result.stderr
    return found


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _patch(checkout: Checkout, fix: str) -> Path:
    return checkout.patches / f"{fix}-a-name" / "0.20.2.patch"


def test_a_sound_patch_set_has_no_faults_and_its_lines_are_counted(checkout: Checkout) -> None:
    assert faults(checkout) == []
    report = json.loads((checkout.folder / "reports" / "lint.json").read_text())
    assert report["hook_lines"] == {"0.20.2": {"1": 4, "2": 1}}
    overlay = (checkout.folder / "vllm_overlay").rglob("*.py")
    assert report["overlay_lines"] == sum(len(p.read_bytes().splitlines()) for p in overlay)


def test_all_faults_are_found_in_one_run(checkout: Checkout) -> None:
    one, two = (checkout.patches / f"{n}-a-name" / "0.20.2.patch" for n in (1, 2))
    change(two, "+    return work1(x)\n", "+    return x * 9\n")
    change(two, "Serves: 0.20.2\n", "Serves: 0.20.2, 0.21.0\n")
    change(
        one,
        "_sync_engine_id_across_tp\n+\n",
        "_sync_engine_id_across_tp\n+from vllm.gone import x\n",
    )
    write(checkout.patches, {"3-lost/0.20.2.patch": ""})
    change(checkout.folder / "CHANGELOG.md", "- 2: that\n", "- 12: that\n")
    change(checkout.folder / "README.md", "| fix |", "| Fix |")
    (checkout.folder / "vllm_overlay" / "idle.py").write_text("")
    registry = checkout.patches / "fixes.toml"
    third = registry.read_text().partition("[[fix]]")[2].partition("[[fix]]")[0]
    third = third.replace('id = "1"', 'id = "7"')
    registry.write_text(f"{registry.read_text()}\n[[fix]]{third}")

    found = "\n".join(faults(checkout))
    for said in (
        "patches/3-lost/0.20.2.patch: is the patch of no fix of fixes.toml",
        "fix 7 applies to 0.20.2 and has no patch",
        "no hook: return x * 9",
        "vllm.gone",
        "2-a-name/0.20.2.patch: made anew it has other bytes",
        "vllm_overlay/idle.py: no hook of any release reaches this module",
        "CHANGELOG.md does not name fix 2",
        "README.md: is not what the registry says",
    ):
        assert said in found, f"{said}\n---\n{found}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("What a hook calls.", "does not say which releases it is for, as in: Up to 0.22.1: what"),
        ("All releases", "does not say which releases it is for"),
        ("Up to 0.19.1: what a hook calls.", "'Up to 0.19.1', but on 0.20.2 hooks reach it"),
        ("0.18.0 to 0.20.1: what a hook calls.", "'0.18.0 to 0.20.1', but on 0.20.2 hooks reach"),
        ("From 0.21.0 on: what a hook calls.", "'From 0.21.0 on', but on 0.20.2 hooks reach it"),
    ],
)
def test_a_module_says_rightly_for_which_releases_it_is(
    checkout: Checkout, line: str, said: str
) -> None:
    change(checkout.folder / HOOKED, "From 0.20.0 on: what a hook calls.", line)
    (found,) = (fault for fault in faults(checkout) if fault.startswith(HOOKED))
    assert said in found
    if "restamp" in found:
        assert checkout.run("edit", "--restamp").returncode == 0
        assert faults(checkout) == []
        text = (checkout.folder / HOOKED).read_text()
        assert text.startswith('"""All releases: what a hook calls."""')


@pytest.mark.parametrize("words", ["All releases", "Up to 0.20.2", "0.20.0 to 0.22.0"])
def test_the_page_of_the_overlay_follows_from_what_modules_say(
    checkout: Checkout, words: str
) -> None:
    change(checkout.folder / HOOKED, "From 0.20.0 on", words)
    page = "docs/overlay.md: is not what the registry says; run: nox -s edit -- --restamp"
    assert faults(checkout) == [page]
    assert checkout.run("edit", "--restamp").returncode == 0
    assert faults(checkout) == []
    text = (checkout.folder / "docs" / "overlay.md").read_text()
    assert f"## {words}\n" in text
    assert text.endswith("| what a hook calls | 1 |\n")


def test_a_module_that_no_hook_of_its_releases_reaches(checkout: Checkout) -> None:
    write(checkout.folder, {
        "vllm_overlay/idle.py": '"""All releases: nothing."""\n',
        "tests/overlay/test_idle.py": "",
    })  # fmt: skip
    said = "vllm_overlay/idle.py: its first line says 'All releases', but on 0.20.2 hooks do not"
    assert [fault for fault in faults(checkout) if fault.startswith(said)]


def test_a_module_without_tests(checkout: Checkout) -> None:
    (checkout.folder / TEST).unlink()
    assert faults(checkout) == [f"{HOOKED}: has no {TEST}"]


def test_what_two_modules_keep_under_one_name(checkout: Checkout) -> None:
    keeps = 'def keep(worker: object) -> None:\n    vars(worker).setdefault("_reads", {})\n'
    other = "vllm_overlay/distributed/other.py"
    write(checkout.folder, {other: keeps, HOOKED: OVERLAY[HOOKED] + keeps})
    wanted = f"{HOOKED} and {other}: keep _reads on vLLM's objects, each its own"
    assert wanted in faults(checkout)


def test_a_fix_needs_no_patch_where_the_registry_says_why(checkout: Checkout) -> None:
    registry = checkout.patches / "fixes.toml"
    third = registry.read_text().partition("[[fix]]")[2].partition("[[fix]]")[0]
    why = '[[fix.unpatched]]\nreleases = "==0.20.2"\nreason = "nobody runs it"\n'
    third = third.replace('id = "1"', 'id = "7"').replace("unpatched = []\n", "")
    registry.write_text(f"{registry.read_text()}\n[[fix]]{third}{why}")
    change(checkout.folder / "CHANGELOG.md", "- 2: that\n", "- 2: that\n- 7: not here\n")
    assert checkout.run("edit", "--restamp").returncode == 0
    assert faults(checkout) == []
    assert "| - | all |" in (checkout.folder / "README.md").read_text()
    assert "nobody runs it" in (checkout.folder / "docs" / "fixes.md").read_text()

    (checkout.patches / "2-a-name" / "0.20.2.patch").unlink()
    assert "fix 2 applies to 0.20.2 and has no patch" in faults(checkout)


def test_a_patch_that_the_registry_denies_is_a_fault(checkout: Checkout) -> None:
    registry = checkout.patches / "fixes.toml"
    denied = 'unpatched = [{releases = ">=0", reason = "nobody runs it"}]'
    registry.write_text(registry.read_text().replace("unpatched = []", denied, 1))
    said = "1-a-name/0.20.2.patch: serves no release that another file does not serve as well"
    assert any(fault.startswith(said) for fault in faults(checkout))


def test_all_patches_that_cannot_be_read_are_found_in_one_run(checkout: Checkout) -> None:
    one, two = (checkout.patches / f"{n}-a-name" / "0.20.2.patch" for n in (1, 2))
    one.rename(one.with_name("first.patch"))
    change(two, "Serves: ", "Also: ")
    assert faults(checkout) == [
        "1-a-name/first.patch is not named by a release, or not by one of its own",
        "2-a-name/0.20.2.patch: it has no head of `Fix:` and `Serves:` with a diff below",
    ]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda c: shutil.copy(_patch(c, "2"), _patch(c, "2").with_name("0.20.3.patch")),
            "2-a-name/0.20.3.patch: serves no release that another file does not serve as well",
        ),
        (
            lambda c: _patch(c, "2").rename(_patch(c, "2").with_name("0.20.1.patch")),
            "2-a-name/0.20.2.patch is missing; run: nox -s edit -- --restamp",
        ),
        (
            lambda c: change(c.folder / HOOKED, "_sync_engine_id_across_tp", "_sync"),
            "0.20.2: vllm/distributed/state.py:6: Module",
        ),
        (
            lambda c: change(_patch(c, "2"), "x + 9", "y + 9"),
            "2-a-name/0.20.2.patch, vllm/worker.py, hunk 1: its text is not there",
        ),
        (
            lambda c: change(_patch(c, "2"), "Fix: 2-a-name\n", "Fix: 9-a-name\n"),
            "2-a-name/0.20.2.patch: its head names 9-a-name",
        ),
        (
            lambda c: change(c.patches / "fixes.toml", '"<=0.20.2"', '"<0.20"'),
            "1-a-name/0.20.2.patch: serves no release that another file does not serve as well",
        ),
        (
            lambda c: change(c.patches / "fixes.toml", '"Backport"', '"Maybe"'),
            "upstream-status is none of",
        ),
        (lambda c: _patch(c, "1").unlink(), "fix 1 applies to 0.20.2 and has no patch"),
        (
            lambda c: checkouts.carried(c, "0.20.2", "0.21.0"),
            "0.21.0 is among the releases of pyproject.toml and not in upstream.lock",
        ),
    ],
    ids=[
        *("surplus", "name", "overlay", "context", "orphan", "range", "registry", "missing"),
        "unpinned",
    ],
)
def test_what_breaks_the_set_is_a_fault_and_no_traceback(
    checkout: Checkout, spoil: Callable[[Checkout], object], said: str
) -> None:
    spoil(checkout)
    assert any(said in fault for fault in faults(checkout))


def test_the_python_of_the_tools_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import os\nx: int = 'a'\n")
    monkeypatch.setattr(code, "_PYTHON", (str(bad),))
    found = list(code.code_faults())
    assert any(fault.startswith("ruff check:") and "F401" in fault for fault in found)
    assert any(fault.startswith("mypy:") and "Incompatible types" in fault for fault in found)
