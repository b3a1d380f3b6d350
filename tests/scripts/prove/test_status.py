"""`nox -s status`: what a cell says, from runs on record and from the texts of releases."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.commands.status import unexpected
from scripts.patchset.registry import load_registry
from scripts.prove.status import Cell, State
from tests.scripts import checkouts, toys
from tests.scripts.checkouts import Checkout, sdist_bytes, wheel_bytes, wheel_name
from tests.scripts.commands.test_apply import said_no
from tests.scripts.repos import git

TEST = "tests/regressions/test_1.py"
PATCH = "patches/2-a-name/0.20.2.patch"
HOOK = f"{toys.HOOK.replace('.', '/')}.py"
PASSED = {"result": "passed"}
FAILED = {"result": "failed", "place": f"{TEST}:5", "message": "AssertionError: 1 == 2"}
RAISED = {"result": "failed", "place": "vllm/worker.py:5", "message": "AttributeError: moved"}
ERROR = {"result": "error", "place": f"{TEST}:1", "message": "ImportError: moved"}

MORE = f"""\
diff --git a/{toys.STATE} b/{toys.STATE}
--- a/{toys.STATE}
+++ b/{toys.STATE}
@@ -1 +1,2 @@
 \"\"\"State.\"\"\"
+import os
"""
STATES = {"0.19.1": "open", "0.20.2": "patched"}
"""Of fix 1 on the releases that have its defect."""

OTHER = {**toys.FILES, toys.WORKER: "nothing\n"}  # no hook of a toy fits


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return the tools with a series for 0.20.2, and a release before and one after it."""
    checkout = checkouts.small(tmp_path_factory.mktemp("made"))
    texts = {"0.19.1": toys.FILES, "0.20.2": toys.FILES, "0.22.0": OTHER}
    checkout.lock(
        {
            release: {
                f"vllm-{release}.tar.gz": sdist_bytes(files, release),
                wheel_name(release): wheel_bytes(files, version=release),
            }
            for release, files in texts.items()
        }
    )
    return checkout


@pytest.fixture
def checkout(made: Checkout, tmp_path: Path) -> Checkout:
    folder = shutil.copytree(made.folder, tmp_path / "kvfix")
    (folder / "tests" / "regressions").mkdir(parents=True)
    (folder / TEST).write_text("from tests.helper import it\n\nother = it\n")
    (folder / "tests" / "helper.py").write_text("it = 1\n")
    (folder / "tests" / "other.py").write_text("it = 1\n")
    (folder / "tests" / "programs").mkdir()
    (folder / "tests" / "programs" / "forks.py").write_text("it = 1\n")
    return Checkout(folder, made.cache)


def record(checkout: Checkout, release: str, side: str, *outcomes: dict[str, str]) -> None:
    """Put a run of the tests of fix 1 on record, as a session does."""
    nodes = {f"{TEST}::test_{number}": one for number, one in enumerate(outcomes)}
    code = (
        "import json, sys\n"
        "from scripts.patchset.registry import load_registry\n"
        "from scripts.prove.key import inputs\n"
        "from scripts.prove.record import record\n"
        "from scripts.prove.outcomes import Outcome\n"
        "nodes = {k: Outcome(**v) for k, v in json.loads(sys.argv[3]).items()}\n"
        "fix, release, side = load_registry().fixes['1'], sys.argv[1], sys.argv[2]\n"
        "record(release, side, [(fix, inputs(fix, release, side))], nodes)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, release, side, json.dumps(nodes)],
        cwd=checkout.folder,
        env=checkout.environment(),
        check=True,
    )


def status(checkout: Checkout, *words: str) -> dict[str, dict[str, Any]]:
    """Run the session; return the cells of fix 1 by release."""
    done = checkout.run("status", *words)
    assert done.returncode == 0, done.stderr
    report = json.loads((checkout.folder / "reports" / "status.json").read_text())
    return {release: row["1"] for release, row in report.items()}


def states(checkout: Checkout) -> list[str]:
    cells = status(checkout).values()
    return [cell["state"] + ("" if cell["proven"] else "?") for cell in cells]


class TestHint:
    def test_is_what_the_texts_say_and_never_a_proof(self, checkout: Checkout) -> None:
        cells = status(checkout)
        assert [cell["proven"] for cell in cells.values()] == [False] * 3
        assert cells["0.19.1"]["state"] == "open"  # the patch above it finds all its lines
        assert cells["0.20.2"]["state"] == "patched"
        assert cells["0.22.0"]["state"] == "upstream since"  # as the registry says
        assert "does not apply" in cells["0.22.0"]["why"][0]
        assert "<=0.20.2 only" in cells["0.22.0"]["why"][1]

    def test_is_none_where_the_text_has_changed(self, checkout: Checkout) -> None:
        path = checkout.patches / "fixes.toml"
        path.write_text(path.read_text().replace('"<=0.20.2"', '"<=0.22.0"'))
        assert states(checkout) == ["open?", "patched?", "unproven?"]

    def test_is_none_where_text_and_registry_disagree(self, checkout: Checkout) -> None:
        path = checkout.patches / "fixes.toml"
        path.write_text(path.read_text().replace('"<=0.20.2"', '"==0.20.2"'))
        assert states(checkout) == ["unproven?", "patched?", "upstream since?"]

    def test_is_taken_from_the_last_run_where_nothing_has_changed(self, checkout: Checkout) -> None:
        first = status(checkout)
        elsewhere = Checkout(checkout.folder, checkout.folder / "empty")  # where no sdist lies
        assert status(elsewhere) == first
        path = checkout.patches / "1-a-name" / "0.20.2.patch"
        path.write_text(path.read_text().replace("work1", "work3"))
        result = elsewhere.run("status")
        assert result.returncode == 19, result.stdout  # now it would have to read them

    def test_is_made_anew_where_the_report_is_not_readable(self, checkout: Checkout) -> None:
        first = status(checkout)
        for spoilt in ("", "[]", '{"0.20.2": {"1": {"state": "lost"}}}'):
            (checkout.folder / "reports" / "status.json").write_text(spoilt)
            assert status(checkout) == first


class TestProof:
    def test_of_all_sides(self, checkout: Checkout) -> None:
        record(checkout, "0.19.1", "stock", FAILED, FAILED)
        record(checkout, "0.20.2", "stock", FAILED, RAISED)
        record(checkout, "0.20.2", "patched", PASSED, PASSED)
        record(checkout, "0.22.0", "stock", PASSED)
        assert states(checkout) == ["open", "patched", "upstream since"]
        cell = status(checkout)["0.20.2"]
        assert cell["why"] == [
            f"On the stock release 2 of 2 tests fail; one at {TEST}:5: AssertionError: 1 == 2",
            "On the patched release all 2 tests pass.",
        ]
        assert cell["command"] == "nox -s status -- --prove 0.20.2"

    @pytest.mark.parametrize("release", ["0.19.1", "0.20.2"])
    def test_is_none_where_a_test_passes_on_stock_that_is_not_spared(
        self, checkout: Checkout, release: str
    ) -> None:
        record(checkout, release, "stock", FAILED, PASSED)
        record(checkout, "0.20.2", "patched", PASSED, PASSED)
        cell = status(checkout)[release]
        assert (cell["state"], cell["proven"]) == (STATES[release], False)
        assert cell["why"][-1].endswith(f"{TEST}::test_1 passed, expected failed")

    @pytest.mark.parametrize("release", ["0.19.1", "0.20.2"])
    @pytest.mark.parametrize(("outcome", "proven"), [(PASSED, True), (FAILED, False)])
    def test_needs_what_is_spared_to_pass_on_stock(
        self, checkout: Checkout, release: str, outcome: dict[str, str], proven: bool
    ) -> None:
        registry = checkout.patches / "fixes.toml"
        row = f'[{{releases = "<=0.20.2", tests = ["{TEST}::test_1"], reason = "it has it"}}]'
        registry.write_text(registry.read_text().replace("spared = []", f"spared = {row}", 1))
        record(checkout, release, "stock", FAILED, outcome)
        record(checkout, "0.20.2", "patched", PASSED, PASSED)
        cell = status(checkout)[release]
        assert (cell["state"], cell["proven"]) == (STATES[release], proven)
        assert ("::test_1 failed, expected passed" in cell["why"][-1]) is not proven

    def test_that_no_release_before_has_it(self, checkout: Checkout) -> None:
        record(checkout, "0.19.1", "stock", PASSED)
        assert states(checkout)[0] == "not affected"

    @pytest.mark.parametrize("outcomes", [[RAISED], [ERROR], [PASSED, ERROR], [FAILED, ERROR], []])
    def test_needs_a_test_that_ran_and_saw_something(
        self, checkout: Checkout, outcomes: list[dict[str, str]]
    ) -> None:
        record(checkout, "0.22.0", "stock", *outcomes)
        cell = status(checkout)["0.22.0"]
        assert (cell["state"], cell["proven"]) == ("unproven", False)

    def test_of_a_release_without_a_patch_on_purpose_says_why(self, checkout: Checkout) -> None:
        registry = checkout.patches / "fixes.toml"
        head, _, rest = registry.read_text().partition("unpatched = []")
        why = 'unpatched = [{releases = "==0.20.2", reason = "nobody runs it"}]'
        registry.write_text(head + why + rest)
        said = "It has no patch there on purpose: nobody runs it."
        hint = status(checkout)["0.20.2"]
        assert (hint["state"], hint["proven"], hint["why"][-1]) == ("open", False, said)
        record(checkout, "0.20.2", "stock", FAILED)
        cell = status(checkout)["0.20.2"]
        assert (cell["state"], cell["proven"], cell["why"][-1]) == ("open", True, said)

    def test_of_a_release_where_another_patch_closes_it_is_patched(
        self, checkout: Checkout
    ) -> None:
        registry = checkout.patches / "fixes.toml"
        row = '[{releases = "==0.20.2", reason = "the same blocks", closed-by = "1"}]'
        head, first, rest = registry.read_text().partition('id = "2"')
        registry.write_text(head + first + rest.replace("unpatched = []", f"unpatched = {row}"))
        (checkout.folder / PATCH).unlink()
        status(checkout)
        report = json.loads((checkout.folder / "reports" / "status.json").read_text())
        assert report["0.20.2"]["2"]["state"] == "patched"

    def test_of_stock_alone_leaves_a_patched_cell_unproven(self, checkout: Checkout) -> None:
        record(checkout, "0.20.2", "stock", FAILED)
        assert states(checkout)[1] == "patched?"

    @pytest.mark.parametrize("patched", [FAILED, ERROR])
    def test_that_fails_on_the_patched_release_is_none(
        self, checkout: Checkout, patched: dict[str, str]
    ) -> None:
        record(checkout, "0.20.2", "stock", FAILED)
        record(checkout, "0.20.2", "patched", patched)
        assert states(checkout)[1] == "unproven?"

    @pytest.mark.parametrize(
        ("path", "change", "stale"),
        [
            (TEST, ("= it", "= it + 1"), {"0.19.1", "0.20.2"}),
            (TEST, ("= it", "= (it)  # as it is"), set()),
            ("tests/helper.py", ("it = 1", "it = 2"), {"0.19.1", "0.20.2"}),
            ("tests/helper.py", ("it = 1", '"""What it is."""\nit = 1\nthat = 2'), set()),
            ("tests/other.py", ("1", "2"), set()),
            ("pyproject.toml", ("timeout = 300", "timeout = 3"), {"0.19.1", "0.20.2"}),
            ("pyproject.toml", ("nixl==1.0.1", "nixl==1.0.0"), {"0.19.1", "0.20.2"}),
            ("scripts/prove/pytest.py", ("--tb=line", "--tb=no"), {"0.19.1", "0.20.2"}),
            ("scripts/prove/environment.py", ("_BUILD", "_CODE"), {"0.19.1", "0.20.2"}),
            ("tests/programs/forks.py", ("1", "2"), {"0.19.1", "0.20.2"}),
            (HOOK, ("def ", "# Later.\ndef "), set()),
            (HOOK, ("def ", "LATER = 1\n\n\ndef "), {"0.20.2"}),
            (PATCH, ("+    return work1", "+    return work2"), {"0.20.2"}),
            (PATCH, ("return work1(x)", "return work1( x )"), set()),
        ],
    )
    def test_goes_stale_with_what_can_change_an_outcome(
        self, checkout: Checkout, path: str, change: tuple[str, str], stale: set[str]
    ) -> None:
        record(checkout, "0.19.1", "stock", FAILED)
        record(checkout, "0.20.2", "stock", FAILED)
        record(checkout, "0.20.2", "patched", PASSED)
        assert states(checkout) == ["open", "patched", "upstream since?"]
        file = checkout.folder / path
        assert change[0] in file.read_text()
        file.write_text(file.read_text().replace(*change, 1))
        cells = status(checkout)
        assert {r for r in ("0.19.1", "0.20.2") if not cells[r]["proven"]} == stale
        assert [cells[r]["state"] for r in ("0.19.1", "0.20.2")] == ["open", "patched"]

    def test_is_written_in_the_same_bytes_for_the_same_run(self, checkout: Checkout) -> None:
        path = checkout.folder / "records" / "proofs" / "0.20.2.json"
        written = set()
        for number in ("85b4a45a3c05", "0c95d7d3ab41"):
            said = f"AssertionError: assert '{number}' == 'x' in /tmp/{number}/y"
            record(checkout, "0.20.2", "stock", {**FAILED, "message": said})
            written.add(path.read_bytes())
        assert len(written) == 1

    def test_keeps_what_is_on_record_of_others(self, checkout: Checkout) -> None:
        record(checkout, "0.20.2", "stock", FAILED)
        record(checkout, "0.20.2", "patched", PASSED)
        record(checkout, "0.20.2", "stock", FAILED)
        assert states(checkout)[1] == "patched"


@pytest.mark.parametrize(
    ("fix", "seen"),
    [
        ("K20", State.PATCHED),
        ("43433", State.UPSTREAM),  # up to 0.21.0
        ("43433", State.NOT_AFFECTED),
    ],
)
def test_what_runs_show_that_the_registry_denies_is_told(fix: str, seen: State) -> None:
    told = {
        (state, proven)
        for state in State
        for proven in (True, False)
        if said_of(fix, Cell(state, proven, ("Seen.",), command="", runs=True, inputs=""))
    }
    right = {State.UPSTREAM, State.NOT_AFFECTED} if fix == "43433" else {State.PATCHED}
    # Unproven though both sides ran: some tests pass on stock.
    assert told == {(state, proven) for state in State for proven in (True, False)} - {
        (state, True) for state in right
    }
    assert (seen, True) not in told


def test_of_what_has_not_run_nothing_is_told() -> None:
    for state in State:
        assert not said_of("K20", Cell(state, False, ("Seen.",), "", runs=False, inputs=""))


def said_of(fix: str, cell: Cell) -> list[str]:
    lines = [*unexpected("0.33.0", {fix: cell}, load_registry())]
    assert lines in ([], [f"0.33.0: {fix}: Seen."])
    return lines


def test_a_release_that_is_not_pinned_is_refused(checkout: Checkout) -> None:
    said_no(checkout.run("status", "--prove", "0.23.0"), 10, "0.22.0", "nox -s lock -- 0.23.0")


def test_a_run_changes_no_byte_where_nothing_has_changed(checkout: Checkout) -> None:
    record(checkout, "0.20.2", "stock", FAILED)
    status(checkout)
    names = ("docs/status.md", "reports/status.html", "reports/status.json")
    before = [(checkout.folder / name).read_bytes() for name in names]
    status(checkout)
    assert [(checkout.folder / name).read_bytes() for name in names] == before


def test_a_history_gives_records_for_scanners(checkout: Checkout) -> None:
    record(checkout, "0.20.2", "stock", FAILED)
    status(checkout)
    git(checkout.folder, "init", "-q")
    git(checkout.folder, "add", "patches", "records")
    git(checkout.folder, "commit", "-q", "-m", "x")
    reports = checkout.folder / "reports"
    assert not (reports / "osv").exists()
    strays = [reports / "osv" / "KVFIX-9.json", reports / "openvex.json"]  # no fix is of security
    strays[0].parent.mkdir()
    for stray in strays:
        stray.write_text("{}")
    status(checkout)
    assert not any(stray.exists() for stray in strays)
    names = ("reports/osv/KVFIX-1.json",)
    before = [(checkout.folder / name).read_bytes() for name in names]
    assert json.loads(before[0])["affected"][0]["versions"] == having(checkout)
    status(checkout)
    assert [(checkout.folder / name).read_bytes() for name in names] == before


def having(checkout: Checkout) -> list[str]:
    """Return the releases of which the report says that they have the defect of fix 1."""
    report = json.loads((checkout.folder / "reports" / "status.json").read_text())
    return [release for release, row in report.items() if row["1"]["state"] in ("open", "patched")]
