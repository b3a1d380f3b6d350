"""What of `vllm_overlay` a set of patches brings along, and what is written for it.

A wheel or a branch holds the overlay modules that its hooks reach and no others, found by
following imports from the added lines. For each fix a module below `vllm_overlay.provenance`
says where it comes from: one file each, so that fixes can be added one by one, and Python rather
than data, because upstream's own build packages only Python of folders it does not know.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from pprint import pformat

from scripts.patchset.patch import Patch
from scripts.patchset.registry import Fix
from scripts.project import OVERLAY, ROOT

PACKAGE = OVERLAY.name
_CORE = (f"{PACKAGE}", f"{PACKAGE}.__main__", f"{PACKAGE}.provenance")
_NOTICE = "# Modified by vllm-kvfix (Apache-2.0, section 4(b)): "


def overlay_files(patches: Iterable[Patch]) -> dict[str, bytes]:
    """Return the overlay files that `patches` need, by path relative to the site folder."""
    pending = [*_CORE]
    for patch in patches:
        pending += imported_by_hooks(patch)
    files: dict[str, bytes] = {}
    while pending:
        path = module_path(pending.pop())
        if path is None:
            continue
        name = path.relative_to(ROOT).as_posix()
        if name in files:
            continue
        files[name] = path.read_bytes()
        pending += imported_modules(ast.parse(files[name], name))
        package = path.parent if path.name != "__init__.py" else path.parent.parent
        if package.is_relative_to(OVERLAY):  # the packages above must exist as well
            pending.append(".".join(package.relative_to(ROOT).parts))
    return files


def module_path(module: str) -> Path | None:
    """Return the file of the overlay module called `module`, or None where it is no such."""
    if module.split(".")[0] != PACKAGE:
        return None
    base = ROOT.joinpath(*module.split("."))
    return next((p for p in (base / "__init__.py", base.with_suffix(".py")) if p.is_file()), None)


def imported_by_hooks(patch: Patch) -> list[str]:
    """Return the names that the added lines of `patch` import, modules and their members."""
    names: list[str] = []
    for hunks in patch.files.values():
        for hunk in hunks:
            names += imported_modules(ast.parse(_import_statements(hunk.added)))
    return names


def _import_statements(lines: Iterable[str]) -> str:
    """Keep the import statements among added lines, which need not parse as a whole."""
    kept: list[str] = []
    statement = ""  # as far as it goes on in the next line
    for line in (line.partition("#")[0].strip() for line in lines):
        if statement or line.startswith(("import ", "from ")):
            kept.append(line)
            statement += line
            if statement.count("(") == statement.count(")") and not line.endswith("\\"):
                statement = ""
    return "\n".join(kept)


def imported_modules(tree: ast.AST) -> list[str]:
    """Return each imported module; `from a import b` gives a and a.b, as b may be a module."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


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
