"""What a record stands for: its key is a hash of all that can change the outcomes of the run.

That is the release, what the environment holds beside it, how pytest is set and started, and the
code of the tests and of what they reach (`scripts.prove.reach`); where there are patches also the
files that they change, as they are then, and the overlay modules that these import. Of code counts
what it does: comments, docstrings, format, the order of imports and the folder of a helper do not.

A key is the same on every machine: the release goes in by its sdist, not by one of its wheels.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable
from functools import cache, partial
from typing import Literal

from scripts.patchset.overlay import imported_modules, module_path
from scripts.patchset.patch import Patch, apply_patches
from scripts.patchset.registry import Fix
from scripts.patchset.target import Target
from scripts.project import ROOT, read_toml
from scripts.prove.code import plain
from scripts.prove.environment import NO_GPU, needs
from scripts.prove.forks import PROGRAM
from scripts.prove.pytest import FLAGS, PLUGINS
from scripts.prove.reach import Sources
from scripts.upstream.lock import load_lock
from scripts.upstream.tree import read_source

Side = Literal["stock", "patched"]


def inputs(fix: Fix, release: str, side: Side) -> str:
    """Return the key of a run of the tests of `fix` on one side of `release`.

    Raises:
        PatchDoesNotApplyError: A patch does not fit the release; of the patched side only.
        SyntaxError: A test, or what it imports, is no Python.
    """
    parts = _tested(fix, release)
    if side == "patched":
        parts.append(_patched(release))
    return _hash("\n".join(parts))


def inputs_alone(fixes: Iterable[Fix], release: str, patches: tuple[Patch, ...]) -> dict[str, str]:
    """Return, by fix, the key of a run of its tests on `release` with `patches` alone.

    Raises:
        PatchDoesNotApplyError: A patch does not fit the release without those that are left out.
        SyntaxError: A test, or what it imports, is no Python.
    """
    patched = _with(release, patches)
    return {fix.id: _hash("\n".join([*_tested(fix, release), patched])) for fix in fixes}


def _tested(fix: Fix, release: str) -> list[str]:
    """Return what a run of the tests of `fix` on `release` stands for, but for patches."""
    return [
        load_lock()[release].sdist.sha256,
        _settings(release),
        *fix.left_open_on(release),
        tests_hash(fix),
    ]


def tests_hash(fix: Fix) -> str:
    """Return a hash of the tests of `fix` and of all code below tests/ that they reach."""
    return _reached(fix.tests)


@cache
def _reached(tests: tuple[str, ...]) -> str:
    return _hash("\n".join([*tests, _tests().text(tests, PROGRAM, *PLUGINS)]))


@cache
def _tests() -> Sources:
    return Sources(ROOT)


@cache
def _settings(release: str) -> str:
    """Return what the environment holds beside the release, and how pytest is set and started."""
    options = read_toml(ROOT / "pyproject.toml")["tool"]["pytest"]["ini_options"]
    return json.dumps([needs(release), options, FLAGS, NO_GPU], sort_keys=True)


@cache
def _patched(release: str) -> str:
    return _with(release, Target.of(release).patches)


def _with(release: str, patches: tuple[Patch, ...]) -> str:
    """Return a hash of the files that `patches` change, and of the overlay that these reach."""
    texts, _ = apply_patches(patches, partial(read_source, release))
    parts: dict[str, str] = {}
    pending: list[str] = []
    for path, text in texts.items():
        parts[path], names = _read(path, text)
        pending += names
    while pending:
        name = pending.pop()
        file = module_path(name)
        if file is None or (path := file.relative_to(ROOT).as_posix()) in parts:
            continue
        parts[path], names = _read(path, file.read_text(encoding="utf-8"))
        pending += [*names, name.rpartition(".")[0]]  # an import runs the packages above as well
    return _hash("\n".join(f"{path} {part}" for path, part in sorted(parts.items())))


@cache
def _read(path: str, text: str) -> tuple[str, tuple[str, ...]]:
    """Return a hash of a file's code, and the modules that it imports."""
    if not path.endswith(".py"):
        return _hash(text), ()
    tree = ast.parse(text, path)
    return _hash(plain(tree)), tuple(imported_modules(tree))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
