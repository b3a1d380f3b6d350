"""One stored patch: its head, its hunks, and their exact application.

The head is two lines: the fix, and the releases that the patch serves. Both are made; what people
have to know of a fix stands in `patches/fixes.toml`, once.

Application knows no fuzz. Every context and removed line must match; a hunk may only have moved
as a whole, and where its text stands at several places and none is the stated one, it is
refused. Plain `git apply` takes the nearest place then, and a hook that lands in the wrong twin
is what users fear most. Whatever applies here, `git apply` applies in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from shlex import quote

from unidiff.constants import DEV_NULL, LINE_TYPE_NO_NEWLINE
from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as ParsedHunk
from unidiff.patch import Line as ParsedLine
from unidiff.patch import PatchedFile, PatchSet

from scripts.system.errors import PatchDoesNotApplyError, RegistryError

_HEAD = re.compile(r"Fix: (?P<fix>\S+)\nServes: (?P<releases>\S+(?:, \S+)*)\n(?=diff --git )")
_PATH = re.compile(r"[\w.+-]+(/[\w.+-]+)*", re.ASCII)  # git puts any other into quotes
_END = "\n"
_NO_NEWLINE = " No newline at end of file"


@dataclass(frozen=True)
class Hunk:
    """Lines that change together; `start` is the line, from 1, at which `old` is expected.

    `ends` says that no context follows: the hunk belongs to the end of the file.
    """

    start: int
    ends: bool
    old: tuple[str, ...]
    new: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def stated(self) -> int:
        """Index, from 0, of the line at which `old` is expected."""
        return max(self.start - 1, 0)  # 0 in an empty file


@dataclass(frozen=True)
class Patch:
    """What one fix changes in the files of some releases.

    Attributes:
        name: Its path below `patches/`, such as `K06-lease-clock/0.18.0.patch`.
        fix_id: Id of the fix.
        serves: The releases that its head names.
        diff: Its text below the head.
        files: The hunks of each file.
    """

    name: str
    fix_id: str
    serves: tuple[str, ...]
    diff: str
    files: dict[str, tuple[Hunk, ...]]

    @property
    def added_lines(self) -> int:
        """How many lines the patch adds to upstream's files."""
        return sum(len(hunk.added) for hunks in self.files.values() for hunk in hunks)


@dataclass(frozen=True)
class Offset:
    """A hunk that matched exactly, but `lines` further down (or up) than it says."""

    patch: str
    path: str
    hunk: int
    lines: int


def read_patch(path: Path) -> Patch:
    """Read the file `path`, which lies in the folder of its fix.

    Raises:
        RegistryError: It is not of the form that `head` and git give it, or does more than change
            text files.
    """
    name = f"{path.parent.name}/{path.name}"
    try:
        text = path.read_bytes().decode("utf-8")  # and not as text: lines may end in \r\n
    except UnicodeDecodeError as error:
        raise _malformed(name, str(error)) from error
    return parse_patch(name, text)


def parse_patch(name: str, text: str) -> Patch:
    """Return the patch that `text` is; `name` is its path below `patches/`.

    Raises:
        RegistryError: As `read_patch`.
    """
    found = _HEAD.match(text)
    if found is None:
        raise _malformed(name, "it has no head of `Fix:` and `Serves:` with a diff below")
    if found["fix"] != name.partition("/")[0]:
        raise _malformed(name, f"its head names {found['fix']}")
    diff = text[found.end() :]
    try:
        files = PatchSet(diff)
    except UnidiffParseError as error:
        raise _malformed(name, str(error)) from error
    hunks: dict[str, tuple[Hunk, ...]] = {}
    for file in files:
        # A file that was empty counts as added for unidiff, so ask what git says.
        added_or_removed = DEV_NULL in (file.source_file, file.target_file)
        if added_or_removed or file.is_rename or file.is_binary_file:
            raise _malformed(name, f"{file.path} is added, removed, renamed or binary")
        if not _PATH.fullmatch(file.path) or {".", "..", ".git"} & {*file.path.split("/")}:
            raise _malformed(name, f"{file.path!r} is no path that a release has")
        if any(line.line_type == LINE_TYPE_NO_NEWLINE for hunk in file for line in hunk[:1]):
            raise _malformed(name, f"{file.path} has a hunk that begins with a marker")
        if not _follow(file):
            raise _malformed(name, f"the line numbers of {file.path} contradict each other")
        hunks[file.path] = tuple(_hunk(hunk) for hunk in file)
    # The parser passes over what it does not know. Every line has to have a meaning: one that
    # lies behind the counts of its hunk would do nothing, silently. So nothing may be lost when
    # the diff is written anew from what was read.
    if "".join(_written(file) for file in files) != diff or not all(hunks.values()):
        raise _malformed(name, "its diff has lines that belong to no hunk, or a change of mode")
    if len(files) != len(hunks):
        raise _malformed(name, "a file stands twice in it")
    return Patch(
        name=name,
        fix_id=found["fix"].partition("-")[0],
        serves=tuple(found["releases"].split(", ")),
        diff=diff,
        files=hunks,
    )


def head(fix: str, releases: Sequence[str]) -> str:
    """Return the head of a patch: the name of its fix's folder, and the releases it serves."""
    return f"Fix: {fix}\nServes: {', '.join(releases)}\n"


def _written(file: PatchedFile) -> str:
    """Return what git would have written of `file`."""
    text = f"diff --git a/{file.path} b/{file.path}\n--- a/{file.path}\n+++ b/{file.path}\n"
    for hunk in file:
        old = _span(hunk.source_start, hunk.source_length)
        new = _span(hunk.target_start, hunk.target_length)
        section = f" {hunk.section_header}" if hunk.section_header else ""
        text += f"@@ -{old} +{new} @@{section}\n"
        for line in hunk:
            value = line.value if line.line_type != LINE_TYPE_NO_NEWLINE else _NO_NEWLINE
            text += f"{line.line_type}{value.removesuffix(_END)}{_END}"
    return text


def _span(start: int, length: int) -> str:
    return str(start) if length == 1 else f"{start},{length}"


def _follow(file: PatchedFile) -> bool:
    """Whether each hunk lies below the one before, where that says that the new text has it."""
    done = drift = 0
    for hunk in file:
        # Of no lines, the number is that of the line above them.
        old = hunk.source_start - bool(hunk.source_length)
        new = hunk.target_start - bool(hunk.target_length)
        if old < done or new != old + drift:
            return False
        done = old + hunk.source_length
        drift += hunk.target_length - hunk.source_length
    return True


def _hunk(hunk: ParsedHunk) -> Hunk:
    lines: list[ParsedLine] = []
    for line in hunk:
        if line.line_type == LINE_TYPE_NO_NEWLINE:  # speaks of the line above it
            lines[-1].value = lines[-1].value.removesuffix("\n")
        else:
            lines.append(line)
    return Hunk(
        start=hunk.source_start,
        ends=not lines[-1].is_context,
        old=tuple(line.value for line in lines if not line.is_added),
        new=tuple(line.value for line in lines if not line.is_removed),
        added=tuple(line.value for line in lines if line.is_added),
    )


def _malformed(name: str, why: str) -> RegistryError:
    return RegistryError(
        f"{name}: {why}",
        expected="two lines of head and a diff that changes existing text files only",
        next_step=f"take back what changed it: git restore {quote(f'patches/{name}')}",
    )


def apply_patches(
    patches: Sequence[Patch], read: Callable[[str], str]
) -> tuple[dict[str, str], list[Offset]]:
    """Apply `patches` in order to the files that `read` gives by path.

    Returns:
        The new text of each touched file, and the hunks that were found elsewhere.

    Raises:
        PatchDoesNotApplyError: A hunk has no place, or several; nothing is returned then.
    """
    texts: dict[str, str] = {}
    offsets: list[Offset] = []
    for patch in patches:
        for path, hunks in patch.files.items():
            text = texts[path] if path in texts else read(path)
            texts[path] = _apply(patch.name, path, hunks, text, offsets)
    return texts, offsets


def _apply(name: str, path: str, hunks: Sequence[Hunk], text: str, offsets: list[Offset]) -> str:
    lines = list(StringIO(text))  # as git counts them: a form feed ends no line
    result: list[str] = []
    done = 0  # source lines already copied or replaced
    drift = 0  # how far the previous hunk had moved: the next one is looked for there first
    for number, hunk in enumerate(hunks, start=1):
        place = _find(lines, hunk, done, drift, f"{name}, {path}, hunk {number}")
        moved = place - hunk.stated
        if moved:
            offsets.append(Offset(name, path, number, moved))
        drift = moved
        result += lines[done:place]
        result += hunk.new
        done = place + len(hunk.old)
    return "".join(result + lines[done:])


def _find(lines: Sequence[str], hunk: Hunk, first: int, drift: int, where: str) -> int:
    size = len(hunk.old)
    expected = hunk.stated + drift
    places = [
        at
        for at in range(len(lines) - size + 1)
        if not size or (lines[at] == hunk.old[0] and tuple(lines[at : at + size]) == hunk.old)
    ]
    # Without context above or below it, a hunk begins or ends the file, wherever else it fits.
    wanted = f"line {expected + 1}"
    fitting = [at for at in places if at >= first]
    if hunk.start <= 1:
        wanted, fitting = "the top of the file", [at for at in fitting if at == 0]
    if hunk.ends:
        wanted, fitting = "the end of the file", [at for at in fitting if at + size == len(lines)]
    if expected in fitting or len(fitting) == 1:
        place = expected if expected in fitting else fitting[0]
        if place == hunk.stated or hunk.ends:
            return place
        # It has moved. A twin that is no further away, or above the hunk before, may be meant too.
        near = abs(place - hunk.stated)
        twins = {*places} - {place}
        if all(at >= first and abs(at - hunk.stated) > near for at in twins):
            return place
    if places:
        numbers = ", ".join(str(at + 1) for at in places)
        found = f"{where}: its text stands at line {numbers}; {wanted} is where it should, alone"
    else:
        found = f"{where}: its text is not there{_nearest(lines, hunk)}"
    raise PatchDoesNotApplyError(
        found,
        expected="every context and removed line, unchanged, at one place",
        next_step="a fork that has changed this place can cherry-pick the commits of export; a "
        "release that the patch was not made for needs a rebase: CONTRIBUTING.md says how",
    )


def _nearest(lines: Sequence[str], hunk: Hunk) -> str:
    """Describe the place that agrees with most lines of `hunk`, for the error message."""

    def agreement(at: int) -> int:
        return sum(map(str.__eq__, lines[at : at + len(hunk.old)], hunk.old))

    at = max(range(len(lines)), key=agreement, default=0)
    equal = agreement(at) if lines else 0
    if not equal:
        return ""
    wanted, got = next(
        (
            (want, have)
            for want, have in zip(hunk.old, [*lines[at:], *[""] * len(hunk.old)], strict=False)
            if want != have
        ),
        ("", ""),
    )
    return (
        f"; nearest is line {at + 1}, where {equal} of {len(hunk.old)} lines agree, "
        f"but not\n  wanted: {wanted!r}\n  found:  {got!r}"
    )
