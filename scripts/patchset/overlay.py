"""What of `vllm_overlay` a set of patches brings along, and what is written for it.

A wheel or a branch holds the overlay modules that its hooks reach and no others, found by
following imports from the added lines. For each fix a module below `vllm_overlay.provenance`
says where it comes from: one file each, so that fixes can be added one by one, and Python rather
than data, because upstream's own build packages only Python of folders it does not know.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from pprint import pformat

from packaging.version import Version

from scripts.patchset.patch import Hunk, Patch
from scripts.patchset.registry import Fix
from scripts.project import OVERLAY, ROOT
from scripts.system.errors import CheckFailedError

PACKAGE = OVERLAY.name
_CORE = (f"{PACKAGE}", f"{PACKAGE}.__main__", f"{PACKAGE}.provenance")
_SCOPE = re.compile(
    r"(?P<words>All releases|From (?P<from>\d\S*) on|Up to (?P<up_to>\d\S*)"
    r"|(?P<first>\d\S*) to (?P<last>\d\S*)): (?P<rest>\S.*)"
)
_IMPORT = re.compile(r"import [\w.]+|from [\w.]+ import ")
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # fields that hold statements
_NOTICE = "# Modified by vllm-kvfix (Apache-2.0, section 4(b)): "


def overlay_files(patches: Iterable[Patch]) -> dict[str, bytes]:
    """Return the overlay files that `patches` need, by path relative to the site folder.

    Raises:
        CheckFailedError: One that is imported is not there.
    """
    pending = [*_CORE]
    for patch in patches:
        pending += imported_by_hooks(patch)
    seen: set[str] = set()  # most names come again and again, and each is a look at the disk
    files: dict[str, bytes] = {}
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        path = module_path(module)
        if path is None:
            _require_member(module)
            continue
        name = path.relative_to(ROOT).as_posix()
        files[name] = path.read_bytes()
        pending += _imported(files[name])
        package = path.parent if path.name != "__init__.py" else path.parent.parent
        if package.is_relative_to(OVERLAY):  # the packages above must exist as well
            pending.append(".".join(package.relative_to(ROOT).parts))
    return files


@cache
def _imported(source: bytes) -> tuple[str, ...]:
    return tuple(imported_modules(ast.parse(source)))


def _require_member(name: str) -> None:
    """Raise where `name` is no module, and could be nothing else that the overlay has."""
    above, _, member = name.rpartition(".")
    if name.split(".")[0] != PACKAGE:
        return
    path = module_path(above) if above else None
    if path is None or (
        path.name == "__init__.py"
        and not re.search(rf"\b{re.escape(member)}\b", path.read_text(encoding="utf-8"))
    ):
        missing = name if path else above
        raise CheckFailedError(
            f"{missing} is imported, and there is no {missing.replace('.', '/')}.py",
            expected="a checkout of kvfix that is whole",
            next_step=f"see what is missing: git status --short {PACKAGE}",
        )


def module_path(module: str) -> Path | None:
    """Return the file of the overlay module called `module`, or None where it is no such."""
    if module.split(".")[0] != PACKAGE:
        return None
    base = ROOT.joinpath(*module.split("."))
    return next((p for p in (base / "__init__.py", base.with_suffix(".py")) if p.is_file()), None)


def imported_by_hooks(patch: Patch) -> list[str]:
    """Return the names that `patch` imports, modules and their members.

    Also where it only puts another name into an import that is there already.
    """
    names: list[str] = []
    for hunks in patch.files.values():
        for hunk in hunks:
            names += imported_modules(ast.parse(_import_statements(hunk)))
    return names


def _import_statements(hunk: Hunk) -> str:
    """Keep the import statements of the new text that an added line is part of."""
    added = {_code(line) for line in hunk.added} - {"", ")"}  # which stand everywhere
    kept: list[str] = []
    statement: list[str] = []  # as far as it goes on in the next line
    for line in map(_code, hunk.new):
        if statement or _IMPORT.match(line):
            statement.append(line)
            text = "".join(statement)
            if text.count("(") == text.count(")") and not line.endswith("\\"):
                kept += statement if added.intersection(statement) else ()
                statement = []
    if added.intersection(statement):  # cut off by the hunk's end
        kept += [*statement, ")"]
    return "\n".join(kept)


def _code(line: str) -> str:
    return line.partition("#")[0].strip()


def imported_modules(tree: ast.AST) -> list[str]:
    """Return each imported module; `from a import b` gives a and a.b, as b may be a module."""
    names: list[str] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for block in _BLOCKS:  # no import lies in an expression, which most nodes are
            pending += getattr(node, block, ())
    return names


@dataclass(frozen=True)
class Scope:
    """Which releases a module is for, as the first line of its docstring says.

    Attributes:
        words: "All releases", "From 0.24.0 on", "Up to 0.22.1" or "0.20.0 to 0.22.1". A bound is
            where upstream changes, carried or not, so a release in between makes nothing false.
        first, last: the bounds, both included; None where there is none.
        about: the rest of the line.
    """

    words: str
    first: str | None
    last: str | None
    about: str

    def holds(self, release: str) -> bool:
        """Whether `release` is among them."""
        version = Version(release)
        return (self.first is None or Version(self.first) <= version) and (
            self.last is None or version <= Version(self.last)
        )


def scope_of(path: Path) -> Scope | None:
    """Read which releases the overlay module in `path` is for; None where it does not say."""
    line = (ast.get_docstring(ast.parse(path.read_bytes())) or "").partition("\n")[0]
    said = _SCOPE.fullmatch(line)
    if said is None:
        return None
    return Scope(
        said["words"], said["from"] or said["first"], said["up_to"] or said["last"], said["rest"]
    )


def needed_scope(said: Scope, needing: Sequence[str], releases: Sequence[str]) -> Scope:
    """Return what `said` is as long as `needing`, of all `releases`, are those that it holds.

    Otherwise what the first and the last of them make it, as after a fix has left the set.
    """
    if not needing or all(said.holds(each) == (each in needing) for each in releases):
        return said
    first = None if needing[0] == releases[0] else needing[0]
    last = None if needing[-1] == releases[-1] else needing[-1]
    if first is not None:
        words = f"{first} to {last}" if last is not None else f"From {first} on"
    else:
        words = f"Up to {last}" if last is not None else "All releases"
    return Scope(words, first, last, said.about)


def scoped_modules() -> list[Path]:
    """Return the overlay modules that are not in every build whatever the patches."""
    return [path for path in sorted(OVERLAY.rglob("*.py")) if not path.name.startswith("__")]


def uses(patches: Mapping[str, Iterable[Patch]]) -> dict[Path, dict[str, list[str]]]:
    """Return for each module which fixes need it on which release.

    `patches` are those of each release. A fix needs what its hooks import and what that imports.
    """
    found: dict[Path, dict[str, list[str]]] = {path: {} for path in scoped_modules()}
    needed: dict[int, list[Path]] = {}  # most patches serve several releases
    for release, each in patches.items():
        for patch in each:
            if id(patch) not in needed:
                files = {ROOT / name for name in overlay_files([patch])}
                needed[id(patch)] = [path for path in found if path in files]
            for path in needed[id(patch)]:
                found[path].setdefault(release, []).append(patch.fix_id)
    return found


def provenance(fix: Fix) -> tuple[str, bytes]:
    """Return path and text of the module that tells where `fix` comes from."""
    record = {
        "id": fix.id,
        "title": fix.title,
        "kind": fix.kind,
        "upstream_pr": fix.upstream_pr,
        "depends_on": list(fix.depends_on),
        "tests": list(fix.tests),
    }
    return _record(f"fix_{fix.id.lower()}", f"Fix {fix.id} is in this build.", "FIX", record)


def build_record(values: Mapping[str, str]) -> tuple[str, bytes]:
    """Return path and text of the module that tells what a wheel was made from."""
    return _record("build", "What this wheel was made from.", "BUILD", dict(values))


def files_record(files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Return path and text of the module with the sha256 of `files`, by path in the site folder."""
    digests = {path: hashlib.sha256(files[path]).hexdigest() for path in sorted(files)}
    return _record("files", "What this wheel changed or added, by sha256.", "FILES", digests)


def _record(module: str, title: str, name: str, value: Mapping[str, object]) -> tuple[str, bytes]:
    body = pformat(dict(value), width=96, sort_dicts=False)
    text = f'"""{title}"""\n\n# SPDX-License-Identifier: Apache-2.0\n\n{name} = {body}\n'
    return f"{PACKAGE}/provenance/{module}.py", text.encode()


def stamp(text: str, fix_ids: Iterable[str]) -> str:
    """Return `text` with the line near its top that says it was changed, and by which fixes.

    The line is written when patches are applied and stands in none of them: two fixes for one
    file would otherwise have to change the same line, and neither would apply without the other.
    """
    lines = [line for line in StringIO(text) if not line.startswith(_NOTICE)]
    at = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    top = "".join(lines[:at])
    top += "\n" if top and not top.endswith("\n") else ""
    return "".join([top, f"{_NOTICE}{', '.join(fix_ids)}\n", *lines[at:]])


def stamp_all(texts: Mapping[str, str], patches: Iterable[Patch]) -> dict[str, str]:
    """Stamp each file with the fixes among `patches` that change it, in their order."""
    patches = tuple(patches)
    return {
        path: stamp(text, [patch.fix_id for patch in patches if path in patch.files])
        for path, text in texts.items()
    }
