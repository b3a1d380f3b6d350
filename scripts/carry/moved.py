"""Where code went: definitions by name and by similarity.

The similarity of a piece of code to another is the share of its lines that the other has too,
indentation aside. A file that was split in three is found in all three.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath

from scripts.system.errors import GitError
from scripts.system.git import Repository

_SIMILAR = 0.5  # below it, what is alike is mostly what all code shares
_COMMON = 20  # modules that define a name
_MOST = 3  # places that are named; a person reads them


@dataclass(frozen=True)
class Definition:
    """A function or class: its dotted name within the file, and its lines, from 1, both included.

    Decorators belong to it.
    """

    name: str
    first: int
    last: int

    def cut(self, text: str) -> str:
        """Return its lines out of the module's text."""
        return "".join(_lines(text)[self.first - 1 : self.last])


@dataclass(frozen=True)
class Place:
    """Where a piece of code may have gone; `share` of its lines, from 0 to 1, are there."""

    path: str
    name: str
    share: float

    def __str__(self) -> str:
        return f"{self.path}{f', {self.name}' if self.name else ''} ({self.share:.0%} of its lines)"


@lru_cache(maxsize=512)
def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


@lru_cache(maxsize=512)
def definitions(text: str) -> tuple[Definition, ...]:
    """Return all functions and classes of a module, outer ones first; none where it is no Python.

    Methods are named `Class.method`.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ()
    return tuple(_below(tree, ""))


def _below(node: ast.AST, prefix: str) -> Iterator[Definition]:
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{child.name}" if prefix else child.name
            first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
            yield Definition(name, first, child.end_lineno or child.lineno)
        yield from _below(child, name)


def definition_at(text: str, line: int) -> Definition | None:
    """Return the innermost definition that holds `line` (from 1) of `text`."""
    around = [one for one in definitions(text) if one.first <= line <= one.last]
    return max(around, key=lambda one: (one.first, -one.last), default=None)


def moved_to(
    was: Callable[[str], str],
    definition: Definition,
    path: str,
    repository: Repository,
    revision: str,
) -> Place | None:
    """Return the one place where `revision` has a definition, under its own name; None: no such.

    It is the only new one of that name that has half of its lines or more.

    Args:
        was: Text, by path, that has it; empty where there is no such file.
        definition: The function or class.
        path: Path of its module.
        repository: Where to look.
        revision: In which tree.
    """
    wanted = _counted(definition.cut(was(path)))
    simple = definition.name.rpartition(".")[2]
    found = [
        Place(other, one.name, _share(wanted, lines))
        for other, there in _holding(repository, revision, simple, path).items()
        for one, lines in _parts(there)
        if one.name.rpartition(".")[2] == simple
        and _share(wanted, lines) >= _SIMILAR
        and all(old.name != one.name for old in definitions(was(other)))
    ]
    return found[0] if len(found) == 1 else None


def module_moved_to(
    was: Callable[[str], str],
    names: Collection[str],
    path: str,
    repository: Repository,
    revision: str,
) -> str | None:
    """Return the one module of `revision` that is the module `path`, elsewhere; None: no such.

    It is the only new one with half of its lines or more, and defines what has to be there.

    Args:
        was: Text, by path, that has the module; empty where there is no such file.
        names: What it has to define, by dotted name; one at least.
        path: Where it was.
        repository: Where to look.
        revision: In which tree.
    """
    if not names:
        return None
    wanted = _counted(was(path))
    simple = min(names).rpartition(".")[2]
    found = [
        other
        for other, there in _holding(repository, revision, simple, path).items()
        if _share(wanted, _counted(there)) >= _SIMILAR
        and {*names} <= {one.name for one in definitions(there)}
        and not was(other)
    ]
    return found[0] if len(found) == 1 else None


def _holding(repository: Repository, revision: str, simple: str, path: str) -> dict[str, str]:
    """Return the modules that define `simple`: of all, or beside `path` if it is everywhere."""
    named = _naming(repository, revision, simple)
    return named or _texts(repository, revision, f"{PurePosixPath(path).parent}/*.py")


def where_it_went(
    text: str, definition: Definition | None, path: str, repository: Repository, revision: str
) -> tuple[Place, ...]:
    """Return where `revision` has what is in `text`, most alike first.

    Args:
        text: The module that held it.
        definition: The function or class that is looked for; None: the whole module.
        path: Path of that module.
        repository: Where to look.
        revision: In which tree.
    """
    wanted = _counted(definition.cut(text) if definition else text)
    simple = definition.name.rpartition(".")[2] if definition else ""
    modules = dict(_near(repository, revision, str(PurePosixPath(path).parent)))
    if simple:
        modules |= _naming(repository, revision, simple)
    found: list[tuple[bool, Place]] = []
    for other, there in modules.items():
        if definition is None:
            found.append((False, Place(other, "", _share(wanted, _counted(there)))))
            continue
        for one, lines in _parts(there):
            same = one.name.rpartition(".")[2] == simple
            # A class that holds the function is like it as well; the function says more.
            if same or lines.total() < 2 * wanted.total():
                found.append((same, Place(other, one.name, _share(wanted, lines))))
    fitting = [(same, place) for same, place in found if same or place.share >= _SIMILAR]
    fitting.sort(key=lambda pair: (-pair[1].share, not pair[0], pair[1].path, pair[1].name))
    return tuple(place for _, place in fitting[:_MOST])


@lru_cache(maxsize=64)
def _near(repository: Repository, revision: str, folder: str) -> dict[str, str]:
    """Return the modules of `folder`, one folder up and all below: code mostly moves that far."""
    near = PurePosixPath(folder)
    while not repository.run("ls-tree", revision, "--", str(near)) and near.parent != near:
        near = near.parent
    return _texts(repository, revision, f"{near.parent}/*.py")


@lru_cache(maxsize=512)
def _naming(repository: Repository, revision: str, simple: str) -> dict[str, str]:
    """Return the modules of vLLM that define the name `simple`."""
    named = rf"^\s*(async def|def|class) {simple}\b"
    rows = _grep(repository, "-l", "-E", "-e", named, revision, "--", "vllm/*.py")
    # A name that is everywhere, such as __init__, leads nowhere.
    if not 0 < len(rows) <= _COMMON:
        return {}
    return _texts(repository, revision, *(row.partition(":")[2] for row in rows))


def _texts(repository: Repository, revision: str, *paths: str) -> dict[str, str]:
    """Return the text of each module that `paths`, or patterns, name: one process for all."""
    texts: dict[str, list[str]] = {}
    for row in _grep(repository, "-z", "-e", "", revision, "--", *paths):  # every line
        path, _, line = row.partition("\0")
        texts.setdefault(path.partition(":")[2], []).append(line)
    return {path: "\n".join(lines) + "\n" for path, lines in texts.items()}


def _grep(repository: Repository, *words: str) -> list[str]:
    try:
        return repository.run("grep", *words).split("\n")[:-1]
    except GitError as error:
        if getattr(error.__cause__, "status", None) != 1:  # 1: nothing found
            raise
        return []


@lru_cache(maxsize=512)
def _parts(text: str) -> tuple[tuple[Definition, Counter[str]], ...]:
    return tuple((one, _counted(one.cut(text))) for one in definitions(text))


def _counted(text: str) -> Counter[str]:
    return Counter(filter(None, map(str.strip, text.splitlines())))


def _share(wanted: Counter[str], there: Counter[str]) -> float:
    common = sum(min(count, there[line]) for line, count in wanted.items() if line in there)
    return common / wanted.total() if wanted else 0.0
