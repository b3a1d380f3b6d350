"""A figure that a document quotes is the one on record, and names its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.checks.figures import figure_faults
from tests.scripts.repos import write

RECORD = """
[[run]]
command = "nox -s bench"
release = "0.20.2"
date = 2026-11-20
machine = "two cores"
[run.figures]
"`apply`" = "1.2 s, 49 MB"
"random steps" = "115,551"
"""
README = """# It
| measured | figure |
|---|---|
| `apply` | 1.2 s, 49 MB |
| other | 1 |

- 115,551
  random steps broke no promise.
"""


def faults(folder: Path, record: str = RECORD, readme: str = README) -> list[str]:
    write(folder, {"README.md": "# It\n", "docs/costs.md": readme, "figures.toml": record})
    return list(figure_faults(folder / "figures.toml", folder))


def test_what_is_on_record_is_quoted() -> None:
    assert list(figure_faults()) == []


def test_a_row_or_a_paragraph_has_both(tmp_path: Path) -> None:
    assert faults(tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| 1.2 s", "| 1.1 s"),
        ("| 1.2 s", "| 11.2 s"),
        ("49 MB", "49 MBit"),
        ("`apply`", "`verify`"),
        ("| `apply` | 1.2 s, 49 MB |\n| other | 1 |", "| `apply` | 1 |\n| other | 1.2 s, 49 MB |"),
        ("115,551", "1,115,551"),
        ("115,551\n", "115,551\n\n"),
    ],
)
def test_anything_else_is_a_fault(tmp_path: Path, old: str, new: str) -> None:
    assert old in README
    (fault,) = faults(tmp_path, readme=README.replace(old, new))
    assert "nox -s bench did on 2026-11-20" in fault


@pytest.mark.parametrize(
    ("old", "new"),
    [('release = "0.20.2"\n', ""), ("2026-11-20", '"yesterday"'), ("machine", "computer")],
)
def test_a_run_that_is_not_named_is_a_fault(tmp_path: Path, old: str, new: str) -> None:
    (fault,) = faults(tmp_path, record=RECORD.replace(old, new))
    assert "a run has command, release, date, machine, figures" in fault
