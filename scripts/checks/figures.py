"""Figures of runs that the documents quote: each is in `records/figures.toml`, with its run."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.project import RECORDS, ROOT, read_toml

_RECORD = RECORDS / "figures.toml"
_OF_A_RUN = {"command": str, "release": str, "date": datetime.date, "machine": str, "figures": dict}


def figure_faults(record: Path = _RECORD, root: Path = ROOT) -> Iterator[str]:
    """Yield each figure that no document quotes beside the words that go with it.

    Args:
        record: The file with the figures.
        root: Where README.md and docs/ lie.
    """
    pages = [path for path in (root / "README.md", *(root / "docs").glob("*.md")) if path.is_file()]
    parts = [part for path in pages for part in _parts(path.read_text(encoding="utf-8"))]
    for run in read_toml(record)["run"]:
        kinds = {key: type(value) for key, value in run.items()}
        if kinds != _OF_A_RUN:
            yield f"{record.name}: a run has {', '.join(_OF_A_RUN)}: {run}"
            continue
        for words, figure in run["figures"].items():
            exact = re.compile(rf"(?<![\w.,]){re.escape(figure)}(?![\w%]|[.,]\d)")
            if not any(words in part and exact.search(part) for part in parts):
                yield (
                    f"{record.name}: no document says {figure!r} beside {words!r}, "
                    f"as {run['command']} did on {run['date']}"
                )


def _parts(text: str) -> Iterator[str]:
    """Yield the rows of tables and the paragraphs of a document, each on one line."""
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        yield from (line for line in lines if line.startswith("|"))
        yield " ".join(line.strip() for line in lines if not line.startswith("|"))
