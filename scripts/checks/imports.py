"""Can each module of the overlay be imported first?

A hook makes one of upstream's modules import ours, and ours may import others of upstream's. Where
these lead back, Python hands out a module that has run in part, and what its importer wants of it
may not be there: "cannot import name ... from partially initialized module". Whether that happens
hangs on which of them a process happens to import first, so tests that import another one do not
notice, and a server does not start.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from scripts.patchset.overlay import PACKAGE

_PACKAGES = ("vllm", PACKAGE)


def import_faults(tree: Path) -> list[str]:
    """Say which modules of the overlay are imported from outside a circle that they are in.

    Within one, modules come in the order of whatever upstream's module leads into it, which is the
    same in each process.

    Args:
        tree: A patched tree, with `vllm` and the overlay in it.
    """
    graph = _Graph(tree)
    overlay = [graph.name_of(path) for path in sorted((tree / PACKAGE).rglob("*.py"))]
    reached = {name: graph.reachable(name) for name in overlay}
    return [
        f"{importer} imports {name}, which is in the middle of importing itself then, if nobody "
        f"has imported {_first(graph, name, reached)} before; let {name} import that within a "
        "function"
        for name in overlay
        if name in reached[name]
        for importer in overlay
        if name in graph.imported(importer) and importer not in reached[name]
    ]


def _first(graph: _Graph, name: str, reached: dict[str, set[str]]) -> str:
    return next(one for one in graph.imported(name) if name in graph.reachable(one) | {one})


class _Graph:
    """Which modules below `tree` import which as they are imported themselves."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self.imported = cache(self._imported)
        self._there = cache(self._path_of)

    def name_of(self, path: Path) -> str:
        """Return the name by which the module in `path` is imported."""
        parts = path.relative_to(self._tree).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def reachable(self, name: str) -> set[str]:
        """Return all that is imported with `name`, itself only where that leads back to it."""
        found: set[str] = set()
        waiting = [name]
        while waiting:
            new = set(self.imported(waiting.pop())) - found
            found |= new
            waiting.extend(new)
        return found

    def _path_of(self, name: str) -> Path | None:
        path = self._tree.joinpath(*name.split("."))
        paths = (path / "__init__.py", path.with_suffix(".py"))
        return next((path for path in paths if path.is_file()), None)

    def _imported(self, name: str) -> Sequence[str]:
        """Return what `name` imports at its top, with the packages around each, outer ones first.

        But for those around itself, which are being imported already.
        """
        path = self._there(name)
        if path is None:
            return ()
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        body = ast.parse(path.read_bytes()).body
        found: dict[str, None] = {}
        for wanted in _imports(body, package):
            parts = wanted.split(".")
            for end in range(1, len(parts) + 1):
                module = ".".join(parts[:end])
                if parts[0] in _PACKAGES and self._there(module):
                    found[module] = None
        return [one for one in found if not f"{name}.".startswith(f"{one}.")]


def _imports(body: Sequence[ast.stmt], package: str) -> Iterator[str]:
    """Yield what may be a module's name in the imports that run as `body` does."""
    for statement in body:
        match statement:
            case ast.Import():
                yield from (alias.name for alias in statement.names)
            case ast.ImportFrom():
                around = package.split(".")[: len(package.split(".")) - statement.level + 1]
                parts = [*(around if statement.level else ()), *filter(None, [statement.module])]
                yield from (".".join([*parts, alias.name]) for alias in statement.names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from _imports(statement.orelse, package)
            case ast.If() | ast.Try() | ast.With() | ast.ClassDef():
                for field in ("body", "orelse", "finalbody"):
                    yield from _imports(getattr(statement, field, []), package)
                for handler in getattr(statement, "handlers", []):
                    yield from _imports(handler.body, package)
