"""What chance and the machine put into an outcome: ids, addresses, ports, folders, times.

They say nothing of the release, and would make another record of each run of the same code.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

from scripts.project import ROOT
from scripts.prove.outcomes import Outcome

_FOLDERS = "|".join(re.escape(str(one)) for one in (tempfile.gettempdir(), "/tmp", Path.home()))  # noqa: S108
_RULES = (
    (re.compile(rf"{re.escape(str(ROOT))}/"), ""),
    (re.compile(rf"(?<![\w/.])(?:{_FOLDERS})(?:/[\w.+~@-]+)+"), "<path>"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"\b0x[0-9a-f]+"), "<address>"),
    (re.compile(r"(?<=localhost:)\d+|(?<=\d\.\d\.\d\.\d:)\d+"), "<port>"),
    (re.compile(r"\b\d+\.\d{5,}(?:e[+-]?\d+)?|\b\d+(?:\.\d+)?e-\d+"), "<number>"),
    (re.compile(r"(?<=\bpid[ =])\d+"), "<pid>"),
)
# Ids break anywhere where pytest leaves out the middle of a text that is long.
_RUN = re.compile(r"(?<![0-9A-Za-z<])[0-9a-f]+(?:(?:-|\.\.\.)[0-9a-f]+)*(?![0-9A-Za-z])")


def without_chance(outcome: Outcome) -> Outcome:
    """Return `outcome` as every run of the same code on the same release gives it."""
    return replace(outcome, place=scrubbed(outcome.place), message=scrubbed(outcome.message))


def scrubbed(text: str) -> str:
    """Return `text` with a word in place of each part that chance or the machine decides."""
    for pattern, word in _RULES:
        text = pattern.sub(word, text)
    return _RUN.sub(_without_ids, text)


def _without_ids(run: re.Match[str]) -> str:
    """Replace what is random in hexadecimal digits with dashes: eight or more, or broken off."""
    broken = "..." in run[0]

    def is_random(part: str) -> bool:
        count = len(part.replace("...", ""))
        return count >= 8 or (broken and count == 4) or ("..." in part and count > 4)

    return "-".join("<id>" if is_random(part) else part for part in run[0].split("-"))
