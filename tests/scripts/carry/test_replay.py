"""`nox -s replay` on a small vLLM: what is carried and tested, and that nothing lands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scripts import toys
from tests.scripts.carrying import WORKER, carrying, change, release

pytestmark = pytest.mark.timeout(600)


def changed(*pairs: tuple[str, str]) -> dict[str, str]:
    return {**toys.FILES, WORKER: toys.changed(WORKER, *pairs)}


def test_each_release_is_carried_to_as_if_it_were_new(tmp_path: Path) -> None:
    checkout = carrying(tmp_path)
    release(checkout, "0.20.3", changed(("    return x + 0\n", "    return 0 + x\n")))
    release(checkout, "0.21.0", changed(("    return x + 2\n", "    return 1 + x\n")))
    release(checkout, "0.22.0", changed(("    return x + 9\n", "    return 9 + x\n")))
    # The registry knows that 0.21.0 has fix 1. On the day nobody did.
    change(checkout.patches / "fixes.toml", '">=0.20.0"', '">=0.20.0,<0.21.0"')
    assert checkout.run("edit", "--restamp").returncode == 0
    before = {path: path.read_bytes() for path in checkout.patches.rglob("*") if path.is_file()}

    result = checkout.run("replay", "--prove", "0.20.3", timeout=300)
    assert result.returncode == 0, result.stderr
    rows = json.loads((checkout.folder / "records" / "proofs" / "replay.json").read_text())
    assert [(row["release"], row["from"]) for row in rows] == [
        ("0.20.3", ["0.20.2"]),
        ("0.21.0", ["0.20.2"]),
        ("0.22.0", ["0.20.2"]),
    ]
    fates = [{fix: said["status"] for fix, said in row["fixes"].items()} for row in rows]
    assert fates == [
        {"1": "carried", "2": "carried"},
        {"1": "conflict", "2": "carried"},
        {"1": "carried", "2": "conflict"},
    ]
    assert rows[0]["proven"] == {"1": True, "2": True}
    page = (checkout.folder / "docs" / "replay.md").read_text()
    assert (
        "| 0.20.3 | 0.20.2 | 2 | 2 from 0.20.2 | - | 0 | 0 | 2 of 2 | 0 | 0 | 0 | 0 of 2 |" in page
    )
    assert "| 0.22.0 | 0.20.2 | 1 | 1 from 0.20.2 | - | 0 | 0 | - | 0 | 0 | 1 | 0 of 2 |" in page
    assert "Of 6 times that a fix met a release, 4 (67%) were carried without a hand" in page

    for path in checkout.patches.rglob("*"):
        assert path.is_dir() or path.read_bytes() == before[path]
    # What was tested stays on the page, as long as the same came out.
    assert checkout.run("replay", timeout=300).returncode == 0
    assert (checkout.folder / "docs" / "replay.md").read_text() == page


def test_a_release_that_is_not_carried_to_is_refused_at_once(tmp_path: Path) -> None:
    checkout = carrying(tmp_path)
    release(checkout, "0.20.3", toys.FILES)
    result = checkout.run("replay", "--prove", "9.9", timeout=60)
    assert result.returncode == 10, result.stderr
    assert "nothing is carried to 9.9" in result.stderr
    assert "next: nox -s replay -- --prove 0.20.3" in result.stderr


def test_what_fails_its_tests_is_named(tmp_path: Path) -> None:
    checkout = carrying(tmp_path)
    # Fix 2 makes work9 call work1, which is another function here: the text carries, and is wrong.
    release(checkout, "0.20.3", changed(("    return x + 1\n", "    return x + 100\n")))
    assert checkout.run("replay", "--prove", "0.20.3", timeout=300).returncode == 0
    page = (checkout.folder / "docs" / "replay.md").read_text()
    assert "| 0.20.3 | 0.20.2 | 2 | 2 from 0.20.2 | - | 0 | 0 | 0 of 2 |" in page
    assert "Carried to 0.20.3 by text, and failing its tests there: 1, 2." in page
