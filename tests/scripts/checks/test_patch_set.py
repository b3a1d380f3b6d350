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
    for path in (made.folder / "vllm_overlay").iterdir():
        if path.is_dir() and path.name != "provenance":
            shutil.rmtree(path)
    write(made.folder, OVERLAY)
    (made.folder / "README.md").write_text(README)
    (made.folder / "CHANGELOG.md").write_text("- 1: this\n- 2: that\n")
    text = (made.folder / "pyproject.toml").read_text()
    start = text.index("releases = [")
    text = text.replace(text[start : text.index("]", start) + 1], 'releases = ["0.20.2"]')
    (made.folder / "pyproject.toml").write_text(text)
    result = made.run("edit", "--restamp")
    assert result.returncode == 0, result.stderr
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


def test_a_sound_patch_set_has_no_faults_and_its_lines_are_counted(checkout: Checkout) -> None:
    assert faults(checkout) == []
    report = json.loads((checkout.folder / "reports" / "lint.json").read_text())
    assert report["hook_lines"] == {"v0.20": {"1": 4, "2": 1}}
    overlay = (checkout.folder / "vllm_overlay").rglob("*.py")
    assert report["overlay_lines"] == sum(len(p.read_bytes().splitlines()) for p in overlay)


def test_all_faults_are_found_in_one_run(checkout: Checkout) -> None:
    line = checkout.patches / "v0.20"
    change(line / "2-a-name.patch", "+    return work1(x)\n", "+    return x * 9\n")
    change(line / "1-a-name.patch", "Wire-Compat: none", "Wire-Compat: much")
    change(
        line / "1-a-name.patch",
        "+from vllm_overlay",
        "+from vllm.gone import x\n+from vllm_overlay",
    )
    change(line / "1-a-name.patch", ",8 @@", ",9 @@")
    (line / "3-lost.patch").write_text("")
    change(checkout.folder / "CHANGELOG.md", "- 2: that\n", "- 12: that\n")
    change(checkout.folder / "README.md", "| fix |", "| Fix |")
    (checkout.folder / "vllm_overlay" / "idle.py").write_text("")
    registry = checkout.patches / "fixes.toml"
    third = registry.read_text().partition("[[fix]]")[2].partition("[[fix]]")[0]
    third = third.replace('id = "1"', 'id = "7"')
    registry.write_text(f"{registry.read_text()}\n[[fix]]{third}")

    found = "\n".join(faults(checkout))
    for said in (
        "v0.20/3-lost.patch is not in v0.20/series",
        "v0.20/1-a-name.patch: its trailers are not those of fixes.toml",
        "v0.20: fix 7 applies to 0.20.2 and has no patch",
        "no hook: return x * 9",
        "vllm.gone",
        "v0.20/1-a-name.patch: exported again it has other bytes",
        "vllm_overlay/idle.py: no hook of any line reaches this module",
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


def test_a_fix_needs_no_patch_where_the_registry_says_why(checkout: Checkout) -> None:
    registry = checkout.patches / "fixes.toml"
    third = registry.read_text().partition("[[fix]]")[2].partition("[[fix]]")[0]
    why = '[[fix.unpatched]]\nreleases = "==0.20.2"\nreason = "nobody runs it"\n'
    third = third.replace('id = "1"', 'id = "7"').replace("unpatched = []\n", "")
    registry.write_text(f"{registry.read_text()}\n[[fix]]{third}{why}")
    change(checkout.folder / "CHANGELOG.md", "- 2: that\n", "- 2: that\n- 7: not here\n")
    assert checkout.run("edit", "--restamp").returncode == 0
    assert faults(checkout) == []
    assert "● |" in (checkout.folder / "README.md").read_text()
    assert "nobody runs it" in (checkout.folder / "docs" / "fixes.md").read_text()

    (checkout.patches / "v0.20" / "series").write_text("1-a-name.patch\n")
    assert "v0.20: fix 2 applies to 0.20.2 and has no patch" in faults(checkout)


def test_a_patch_that_the_registry_denies_is_a_fault(checkout: Checkout) -> None:
    registry = checkout.patches / "fixes.toml"
    denied = 'unpatched = [{releases = ">=0", reason = "nobody runs it"}]'
    registry.write_text(registry.read_text().replace("unpatched = []", denied, 1))
    assert "v0.20: fix 1 is unpatched on 0.20.2 and has a patch" in faults(checkout)


def test_all_patches_that_cannot_be_read_are_found_in_one_run(checkout: Checkout) -> None:
    line = checkout.patches / "v0.20"
    (line / "1-a-name.patch").unlink()
    change(line / "2-a-name.patch", "\n---\n", "\n")
    assert faults(checkout) == [
        "v0.20/series lists 1-a-name.patch, which is not there",
        "v0.20/2-a-name.patch: it is no mbox with a subject and a `---` line",
    ]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda c: (c.patches / "v0.20" / "series").write_text("1-a-name.patch\n" * 2),
            "v0.20/series lists 1-a-name.patch twice",
        ),
        (
            lambda c: change(c.folder / HOOKED, "_sync_engine_id_across_tp", "_sync"),
            "0.20.2: vllm/distributed/state.py:6: Module",
        ),
        (
            lambda c: change(c.patches / "v0.20" / "2-a-name.patch", "x + 9", "y + 9"),
            "2-a-name.patch, vllm/worker.py, hunk 1: its text is not there",
        ),
        (
            lambda c: change(c.patches / "v0.20" / "2-a-name.patch", "\nFix: 2\n", "\nFix: 9\n"),
            "v0.20: 2-a-name.patch: no such fix in fixes.toml",
        ),
        (
            lambda c: change(c.patches / "fixes.toml", '"<=0.20.2"', '"<0.20"'),
            "v0.20: fix 1 applies to no release of the line",
        ),
        (
            lambda c: change(c.patches / "fixes.toml", '"Backport"', '"Maybe"'),
            "upstream-status is none of",
        ),
        (
            lambda c: (c.patches / "v0.20" / "1-a-name.patch").unlink(),
            "v0.20/series lists 1-a-name.patch, which is not there",
        ),
    ],
    ids=["twice", "overlay", "context", "orphan", "range", "registry", "missing"],
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
