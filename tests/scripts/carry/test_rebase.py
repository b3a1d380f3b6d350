"""`nox -s rebase` from end to end: real repositories, real conflicts, real tests, real kills."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.carry.rebase import commits_by_fix
from scripts.patchset.patch import read_patch
from scripts.patchset.registry import Unpatched
from scripts.project import read_toml
from scripts.system.git import Repository
from tests.scripts import toys
from tests.scripts.carrying import REGISTRY, SIMULATION, WORKER, carrying, change, release
from tests.scripts.checkouts import Checkout, copied, registry_text
from tests.scripts.repos import commit, git

STAYS = {**toys.FILES, WORKER: '"""More."""\n' + toys.FILES[WORKER]}
FIXED = {**toys.FILES, WORKER: toys.changed(WORKER, ("    return x + 2\n", "    return 1 + x\n"))}
COLLIDES = {
    **toys.FILES,
    WORKER: toys.changed(WORKER, ("    return x + 9\n", "    return 9 + x\n")),
}

BOTH = {
    "1-a-name/0.20.2.patch": ("0.20.2", "0.21.0"),
    "2-a-name/0.20.2.patch": ("0.20.2",),
    "2-a-name/0.21.0.patch": ("0.21.0",),
}

# Lint and the regression tests run for each release that lands, 10 s of one core.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return carrying(tmp_path_factory.mktemp("made"))


@pytest.fixture
def checkout(made: Checkout, tmp_path: Path) -> Checkout:
    return copied(made, tmp_path)


def rebase(checkout: Checkout, *words: str, code: int = 0) -> str:
    """Run `rebase`, expect an exit code, and return all that it says."""
    result = checkout.run("rebase", *words, timeout=600)
    assert "Traceback" not in result.stderr, result.stderr
    assert result.returncode == code, result.stdout + result.stderr
    if code:
        assert "next: " in result.stderr
    return result.stdout + result.stderr


def contents(checkout: Checkout) -> dict[str, bytes]:
    """Return everything that a landing could change; what tests have shown stays on record."""
    names = ("patches", "docs", "records", "reports", "README.md", "pyproject.toml")
    paths = [p for n in names for p in (checkout.folder / n, *(checkout.folder / n).rglob("*"))]
    return {
        str(path.relative_to(checkout.folder)): path.read_bytes()
        for path in paths
        if path.is_file() and path.parent.name != "proofs"
    }


def worktree(checkout: Checkout) -> Path:
    return checkout.folder / ".work" / "rebase" / "tree"


def files(checkout: Checkout) -> dict[str, tuple[str, ...]]:
    """Return the releases that each patch file says it serves, by its path."""
    found = map(read_patch, sorted(checkout.patches.glob("*/*.patch")))
    return {patch.name: patch.serves for patch in found}


def report(checkout: Checkout, name: str) -> dict[str, str]:
    path = checkout.folder / "reports" / f"rebase-{name}.json"
    return {row["fix"]: row["status"] for row in json.loads(path.read_text())["fixes"]}


def releases(checkout: Checkout) -> list[str]:
    found: list[str] = read_toml(checkout.folder / "pyproject.toml")["tool"]["kvfix"]["releases"]
    return found


def resolve(checkout: Checkout) -> None:
    """Do what a person does about the conflict in `COLLIDES`."""
    path = worktree(checkout) / WORKER
    head, _, rest = path.read_text().partition("<<<<<<< ")
    path.write_text(
        head + "    return work1(x)\n" + rest.partition(">>>>>>> ")[2].partition("\n")[2]
    )


def test_a_release_on_which_all_applies_adds_no_file(checkout: Checkout) -> None:
    release(checkout, "0.20.3", STAYS)
    said = rebase(checkout, "0.20.3")
    assert "proven and in place: 2 fixes carried by the tool" in said
    assert report(checkout, "0.20.3") == {"1": "carried with offsets", "2": "carried with offsets"}
    assert files(checkout) == {
        "1-a-name/0.20.2.patch": ("0.20.2", "0.20.3"),
        "2-a-name/0.20.2.patch": ("0.20.2", "0.20.3"),
    }
    assert releases(checkout) == ["0.20.2", "0.20.3"]
    assert not (checkout.folder / ".work" / "rebase").exists()
    (hunk,) = read_patch(checkout.patches / "2-a-name" / "0.20.2.patch").files[WORKER]
    assert hunk.old[-4].startswith("    return x + 9")
    assert checkout.run("edit", "--restamp").returncode == 0
    assert "vllm-0.20.2" not in said


def test_what_upstream_has_by_proof_is_left_behind(checkout: Checkout) -> None:
    release(checkout, "0.21.0", FIXED)
    said = rebase(checkout, "0.21.0")
    assert report(checkout, "0.21.0") == {"1": "already upstream", "2": "carried"}
    assert files(checkout) == {
        "1-a-name/0.20.2.patch": ("0.20.2",),
        "2-a-name/0.20.2.patch": ("0.20.2", "0.21.0"),
    }
    fixes = {fix["id"]: fix for fix in read_toml(checkout.patches / "fixes.toml")["fix"]}
    assert (fixes["1"]["applies-to"], fixes["1"]["fixed-in"]) == (">=0.20.0,<0.21.0", "0.21.0")
    assert (fixes["2"]["applies-to"], fixes["2"]["fixed-in"]) == (">=0.20.0", "")
    proof = json.loads((checkout.folder / "reports" / "regressions-0.21.0.json").read_text())
    assert proof["fixes"]["1"]["affected"] is False
    matrix = (checkout.folder / "README.md").read_text()
    assert "| without 1 | 0.20.2 | - |" in matrix
    assert "| without 2 | all | - |" in matrix
    assert "1 upstream" in said


def test_a_conflict_is_shown_resolved_and_proven(checkout: Checkout) -> None:
    release(checkout, "0.21.0", COLLIDES)
    before = contents(checkout)
    said = rebase(checkout, "0.21.0", code=31)
    assert "fix 2 on vLLM 0.21.0: conflict" in said
    for word in ("work9", "return 9 + x", "--continue", "--skip", "--abort"):
        assert word in said
    text = (worktree(checkout) / WORKER).read_text()
    assert "<<<<<<< vLLM 0.21.0\n    return 9 + x\n|||||||" in text
    assert "=======\n    return work1(x)\n>>>>>>> 2-a-name/0.20.2.patch\n" in text
    assert "return work1(x)" in git(worktree(checkout), "show", "0.20.2/2")
    assert contents(checkout) == before

    assert "has a marker" in rebase(checkout, "--continue", code=2)
    path = worktree(checkout) / WORKER
    path.write_text("def broken(:\n")
    assert "no Python" in rebase(checkout, "--continue", code=2)
    git(worktree(checkout), "checkout", "HEAD", "--", WORKER)
    assert "would be empty" in rebase(checkout, "--continue", code=2)
    assert "not finished" in rebase(checkout, "0.21.0", code=2)
    assert contents(checkout) == before

    path.write_text(
        toys.changed(
            WORKER,
            ("    return x + 2\n", "    return work1(x)\n"),
            ("    return x + 9\n", "    return work1(x)\n"),
        )
    )
    assert "1 by hand" in rebase(checkout, "--continue")
    assert report(checkout, "0.21.0") == {"1": "carried", "2": "carried by hand"}
    (hunk,) = read_patch(checkout.patches / "2-a-name" / "0.21.0.patch").files[WORKER]
    assert "    return 9 + x\n" in hunk.old


def test_what_is_not_proven_does_not_land(checkout: Checkout) -> None:
    release(checkout, "0.21.0", COLLIDES)
    before = contents(checkout)
    rebase(checkout, "0.21.0", code=31)
    path = worktree(checkout) / WORKER
    resolve(checkout)
    change(path, "def work9(x):\n    return work1(x)\n", "def work9(x):\n    return work3(x)\n")
    said = rebase(checkout, "--continue", code=30)
    assert "test_2.py::test failed, expected passed" in said
    assert "nothing was changed" in said
    assert contents(checkout) == before
    # The person amends the commit, as the message says, and goes on.
    change(path, "def work9(x):\n    return work3(x)\n", "def work9(x):\n    return work1(x)\n")
    said = rebase(checkout, "--continue", code=2)
    assert f"changes that are in no commit: M {WORKER}" in said
    git(worktree(checkout), "commit", "--quiet", "--all", "--amend", "--no-edit")
    assert "1 by hand" in rebase(checkout, "--continue")
    assert files(checkout) == BOTH


def test_a_fix_that_is_left_out_while_it_is_open_does_not_land(checkout: Checkout) -> None:
    release(checkout, "0.21.0", COLLIDES)
    before = contents(checkout)
    rebase(checkout, "0.21.0", code=31)
    said = rebase(checkout, "--skip", code=30)
    assert "fix 2 applies to 0.21.0 and has no patch" in said
    assert contents(checkout) == before
    assert "none to leave out" in rebase(checkout, "--skip", code=2)
    rebase(checkout, "--abort")
    assert contents(checkout) == before
    assert not (checkout.folder / ".work" / "rebase").exists()
    assert "no rebase to go on with" in rebase(checkout, "--continue", code=2)


def test_a_fix_that_is_left_out_on_purpose_lands(checkout: Checkout) -> None:
    release(checkout, "0.21.0", COLLIDES)
    rebase(checkout, "0.21.0", code=31)
    rebase(checkout, "--skip", code=30)
    why = Unpatched("==0.21.0", "nobody runs it")
    fixes = REGISTRY.fixes | {"2": replace(REGISTRY.fixes["2"], unpatched=(why,))}
    registry = toys.registry(*fixes.values())
    (checkout.patches / "fixes.toml").write_text(registry_text(registry), encoding="utf-8")
    assert checkout.run("edit", "--restamp").returncode == 0
    assert "1 left out" in rebase(checkout, "--continue")
    assert files(checkout) == {
        "1-a-name/0.20.2.patch": ("0.20.2", "0.21.0"),
        "2-a-name/0.20.2.patch": ("0.20.2",),
    }
    assert releases(checkout) == ["0.20.2", "0.21.0"]


def test_a_defect_that_the_line_has_no_patch_for_is_named(checkout: Checkout) -> None:
    release(checkout, "0.21.0", STAYS)
    new = toys.registry(*REGISTRY.fixes.values(), toys.fix("3", applies_to=">=0.21.0"))
    (checkout.patches / "fixes.toml").write_text(registry_text(new), encoding="utf-8")
    path = checkout.folder / "tests/regressions/test_1.py"
    path.with_name("test_3.py").write_text(path.read_text().replace("work2", "work4"))
    change(checkout.folder / "CHANGELOG.md", "- 2: that", "- 2: that\n- 3: more")
    assert checkout.run("edit", "--restamp").returncode == 0
    said = rebase(checkout, "0.21.0", code=30)
    assert "no patch to carry" in said
    assert "fix 3 applies to 0.21.0 and has no patch" in said
    assert releases(checkout) == ["0.20.2"]


def test_what_the_simulation_finds_on_patched_alone_does_not_land(checkout: Checkout) -> None:
    release(checkout, "0.21.0", STAYS)
    found = 'found = "P keeps blocks" if worker.work9(1) == 2 else None'
    change(checkout.folder / SIMULATION, "found = None", found)
    before = contents(checkout)
    said = rebase(checkout, "0.21.0", code=30)
    assert "P keeps blocks" in said
    assert "it goes wrong" in said
    assert "simulate failed on what was carried" in said
    assert contents(checkout) == before


def moved_to(checkout: Checkout, *paths: str) -> None:
    """Make 0.21.0 a release whose worker is elsewhere; the tests follow it to the first path."""
    files = {**toys.FILES, **dict.fromkeys(paths, toys.FILES[WORKER])}
    del files[WORKER]
    release(checkout, "0.21.0", {**files, "vllm/core/__init__.py": ""})
    name = paths[0].removesuffix(".py").replace("/", ".")
    for test in ("test_1.py", "test_2.py"):
        change(checkout.folder / "tests/regressions" / test, "vllm.worker", name)


def test_a_file_that_may_be_either_of_two_is_said_to_be_gone(checkout: Checkout) -> None:
    moved_to(checkout, "vllm/core/worker.py", "vllm/core/other.py")
    said = rebase(checkout, "0.21.0", "--dry-run")
    assert said.count("target gone") == 2
    said = "".join(rebase(checkout, "0.21.0", code=31).replace("│", "").split())
    assert "fix1onvLLM0.21.0:targetgone" in said
    assert "thereisnovllm/worker.py" in said
    assert "vllm/core/worker.py,work2(100%ofitslines)" in said


def test_a_file_that_has_moved_is_followed(checkout: Checkout) -> None:
    moved_to(checkout, "vllm/core/worker.py")
    said = rebase(checkout, "0.21.0", "--dry-run")
    assert said.count("carried by merging") == 2
    assert "the module is vllm/core/worker.py now" in " ".join(said.replace("│", " ").split())


def test_a_dry_run_leaves_nothing(checkout: Checkout) -> None:
    release(checkout, "0.21.0", COLLIDES)
    before = contents(checkout)
    said = rebase(checkout, "0.21.0", "--dry-run")
    assert "conflict" in said
    assert contents(checkout) == before
    assert not (checkout.folder / ".work" / "rebase").exists()


def test_a_rebase_that_is_over_is_none_though_its_folder_is_left(checkout: Checkout) -> None:
    """A kill while the folder goes away: what is gone of it by then is nothing to land."""
    release(checkout, "0.21.0", STAYS)
    path = checkout.folder / "scripts" / "carry" / "state.py"
    before = "    shutil.rmtree(WORK, ignore_errors=True)\n"
    change(path, before, "    __import__('os').kill(__import__('os').getpid(), 9)\n")
    assert checkout.run("rebase", "0.21.0", timeout=600).returncode == -9
    assert releases(checkout) == ["0.20.2", "0.21.0"]
    assert "no rebase to go on with" in rebase(checkout, "--continue", code=2)


def test_a_damaged_state_is_said_to_be_one(checkout: Checkout) -> None:
    state = checkout.folder / ".work" / "rebase" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"release": "0.2')
    said = rebase(checkout, "--continue", code=2)
    assert "state.json is no JSON" in said
    assert "--abort" in said
    rebase(checkout, "--abort")
    assert not state.parent.exists()


@pytest.mark.parametrize(
    ("tool", "after"),
    [
        ("carry/rebase", "            _commit(repository, fix.id, texts)\n"),
        ("carry/rebase", "        state.results.append(result)\n        state.save()\n"),
        ("carry/landing", '    _run("lint")\n'),
        ("carry/landing", "            replace_text(ROOT / name, _read(path))\n"),
    ],
)
def test_a_kill_at_any_step_loses_nothing(checkout: Checkout, tool: str, after: str) -> None:
    release(checkout, "0.21.0", FIXED)
    path = checkout.folder / "scripts" / f"{tool}.py"
    whole = path.read_text()
    indent = after[: len(after) - len(after.lstrip())]
    change(path, after, f"{after}{indent}__import__('os').kill(__import__('os').getpid(), 9)\n")
    before = contents(checkout)
    assert checkout.run("rebase", "0.21.0", timeout=600).returncode == -9
    if "ROOT" not in after:
        assert contents(checkout) == before
    path.write_text(whole)
    assert "proven and in place" in rebase(checkout, "--continue")
    assert files(checkout)["2-a-name/0.20.2.patch"] == ("0.20.2", "0.21.0")
    assert report(checkout, "0.21.0") == {"1": "already upstream", "2": "carried"}
    assert releases(checkout) == ["0.20.2", "0.21.0"]


def test_a_clone_with_branches_and_merges_gives_the_same_patches(
    checkout: Checkout, tmp_path: Path
) -> None:
    release(checkout, "0.21.0", COLLIDES)
    clone = tmp_path / "vllm"
    commit(clone, toys.FILES, "all")
    git(clone, "switch", "--quiet", "--create", "releases/v0.20")
    commit(clone, {"NEWS": "of the release\n"}, "Prepare the release")
    git(clone, "tag", "v0.20.2")
    git(clone, "switch", "--quiet", "main")
    git(clone, "switch", "--quiet", "--create", "topic")
    commit(clone, {WORKER: COLLIDES[WORKER]}, "[Bugfix] Work nine (#2)")
    git(clone, "switch", "--quiet", "main")
    commit(clone, {"NEWS": "of the branch\n"}, "News (#23)")
    git(clone, "merge", "--quiet", "--no-ff", "-m", "Merge", "topic")
    git(clone, "tag", "--annotate", "-m", "a release", "v0.21.0")
    commit(clone, {WORKER: "later\n"}, "Later (#1)")
    said = rebase(checkout, "0.21.0", "--upstream", str(clone), "--dry-run")
    assert "Work nine (#2)" in said
    assert "News" not in said
    assert "Later" not in said
    rebase(checkout, "0.21.0", "--upstream", str(clone), code=31)
    resolve(checkout)
    rebase(checkout, "--continue")
    from_clone = contents(checkout)

    other = Checkout(tmp_path / "again", checkout.cache)
    shutil.copytree(checkout.folder, other.folder, symlinks=True)
    (other.patches / "2-a-name" / "0.21.0.patch").unlink()
    change(other.folder / "pyproject.toml", ', "0.21.0"', "")
    rebase(other, "0.21.0", code=31)
    resolve(other)
    rebase(other, "--continue")
    patches = {n: data for n, data in contents(other).items() if n.startswith("patches/")}
    assert patches == {n: data for n, data in from_clone.items() if n.startswith("patches/")}


@pytest.mark.parametrize(
    ("trailers", "names"),
    [
        ("Fix: 1\n", ["1"]),
        ("Fix: 1\r\n", ["1"]),
        ("Fix: 1\u2028x\n", ["1\u2028x"]),
        ("Fix: 1\n  more\n", ["1 more"]),
        ("Fix: 1\nFix: 2\n", ["1 2"]),
        ("Fix:\n", []),
        ("\x85\x1c\x0b\n", []),
    ],
)
def test_a_message_that_a_person_wrote_is_read_whatever_it_holds(
    tmp_path: Path, trailers: str, names: list[str]
) -> None:
    commit(tmp_path, {"a.py": "a\n"}, "before")
    last = commit(tmp_path, {"a.py": "b\n"}, f"a subject\n\nA \x0c text\x85.\n\n{trailers}")
    found = commits_by_fix(Repository(tmp_path))
    assert list(found) == names
    assert set(found.values()) <= {last}
