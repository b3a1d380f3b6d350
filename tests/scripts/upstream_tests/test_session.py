from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from scripts.project import ROOT
from scripts.upstream.lock import load_lock
from tests.scripts import upstream_toys
from tests.scripts.upstream_toys import UNIT, tree

CONFIG = f"{UNIT}/test_config.py"
STOCK_ONLY = next(name for name in load_lock() if name != upstream_toys.RELEASE)
"""A release that the toys carry no fixes to."""


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.scripts.upstream_toys", str(folder), *arguments]


def run(folder: Path, *arguments: str, limit: str = "3") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *arguments),
        cwd=ROOT,
        env={**os.environ, "TOY_LIMIT": limit},
        capture_output=True,
        text=True,
        timeout=280,
    )


def report(folder: Path, part: str = "reports", release: str = "0.20.2") -> dict[str, Any]:
    text = (folder / part / f"upstream-tests-{release}.json").read_text()
    document: dict[str, Any] = json.loads(text)
    return document


def changes(document: dict[str, Any]) -> dict[str, str]:
    return {test.rpartition("::")[2]: note["change"] for test, note in document["notable"].items()}


def test_both_sides_are_compared_by_test(tmp_path: Path) -> None:
    tree(tmp_path, config=upstream_toys.CONFIG)
    result = run(tmp_path)
    assert result.returncode == 30, result.stderr
    document = report(tmp_path)
    assert changes(document) == {
        "test_breaks": "newly failing",
        "test_mended": "newly passing",
        "test_named[1]": "newly failing",
        "test_wants_gpu": "failing in both",
        "test_appears[1]": "appeared",
        "test_vanishes[1]": "vanished",
    }
    named = document["notable"][f"{CONFIG}::test_named[1]"]
    assert named["named"] == "39907: it expects the defect"
    assert document["failing"] == {"GPU driver": 1}
    assert document["counts"]["still passing"] == 4
    assert document["counts"]["newly failing as fixes.toml says"] == 1
    assert document["skipped"] == {f"{CONFIG}::test_skipped": "Skipped: never"}
    assert document["wheels"]["stock"]["version"] == "0.20.2"
    assert document["wheels"]["patched"]["version"] == "0.20.2+kvfix.0.1.0"
    assert document["faults"] == [
        f"{CONFIG}::test_breaks passes on stock and fails on patched",
        f"{CONFIG}::test_vanishes[1] runs on stock and does not run on patched",
    ]
    assert result.stderr.count("✗") == 2
    assert "test_mended.py, run 3" not in result.stderr  # it was, in test_config.py:
    assert "test_config.py::test_mended, run 3" in result.stderr
    later = document["forward"]
    assert [(one["stock"], one["patched"]) for one in later.values()] == [
        ("failed", "passed"),
        ("passed", "passed"),
    ]
    for side, failures in (("stock", 3), ("patched", 3)):
        xml = ElementTree.parse(  # noqa: S314
            tmp_path / "reports" / f"upstream-tests-0.20.2-{side}.xml"
        )
        suite = xml.find("testsuite")
        assert suite is not None
        assert int(suite.attrib["failures"]) == failures == len(suite.findall("testcase/failure"))
        assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
    assert "| newly failing | 2 |" in (tmp_path / "reports/upstream-tests-0.20.2.md").read_text()
    for text in (json.dumps(document), result.stdout.replace("wrote", "")):
        assert str(tmp_path / "work") not in text


def test_a_named_test_that_does_not_fail_is_a_fault(tmp_path: Path) -> None:
    tree(tmp_path, config="def test_named():\n    pass\n")
    result = run(tmp_path)
    assert result.returncode == 30, result.stderr
    (fault,) = report(tmp_path)["faults"]
    assert "test_named is named in fixes.toml as failing, and does not fail" in fault
    tree(tmp_path, config="def test_other():\n    pass\n")
    assert run(tmp_path).returncode == 30
    (fault,) = report(tmp_path)["faults"]
    assert "test_named is named in fixes.toml and did not run" in fault


def test_a_file_that_fails_everywhere_proves_nothing(tmp_path: Path) -> None:
    tree(tmp_path, config="import no_such_package\n")
    result = run(tmp_path, STOCK_ONLY)
    assert result.returncode == 30, result.stderr
    (fault,) = report(tmp_path, release=STOCK_ONLY)["faults"]
    assert f"no test of {CONFIG} passes on stock: " in fault
    assert "No module named 'no_such_package'" in fault


def test_a_difference_counts_when_it_is_seen_again(tmp_path: Path) -> None:
    tree(tmp_path, flaky=upstream_toys.FLAKY)
    result = run(tmp_path, "0.20.2", UNIT)
    assert result.returncode == 30, result.stderr
    document = report(tmp_path, "work/0.20.2")
    assert changes(document) == {
        "test_fails_once_on_patched": "flaky",
        "test_fails_once_on_stock": "flaky",
        "test_fails_in_company_on_patched": "newly failing",
    }
    assert len(document["faults"]) == 1


def test_a_crash_costs_the_test_in_which_it_happens(tmp_path: Path) -> None:
    tree(tmp_path, crash=upstream_toys.CRASH)
    result = run(tmp_path, STOCK_ONLY, UNIT)
    assert result.returncode == 0, result.stderr
    document = report(tmp_path, f"work/{STOCK_ONLY}", STOCK_ONLY)
    assert list(document["wheels"]) == ["stock"]
    assert document["counts"] == {"failed": 2, "passed": 3}
    said = {test.rpartition("::")[2]: one["said"] for test, one in document["notable"].items()}
    assert said == {
        "test_exits": "the interpreter ended with 3 in this test",
        "test_is_killed": "the interpreter died of SIGSEGV in this test",
    }


def test_a_file_that_kills_the_interpreter_costs_that_file(tmp_path: Path) -> None:
    good = "def test_good():\n    pass\n"
    tree(tmp_path, after=good, deadly=upstream_toys.DEADLY, before=good)
    result = run(tmp_path, STOCK_ONLY, UNIT)
    assert result.returncode == 0, result.stderr
    assert "test_after.py and 2 more: 1 error, 2 passed" in result.stderr  # in one process
    (note,) = report(tmp_path, f"work/{STOCK_ONLY}", STOCK_ONLY)["notable"].values()
    assert note["said"] == "the interpreter ended with 7 outside of any test"


def test_a_hang_is_cut_at_its_limit(tmp_path: Path) -> None:
    tree(tmp_path, hang=upstream_toys.HANG, later="def test_runs():\n    pass\n")
    result = run(tmp_path, STOCK_ONLY, UNIT)
    assert result.returncode == 0, result.stderr
    document = report(tmp_path, f"work/{STOCK_ONLY}", STOCK_ONLY)
    assert document["counts"] == {"failed": 2, "passed": 3}
    assert document["failing"] == {"hang": 2}


def test_what_was_done_survives_an_interrupt(tmp_path: Path) -> None:
    quick = "def test_quick():\n    pass\n" + 120 * "#"  # too long to share a process
    tree(tmp_path, quick=quick, slow=upstream_toys.SLOW)
    with subprocess.Popen(
        command(tmp_path, STOCK_ONLY, UNIT),
        cwd=ROOT,
        env={**os.environ, "TOY_LIMIT": "250"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = ""
        while "test_quick.py" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        second = run(tmp_path, STOCK_ONLY, UNIT)
        assert second.returncode == 2, second.stderr
        assert f"another nox -s upstream_tests runs on {STOCK_ONLY}" in second.stderr
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        said += process.stderr.read()
    assert process.returncode == 130, said
    assert time.monotonic() - began < 3
    assert "--resume" in said
    assert not _alive(tmp_path)
    tree(tmp_path, slow="def test_slow():\n    pass\n")
    result = run(tmp_path, STOCK_ONLY, UNIT, "--resume", limit="250")
    assert result.returncode == 0, result.stderr
    assert "1 jobs were done before" in result.stderr
    assert "test_quick" not in result.stderr
    assert report(tmp_path, f"work/{STOCK_ONLY}", STOCK_ONLY)["counts"] == {"passed": 2}
    assert "test_quick" in run(tmp_path, STOCK_ONLY, UNIT).stderr  # without it, all is run


def _alive(folder: Path) -> list[str]:
    """Return the command lines of the processes that have to do with `folder`."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in line and path.parent.name != str(os.getpid()):
            lines.append(line)
    return lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x.y"], "'x.y' is no version"),
        (["9.9.9", UNIT], "9.9.9 is not in patches/upstream.lock"),
        ([STOCK_ONLY, "--affected"], f"the fixes were not carried to {STOCK_ONLY}"),
        (["0.20.2", "--affected"], "0.20.2 has no tests for that: tests within 1 import"),
        (["0.20.2", "tests/nothing"], "no tests at tests/nothing"),
        (["0.20.2", "../tree"], "no tests at ../tree"),
        (["0.20.2", "-k", "no_such_test"], "no test is called no_such_test"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path: Path, arguments: list[str], said: str) -> None:
    tree(tmp_path, config=upstream_toys.CONFIG)
    result = run(tmp_path, *arguments)
    assert result.returncode not in (0, 1), result.stderr
    assert "Traceback" not in result.stderr
    assert said in result.stderr
    assert "next: " in result.stderr


def test_an_expression_takes_what_it_names(tmp_path: Path) -> None:
    tree(tmp_path, config=upstream_toys.CONFIG, crash=upstream_toys.CRASH)
    result = run(tmp_path, "0.20.2", "-k", "named")
    assert result.returncode == 0, result.stderr
    assert "test_crash" not in result.stderr
    document = report(tmp_path, "work/0.20.2")
    assert document["counts"]["newly failing"] == 1
    assert document["counts"]["still passing"] == 1
