"""Hostile patches: what git makes of two texts, and then something is changed in it.

With each goes a text that it is applied to: the one it was made from, or a later one of it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from random import Random

from scripts.patchset.patch import head

PATH = "vllm/a.py"
NAME = "1-it/0.20.2.patch"
OTHER_PATHS = (
    "../a.py", "/etc/passwd", "vllm/../../a.py", "vllm/\x1b[31m.py", "b.py", "vllm//a.py", "",
    '"vllm/\\303\\244.py"', "vllm/a.py\t2026-01-01", ".git/config", "vllm/a b.py", "vllm/./a.py",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A patch, and the text of `PATH` that it is applied to."""

    text: str
    target: str


def _text(rng: Random) -> str:
    lines = rng.choice(
        (
            [f"line {n}\n" for n in range(1, 41)],
            [rng.choice("ab") + "\n" for _ in range(rng.randrange(30))],
            [f"line {n}\n" for n in range(9)] * rng.randrange(1, 5),
            [rng.choice(("\n", "    x = 1\n", "\f\n", "c\r\n", "-- \n", "@@\n", "d\x85e\n"))]
            * rng.randrange(12),
            [],
        )
    )
    text = "".join(lines)
    return text.removesuffix("\n") if rng.random() < 0.15 else text


def _edited(rng: Random, text: str, most: int) -> str:
    lines = text.split("\n")
    for _ in range(rng.randrange(most + 1)):
        at = rng.randrange(len(lines) + 1)
        count = rng.choice((0, 0, 1, 1, 2, 9))
        lines[at : at + count] = rng.choice(([], ["new"], ["a", "b"], ["line 5"], [""] * 20))
    return "\n".join(lines)


def _diff(before: str, after: str, context: int) -> str:
    old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (before, after))
    made = list(difflib.unified_diff(old, new, f"a/{PATH}", f"b/{PATH}", n=context))
    if not made:
        return ""
    lines = [
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in made
    ]
    return f"diff --git a/{PATH} b/{PATH}\n" + "".join(lines)


_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def _changed(rng: Random, text: str) -> str:
    lines = text.split("\n")
    hunks = [n for n, line in enumerate(lines) if _HUNK.match(line)]
    at = rng.randrange(len(lines))
    what = rng.randrange(14)
    if what == 0 and hunks:  # another number in a hunk's head
        at = rng.choice(hunks)
        numbers = list(re.finditer(r"\d+", lines[at]))
        one = rng.choice(numbers)
        new = rng.choice((str(max(int(one[0]) + rng.choice((-1, 1)), 0)), "0", "9" * 30, "-1"))
        lines[at] = lines[at][: one.start()] + new + lines[at][one.end() :]
    elif what == 1:  # a line more or less
        lines[at : at + rng.randrange(2)] = rng.choice(
            ([], ["+new"], [" line 5"], ["-line 5"], [""], ["\\ No newline at end of file"], ["x"])
        )
    elif what == 2:  # another sign
        lines[at] = rng.choice("+- \\@") + lines[at][1:]
    elif what == 3 and hunks:  # fewer lines of context, with a head that knows
        _trim(rng, lines, rng.choice(hunks))
    elif what == 4 and hunks:  # hunks elsewhere
        lines += [*lines[rng.choice(hunks) : -1], ""]
    elif what == 5:  # the same file once more, or a second one
        lines += [line.replace(PATH, rng.choice((PATH, "vllm/b.py"))) for line in lines[:-1]] + [""]
    elif what == 6:
        return text.replace(PATH, rng.choice(OTHER_PATHS), rng.choice((1, 2, 3, -1)))
    elif what == 7:
        lines.insert(
            1,
            rng.choice(
                ("old mode 100644\nnew mode 100755", "new file mode 100644", "rename from x",
                 "deleted file mode 100644", "index 1..2", "GIT binary patch", "copy from a",
                 "similarity index 1%", "--- /dev/null", "+++ /dev/null")
            ),
        )  # fmt: skip
    elif what == 8:
        return text.replace("\n", "\r\n", rng.choice((1, 3, -1)))
    elif what == 9:
        words = rng.choice((f"--- a/{PATH}", f"+++ b/{PATH}", "diff --git", "@@", "a/", "b/"))
        return text.replace(words, rng.choice(("", "--- /dev/null", "+++", "@@ -1 +1 @@", "c/")), 1)
    elif what == 10:
        lines.insert(at, lines[rng.randrange(len(lines))])
    elif what == 11:
        at = rng.randrange(len(text))
        return text[:at] + rng.choice("\0\r\x1b\x85\u2028\n+- @") + text[at + rng.randrange(2) :]
    elif what == 12:
        return text[: rng.randrange(len(text))]
    else:
        rng.shuffle(lines)
    return "\n".join(lines)


def _trim(rng: Random, lines: list[str], at: int) -> None:
    found = _HUNK.match(lines[at])
    if found is None or at + 1 >= len(lines) or not lines[at + 1].startswith(" "):
        return
    start, size, new_start, new_size = (int(n) if n else 1 for n in found.groups())
    moved = rng.choice((0, 1))
    del lines[at + 1]
    lines[at] = (
        f"@@ -{start + moved},{max(size - 1, 0)} +{new_start + moved},{max(new_size - 1, 0)} @@"
    )


def hostile(rng: Random) -> Case:
    """Return a patch, of which most are still one, and a text for it."""
    before = _text(rng)
    after = _edited(rng, before, 4)
    diff = _diff(before, after, rng.choice((3, 3, 3, 2, 1, 0)))
    if not diff:
        diff = _diff("a\n", "b\n", 3)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        diff = _changed(rng, diff) if diff else diff
    text = head("1-it", ["0.20.2"]) + diff
    if rng.random() < 0.05:
        text = _changed(rng, text)
    return Case(text, before if rng.random() < 0.5 else _edited(rng, before, 3))
