"""Which tests a fix alone can touch: those that enter on stock what its patches change.

All others do what they do on stock, where no line that they run is another one: `regressions` runs
a fix alone on the first only, and takes the others' outcomes from stock. `--again` runs all, which
shows whether that loses anything.

What a test enters is noted by `tests.support.entered` in a run on stock. What patches change is
read from the sources. Where that is more than functions and plain classes, a fix touches all tests:
a line of a module that is no import of a new name, a signature, a class that a decorator or a
library makes.
"""

from __future__ import annotations

import ast
import builtins
import json
import symtable
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path

from scripts.patchset.patch import Patch, apply_patches
from scripts.prove.outcomes import Outcomes
from scripts.upstream.tree import read_source

PLUGIN = "tests.support.entered"
PROCESS = "process"

_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_MADE = ("Struct", "BaseModel", "NamedTuple", "TypedDict", "Enum", "IntEnum", "Protocol")
"""Bases with whose classes there is more to do than to call their methods."""


class ReachesFurtherError(Exception):
    """A change of which it cannot be said who enters it."""


@dataclass(frozen=True)
class Entered:
    """By test, what of vLLM it enters on stock."""

    by_test: Mapping[str, frozenset[str]]

    @classmethod
    def read(cls, file: Path, noted: Outcomes, stock: Outcomes) -> Entered:
        """Read what the plugin wrote, of the tests that did in that run what they do on stock."""
        document = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return cls(
            {
                test: frozenset(names)
                for test, names in document.items()
                if test in noted and test in stock and noted[test].result == stock[test].result
            }
        )

    def touched(self, tests: Iterable[str], changed: frozenset[str] | None) -> set[str]:
        """Return those of the tests that may do something else with what is `changed`."""
        return {
            test
            for test in tests
            if changed is None
            or not (known := self.by_test.get(test))
            or PROCESS in known
            or not changed.isdisjoint(known)
        }


def changed_by(release: str, patches: Sequence[Patch]) -> frozenset[str] | None:
    """Return what `patches` change of a release, as the plugin names it; None if it is too much."""
    texts, _ = apply_patches(patches, partial(read_source, release))
    try:
        return frozenset(
            name
            for path, after in texts.items()
            for name in changes(path, read_source(release, path), after)
        )
    except ReachesFurtherError:
        return None


def changes(path: str, before: str, after: str) -> Iterator[str]:
    """Yield what is another one in a file, by its texts before and after.

    Raises:
        ReachesFurtherError: It is more than what functions and plain classes do.
    """
    old, new = _File(path, before), _File(path, after)
    matcher = SequenceMatcher(None, old.lines, new.lines, autojunk=False)
    for kind, first, last, new_first, new_last in matcher.get_opcodes():
        if kind == "equal":
            continue
        for number in range(first + 1, last + 1):
            if not old.only_imports(number, new, new_names=False):
                old.require_no_signature(old.scope(number), number)
                yield from old.names(old.scope(number))
        for number in range(new_first + 1, new_last + 1):
            if not new.only_imports(number, old, new_names=True):
                scope = new.scope(number)
                new.require_plain(scope)
                if old.has(scope):
                    new.require_no_signature(scope, number)
                yield from old.names(scope)


class _File:
    """A source, and the functions and classes that its lines are in."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.lines = path, text.splitlines()
        self._module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self._tree = ast.parse(text)
        self._scopes = [*_scopes(self._tree, ())]
        self._imports = {
            node: dict(_bound(node))
            for node in self._tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        self._bound = {k: v for names in self._imports.values() for k, v in names.items()}
        module = symtable.symtable(text, path, "exec")
        self._taken = {*module.get_identifiers(), *dir(builtins)}

    def scope(self, number: int) -> tuple[str, ...]:
        """Return the names down to the innermost function or class with that line."""
        within = [name for name, node in self._scopes if _first(node) <= number <= _last(node)]
        return max(within, key=len, default=())

    def names(self, scope: tuple[str, ...]) -> Iterator[str]:
        """Yield what the plugin calls a scope of this file, or the nearest one above it.

        Raises:
            ReachesFurtherError: There is none, or the change is of a kind that reaches further.
        """
        while scope and not self.has(scope):
            scope = scope[:-1]  # what is new in it
        if not scope:
            raise ReachesFurtherError
        self.require_plain(scope)
        for node in self._nodes(scope):
            if isinstance(node, ast.ClassDef):
                yield f"{self._module}:{'.'.join(scope)}"
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{self.path}:{_first(inner)}"

    def require_plain(self, scope: tuple[str, ...]) -> None:
        """Raise where a scope is a class with which more is done than to call its methods.

        Raises:
            ReachesFurtherError: It is.
        """
        for node in self._nodes(scope):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                if node.decorator_list or node.keywords or not bases.isdisjoint(_MADE):
                    raise ReachesFurtherError

    def require_no_signature(self, scope: tuple[str, ...], number: int) -> None:
        """Raise where a line is of what a function takes.

        Raises:
            ReachesFurtherError: It is.
        """
        for node in self._nodes(scope):
            if not isinstance(node, ast.ClassDef) and node.lineno <= number < node.body[0].lineno:
                raise ReachesFurtherError

    def has(self, scope: tuple[str, ...]) -> bool:
        """Whether there is a function or class of that name."""
        return bool(self._nodes(scope))

    def _nodes(self, scope: tuple[str, ...]) -> list[_Scope]:
        return [node for name, node in self._scopes if name == scope]

    def only_imports(self, number: int, other: _File, *, new_names: bool) -> bool:
        """Whether a line is of an import, at the top of the module, that changes nobody's names.

        What it brings the `other` one has from the same place; or, if that may be so, has no such
        name.
        """
        for node, names in self._imports.items():
            if _first(node) <= number <= _last(node):
                return all(
                    other._bound.get(name) == place or (new_names and name not in other._taken)
                    for name, place in names.items()
                )
        return not self.lines[number - 1].strip() and not self.scope(number)


def _bound(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each name that an import binds, and where it comes from."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, (f"{'.' * node.level}{node.module}", alias.name)
        else:
            yield alias.asname or alias.name.partition(".")[0], (alias.name, alias.asname or "")


def _scopes(tree: ast.AST, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], _Scope]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Scope):
            yield (*above, node.name), node
            yield from _scopes(node, (*above, node.name))
        else:
            yield from _scopes(node, above)


def _first(node: ast.stmt) -> int:
    """Return the line at which Python says that a function begins."""
    decorators = node.decorator_list if isinstance(node, _Scope) else []
    return min([node.lineno, *(one.lineno for one in decorators)])


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno
