"""The front page is short, and what the pages point to is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.project import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def broken(page: Path) -> Iterator[str]:
    for path, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in path:
            continue
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"{path}#{anchor}"


def test_the_readme_has_at_most_600_words_before_the_matrix() -> None:
    head, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- matrix")
    assert rest
    assert len(head.split()) <= 600


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not [*broken(page)]


def test_every_fix_is_named_by_its_symptom() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    symptoms, _, rest = text.partition("## Releases")
    assert rest
    rows = re.findall(r"^\| \[(\w+)\]", rest, re.MULTILINE)
    assert rows
    assert not [row for row in rows if f"[{row}](docs/fixes.md#{row.lower()})" not in symptoms]
