"""One fix, carried to the text of another release by three-way merging, hunk by hunk.

The three are the release that the patch was made from (with the fixes before it), the same with
the fix, and the other release. A hunk that applies exactly has to go where the merge puts it;
where the two disagree, or the merge has a conflict, a person decides. Whatever comes out is
exported, applied anew without fuzz, and tested before it counts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property, lru_cache

from scripts.carry.hang import changed_in, hung, only_imports, with_imports
from scripts.carry.moved import (
    Place,
    definition_at,
    definitions,
    module_moved_to,
    moved_to,
    where_it_went,
)
from scripts.patchset.patch import Hunk, Patch, apply_patches
from scripts.system.errors import PatchDoesNotApplyError
from scripts.system.git import Repository

_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class How(Enum):
    """What became of one hunk."""

    EXACT = "exact"
    MOVED = "moved"
    MERGED = "merged"
    THERE = "already there"
    CONFLICT = "conflict"
    GONE = "target gone"


_PLACED = (How.EXACT, How.MOVED, How.MERGED)

_CONFLICT = re.compile(
    r"^<{7} .*\n(?P<release>(?:.*\n)*?)\|{7} .*\n(?:.*\n)*?={7}\r?\n(?P<patch>(?:.*\n)*?)>{7} .*\n",
    re.MULTILINE,
)
"""A conflict, as git marks one; a text may have rows of = itself."""


class Status(Enum):
    """What became of one fix."""

    CARRIED = "carried"
    OFFSETS = "carried with offsets"
    MERGED = "carried by merging"
    RESOLVED = "carried by hand"
    UPSTREAM = "already upstream"
    HINT = "perhaps upstream"
    PARTLY = "partly upstream"
    NOT_AFFECTED = "not affected"
    CONFLICT = "conflict"
    GONE = "target gone"
    SKIPPED = "left out"
    UNCARRIED = "no patch to carry"

    @property
    def stops(self) -> bool:
        """Whether a person has to look before the next fix is carried."""
        return self in (Status.HINT, Status.PARTLY, Status.CONFLICT, Status.GONE)


CARRIED = (Status.CARRIED, Status.OFFSETS, Status.MERGED)
"""What becomes of a fix that is carried without a person."""


@dataclass(frozen=True)
class HunkResult:
    """One hunk on the other release.

    Attributes:
        path: File that it changes.
        number: Which of the file's hunks it is, from 1.
        how: What became of it.
        definition: Function or class, with the module's own names, that it changes.
        said: What is to know about it; for a conflict, the text that collides.
        went: Where its target may have gone.
        into: The other file that it was carried into, as its target is there now.
    """

    path: str
    number: int
    how: How
    definition: str = ""
    said: str = ""
    went: tuple[Place, ...] = ()
    into: str = ""


@dataclass(frozen=True)
class Carried:
    """A fix on the other release: each hunk's fate, and the new text of each file that it changes.

    Where hunks collide, the text has markers. Where the target of a hunk is gone, and the hunk
    merges into the place where it most likely went, that is the text: a proposal, for a person.
    """

    hunks: tuple[HunkResult, ...]
    texts: dict[str, str]

    @property
    def status(self) -> Status:
        """What the hunks say together; the worst counts."""
        fates = {hunk.how for hunk in self.hunks}
        for how, status in (
            (How.GONE, Status.GONE),
            (How.CONFLICT, Status.CONFLICT),
            (How.THERE, Status.HINT if fates == {How.THERE} else Status.PARTLY),
            (How.MERGED, Status.MERGED),
            (How.MOVED, Status.OFFSETS),
        ):
            if how in fates:
                return status
        return Status.CARRIED


class Source:
    """The release that patches come from, patch by patch, as text.

    A fix is merged from the release with only those fixes before it that were carried, wherever it
    applies to that: what was left out must not collide.
    """

    def __init__(self, read: Callable[[str], str]) -> None:
        """Start from the stock release, whose files `read` gives by path."""
        self._read = cache(read)
        self._all: dict[str, str] = {}
        self._carried: dict[str, str] = {}

    def before(self, patch: Patch) -> Callable[[str], str]:
        """Return the reader of the files to which `patch` applies exactly."""
        return self._carried_text if self._applied(patch, self._carried_text) else self._text

    def add(self, patch: Patch, *, carried: bool) -> None:
        """Apply `patch`, which was carried to the other release or not."""
        self._all |= apply_patches([patch], self._text)[0]
        if carried:
            # Where it depends on what was left out, it is taken with that.
            self._carried |= self._applied(patch, self._carried_text) or {
                path: self._all[path] for path in patch.files
            }

    def _applied(self, patch: Patch, read: Callable[[str], str]) -> dict[str, str]:
        try:
            return apply_patches([patch], read)[0]
        except PatchDoesNotApplyError:
            return {}

    def _text(self, path: str) -> str:
        return self._all[path] if path in self._all else self._read(path)

    def _carried_text(self, path: str) -> str:
        return self._carried[path] if path in self._carried else self._read(path)


def carry(
    patch: Patch,
    before: Callable[[str], str],
    ours: Callable[[str], str | None],
    repository: Repository,
    revision: str,
    *,
    looking: bool = True,
) -> Carried:
    """Carry `patch` to another release.

    Args:
        patch: The fix, as it is exported for the release that it comes from.
        before: Text, by path, that it was made from: that release and the fixes before this one.
        ours: Text, by path, of the other release and what was carried to it; None: no such file.
        repository: Where the other release is, and where merges are made.
        revision: The other release there, such as `v0.22.1`.
        looking: Whether to look where targets that are gone may have gone, for a person.
    """
    hunks: list[HunkResult] = []
    texts: dict[str, str] = {}

    def now(path: str) -> str | None:
        return texts[path] if path in texts else ours(path)

    for path in patch.files:
        one = _File(patch, path, before(path), before, repository, revision, looking)
        text, elsewhere = now(path), None
        if text is None and (elsewhere := one.whole_went_to()):
            text = now(elsewhere)
        if text is None:
            results = [one.follow(result, now, texts) for result in one.gone()]
        else:
            results, made = one.carry(text)
            results = [one.follow(result, now, texts) for result in results]
            if left := {result.number for result in results if result.into}:
                # Anew without what has left, which is not to leave a conflict behind.
                text = now(elsewhere or path) or ""
                stay, made = one.carry(text, without=left)
                results = sorted(
                    [*stay, *(result for result in results if result.into)],
                    key=lambda result: result.number,
                )
            if not one.has_left(results):
                texts[elsewhere or path] = made
        if elsewhere:
            results = [one.elsewhere(result, elsewhere) for result in results]
        if one.has_left(results):
            results = [result if result.into else one.idle(result) for result in results]
        hunks += [one.propose(result, now, texts) for result in results]
    return Carried(tuple(hunks), texts)


@dataclass(frozen=True)
class _File:
    """One file that the patch changes; to `base` its hunks apply exactly."""

    patch: Patch
    path: str
    base: str
    was: Callable[[str], str]
    repository: Repository
    revision: str
    looking: bool

    @cached_property
    def hunks(self) -> tuple[Hunk, ...]:
        """The hunks, at the lines at which they stand in `base`."""
        _, moved = self._with(self.base, self.patch.files[self.path])
        pairs = zip(self.patch.files[self.path], moved, strict=True)
        return tuple(replace(hunk, start=hunk.start + lines) for hunk, lines in pairs)

    def _with(self, text: str, hunks: tuple[Hunk, ...]) -> tuple[str, list[int]]:
        """Apply `hunks` exactly; return the text and how far each has moved."""
        part = replace(self.patch, files={self.path: hunks})
        texts, offsets = apply_patches([part], lambda path: text)
        moved = {offset.hunk: offset.lines for offset in offsets}
        return texts[self.path], [moved.get(n, 0) for n in range(1, len(hunks) + 1)]

    def _merge(self, ours: str, theirs: str) -> tuple[str, int]:
        labels = (f"vLLM {self.revision[1:]}", "where the patch comes from", self.patch.name)
        return _merged(self.repository, ours, self.base, theirs, labels)

    def carry(self, ours: str, without: Collection[int] = ()) -> tuple[list[HunkResult], str]:
        """Return what becomes of each hunk but those `without`, by number, and the new text."""
        theirs, _ = self._with(self.base, self.hunks)
        try:
            text, moved = ("", []) if without else self._with(ours, self.hunks)
        except PatchDoesNotApplyError:
            text, moved = "", []
        if moved and self._merge(ours, theirs) == (text, 0):
            hows = [How.MOVED if lines else How.EXACT for lines in moved]
            return [
                self._result(number, how, f"{lines:+} lines" if lines else "", ours)
                for number, (how, lines) in enumerate(zip(hows, moved, strict=True), start=1)
            ], text
        results = []
        for number in range(1, len(self.hunks) + 1):
            if number not in without:
                result, text = self._hunk(number, ours)
                result, ours = self._on_one_side(result, ours, text)
                results.append(result)
        return results, ours

    def gone(self) -> list[HunkResult]:
        """Return what becomes of the hunks where there is no such file."""
        return [
            self._result(number, How.GONE, f"there is no {self.path}", None)
            for number in range(1, len(self.hunks) + 1)
        ]

    def _hunk(self, number: int, ours: str) -> tuple[HunkResult, str]:
        hunk = self.hunks[number - 1]
        theirs, _ = self._with(self.base, (hunk,))
        merged, conflicts = self._merge(ours, theirs)
        try:
            exact, (lines,) = self._with(ours, (hunk,))
        except PatchDoesNotApplyError:
            exact, lines = "", 0
        if exact and (conflicts or merged == exact):
            how = How.MOVED if lines else How.EXACT
            return self._result(number, how, f"{lines:+} lines" if lines else "", ours), exact
        if exact:
            at, by_merge = _first_change(ours, exact), _first_change(ours, merged)
            said = f"its text stands at line {at}, and merging changes line {by_merge}"
            return self._result(number, How.CONFLICT, said, ours), merged
        if conflicts and (placed := _with_import(ours, hunk)):
            return self._result(number, How.MERGED, "an import, beside the same line", ours), placed
        if conflicts and (placed := hung(self.base, hunk, ours)):
            return self._result(number, How.MERGED, "placed by what it hangs on", ours), placed
        if conflicts:
            how = How.CONFLICT if self._target_is_in(ours, hunk) else How.GONE
            return self._result(number, how, _collision(ours, merged), ours), merged
        if merged == ours:
            return self._result(number, How.THERE, "the release has it", ours), ours
        own, at = self._definition(hunk), _first_change(ours, merged)
        now, was = definition_at(merged, at), definition_at(ours, at)
        # What takes away a whole one leaves the next one in its place.
        if now is None or own in (now.name, was and was.name):
            return self._result(number, How.MERGED, "its surroundings have changed", ours), merged
        if {own, now.name} <= {one.name for one in definitions(ours)}:
            said = f"merging puts it in {now.name}, and {own} is still there"
            return self._result(number, How.CONFLICT, said, ours), merged
        return self._result(number, How.MERGED, f"in {now.name} now", ours), merged

    def _on_one_side(self, result: HunkResult, ours: str, text: str) -> tuple[HunkResult, str]:
        """Have a hunk that was put into the conflict of an earlier one on the patch's side of it.

        Elsewhere in it, who takes that side would lose the hunk.
        """
        found = _conflict_around(ours, _first_change(ours, text))
        if result.how not in _PLACED or found is None:
            return result, text
        line = _line_at(ours, found.start())
        said = f"line {line}: its place is in the conflict of an earlier one"
        result = replace(result, how=How.CONFLICT, said=said)
        before, after = ours[: found.start()], ours[found.end() :]
        hunk, taken = self.hunks[result.number - 1], f"{before}{found['patch']}{after}"
        try:
            made, _ = self._with(taken, (hunk,))
        except PatchDoesNotApplyError:
            theirs, _ = self._with(self.base, (hunk,))
            made, conflicts = self._merge(taken, theirs)
            if conflicts:
                return result, ours
        if not (made.startswith(before) and made.endswith(after)):
            return result, ours  # it has a place elsewhere, too
        side = made[len(before) : len(made) - len(after)]
        return result, f"{ours[: found.start('patch')]}{side}{ours[found.end('patch') :]}"

    def _result(self, number: int, how: How, said: str, ours: str | None) -> HunkResult:
        hunk = self.hunks[number - 1]
        name = self._definition(hunk)
        went: tuple[Place, ...] = ()
        if how is How.GONE and self.looking:
            target = definition_at(self.base, self._line(hunk))
            went = where_it_went(self.base, target, self.path, self.repository, self.revision)
        return HunkResult(self.path, number, how, name, said, went)

    def whole_went_to(self) -> str | None:
        """Return the path of the one module that this one is now, where it is gone from its own."""
        names = {self._definition(hunk) for hunk in self.hunks} - {""}
        return module_moved_to(self.was, names, self.path, self.repository, self.revision)

    def elsewhere(self, result: HunkResult, path: str) -> HunkResult:
        """Return what became of a hunk whose module is `path` now."""
        how = How.MERGED if result.how in (How.EXACT, How.MOVED) else result.how
        said = f"the module is {path} now" if how is How.MERGED else f"{path}: {result.said}"
        return replace(result, how=how, said=said)

    def follow(
        self, result: HunkResult, now: Callable[[str], str | None], texts: dict[str, str]
    ) -> HunkResult:
        """Put a hunk whose target is gone into the definition that this is now, with its imports.

        Where more than one place may be meant, or what is there collides, it stays gone.

        Args:
            result: The hunk's fate.
            now: Text of the other release, by path, with what was carried and proposed so far.
            texts: Takes the new text of the file that it went to.
        """
        hunk = self.hunks[result.number - 1]
        target, *others = changed_in(self.base, hunk)
        if result.how is not How.GONE or target is None or any(one != target for one in others):
            return result
        place = moved_to(self.was, target, self.path, self.repository, self.revision)
        there = now(place.path) if place else None
        if place is None or there is None:
            return result
        made = self._merge_definition(hunk, there, place.name) or hung(
            self.base, hunk, there, {target.name: place.name}
        )
        theirs, _ = self._with(self.base, self.hunks)
        made = made and with_imports(self.base, theirs, made, "".join(hunk.added))
        if not made:
            return result
        texts[place.path] = made
        said = f"in {place.path}, {place.name} now"
        return replace(result, how=How.MERGED, said=said, went=(), into=place.path)

    def has_left(self, results: Sequence[HunkResult]) -> bool:
        """Whether all but imports was carried into other files, so that these are idle here."""
        pairs = zip(self.hunks, results, strict=True)
        stays = [hunk for hunk, one in pairs if one.into in ("", self.path)]
        return len(stays) < len(self.hunks) and all(only_imports(self.base, one) for one in stays)

    def idle(self, result: HunkResult) -> HunkResult:
        """Return what became of imports where all that uses them has left the file."""
        return replace(result, how=How.MERGED, said="imports, gone with what uses them", went=())

    def propose(
        self, result: HunkResult, now: Callable[[str], str | None], texts: dict[str, str]
    ) -> HunkResult:
        """Put a hunk whose target is gone where that went, if it merges there; say so.

        Args:
            result: The hunk's fate.
            now: Text of the other release, by path, with what was carried and proposed so far.
            texts: Takes the new text of the file that it went to.
        """
        if not result.went:
            return result
        hunk, place = self.hunks[result.number - 1], result.went[0]
        there = now(place.path) or ""
        if result.definition:
            merged = self._merge_definition(hunk, there, place.name)
        else:
            merged = _with_import(there, hunk)
        if not merged:
            return result
        texts[place.path] = merged
        return replace(result, said=f"{result.said}; proposed in {place.path}, {place.name}")

    def _merge_definition(self, hunk: Hunk, there: str, name: str) -> str:
        """Return `there` with the definition `name` as `hunk` changes it; nothing on a conflict."""
        theirs, _ = self._with(self.base, (hunk,))
        old = definition_at(self.base, self._line(hunk))
        new = next((one for one in definitions(theirs) if old and one.name == old.name), None)
        target = next((one for one in definitions(there) if one.name == name), None)
        # Another name is likeness only; what looks like a function is not that function.
        if not (old and new and target) or name.split(".")[-1] != old.name.split(".")[-1]:
            return ""
        labels = (f"vLLM {self.revision[1:]}", "where the patch comes from", self.patch.name)
        cut = [one.cut(text) for one, text in ((target, there), (old, self.base), (new, theirs))]
        merged, conflicts = self.repository.merge(cut[0], cut[1], cut[2], labels)
        lines = there.splitlines(keepends=True)
        lines[target.first - 1 : target.last] = [merged]
        return "" if conflicts else "".join(lines)

    def _line(self, hunk: Hunk) -> int:
        """Return the number, from 1, of the first line of `base` that the hunk changes."""
        return hunk.stated + _first_difference(hunk.old, hunk.new)

    def _definition(self, hunk: Hunk) -> str:
        found = definition_at(self.base, self._line(hunk))
        return found.name if found else ""

    def _target_is_in(self, ours: str, hunk: Hunk) -> bool:
        name = self._definition(hunk)
        # A text that already has markers is no Python; then nothing can be said to be gone.
        names = {one.name for one in definitions(ours)}
        return not name or not names or name in names


@lru_cache(maxsize=512)
def _merged(
    repository: Repository, ours: str, base: str, theirs: str, labels: tuple[str, str, str]
) -> tuple[str, int]:
    """Merge; a trial asks the same again once it is known where to start."""
    return repository.merge(ours, base, theirs, labels)


def _with_import(ours: str, hunk: Hunk) -> str:
    """Return `ours` with the imports that `hunk` adds, or nothing where it is not that simple.

    An import may stand anywhere among a module's imports, so what surrounds it may have changed.
    It goes beside the nearest line of the hunk's context that is there, once.
    """
    if len(hunk.new) != len(hunk.old) + len(hunk.added):
        return ""
    if not _imports_only("".join(hunk.added)):
        return ""
    lines = ours.splitlines(keepends=True)
    at = _first_difference(hunk.old, hunk.new) - 1
    above, below = reversed(hunk.old[:at]), hunk.old[at:]
    places = [
        (distance, lines.index(line) + after)
        for after, context in ((1, above), (0, below))
        for distance, line in enumerate(context)
        if line.strip() and lines.count(line) == 1
    ]
    for _, place in sorted(places):
        text = "".join([*lines[:place], *hunk.added, *lines[place:]])
        try:
            tree = ast.parse(text)
        except SyntaxError:  # within the parentheses of another import
            continue
        first = next((n.lineno for n in tree.body if isinstance(n, _DEFINITION)), len(lines))
        if place < first:
            return text
    return ""


def _imports_only(text: str) -> bool:
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    return all(isinstance(statement, ast.Import | ast.ImportFrom) for statement in body)


def _first_change(before: str, after: str) -> int:
    """Return the number, from 1, of the first line of `after` that is not as in `before`."""
    return _first_difference(before.splitlines(), after.splitlines())


def _first_difference(before: Sequence[str], after: Sequence[str]) -> int:
    pairs = enumerate(zip(before, after, strict=False), start=1)
    return next((n for n, (a, b) in pairs if a != b), min(len(before), len(after)) + 1)


def _collision(ours: str, merged: str) -> str:
    """Return what the other release has where a merge has its first conflict."""
    change = _first_change(ours, merged)
    rest = "".join(merged.splitlines(keepends=True)[change - 1 :])
    found = next(_CONFLICT.finditer(rest))
    text = found["release"].removesuffix("\n") or "(nothing)"
    return f"line {change - 1 + _line_at(rest, found.start())}:\n{text}"


def _conflict_around(text: str, line: int) -> re.Match[str] | None:
    """Return the conflict that a line, from 1, is within."""
    conflicts = _CONFLICT.finditer(text)
    spans = ((one, _line_at(text, one.start()), _line_at(text, one.end())) for one in conflicts)
    return next((one for one, first, behind in spans if first < line < behind), None)


def _line_at(text: str, at: int) -> int:
    """Return the number, from 1, of the line that a place of a text is in."""
    return text.count("\n", 0, at) + 1
