"""Which code below tests/ a test can run, read from the code and never run.

pytest imports a test's file, the `conftest.py` above it and its plugins: all of these counts. Of a
module that they import counts what runs when it is imported, and of its functions, classes and
constants those that are named by what counts already. A class counts as a whole: which methods of
an object are called, nobody can read. Where the code does not say what it takes from a module, all
of it counts:

- the module is handed around (`getattr(module, name)`, `mock.patch.object(module, ...)`);
- it is imported with a star, or something in it is assigned from outside;
- a text names it, as a module or a path: `"tests.programs.x"`, `"x.py"`, in part `f"tests.{x}"`;
- it looks at itself: `globals()`, `eval`, `__file__`, `sys.modules[computed]`.

A module is called by its own name and not by its folder, so that moving it changes nothing.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from scripts.prove.code import is_idle, normal, origin, reads_docstrings

_TESTS = "tests"
_NAMED = re.compile(r"\btests[./][\w./]*|(?<![\w./])[\w./-]{1,200}\.\w{1,20}$", re.ASCII)
_OF_ITSELF = frozenset(
    {"globals", "eval", "exec", "__import__", "__file__", "__package__", "__spec__", "__loader__"}
)
_NAMESPACES = frozenset({"vars", "dir", "locals"})

# What may stand around a function or class, or in it, and neither fails nor does anything there.
_QUIET = frozenset(
    {
        "abc.abstractmethod", "contextlib.asynccontextmanager", "contextlib.contextmanager",
        "dataclasses.dataclass", "dataclasses.field", "functools.cache", "functools.lru_cache",
        "typing.Any", "typing.NamedTuple", "typing.Protocol", "typing.TypedDict",
    }
)  # fmt: skip

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Unit:
    """Part of a module: what runs on import (no name), or one of its definitions."""

    module: Path
    name: str = ""


@dataclass
class _Seen:
    """What a piece of code names: other code below tests/, and modules of which all counts."""

    units: set[Unit] = field(default_factory=set)
    whole: set[Path] = field(default_factory=set)
    files: set[Path] = field(default_factory=set)
    origins: dict[str, str] = field(default_factory=dict)


class Sources:
    """The code below one tests/ folder, read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[Path, Module] = {}

    def reached(self, tests: Sequence[str], *plugins: str) -> dict[Unit, str]:
        """Return all code, in normal form, that can decide what becomes of `tests`.

        Args:
            tests: pytest node ids; a file that is not there counts as empty.
            plugins: The modules that pytest loads with them.
        """
        files = [self.root / test.partition("::")[0] for test in tests]
        files += [folder / "conftest.py" for file in files for folder in file.parents]
        for plugin in plugins:
            files.append(self.root.joinpath(*plugin.split(".")).with_suffix(".py"))
        found: dict[Unit, str] = {}
        pending: list[Unit] = []
        for file in files:
            if file.is_file() and file.is_relative_to(self.root):
                pending += [*self.module(file).units, *self.module(file).taken]
        while pending:
            unit = pending.pop()
            if unit in found:
                continue
            if unit.module.suffix != ".py":
                found[unit] = unit.module.read_bytes().hex()
                continue
            text, seen = self.module(unit.module).read(unit.name)
            found[unit] = text
            pending += seen.units
            pending += [one for path in seen.whole for one in self.module(path).units]
            pending += [Unit(path) for path in seen.files]
            pending.append(Unit(unit.module))
            packages = (folder / "__init__.py" for folder in unit.module.parents)
            pending += [Unit(p) for p in packages if p.is_relative_to(self.root) and p.is_file()]
        return found

    def text(self, tests: Sequence[str], *plugins: str) -> str:
        """Return what `reached` finds, the same for every order and every folder of modules."""
        found = self.reached(tests, *plugins)
        stems: dict[str, set[Path]] = {}
        for unit in found:
            stems.setdefault(unit.module.name, set()).add(unit.module)
        return "\n".join(
            sorted(
                f"{unit.module.name if len(stems[unit.module.name]) == 1 else self._path(unit)}"
                f":{unit.name}:{text}"
                for unit, text in found.items()
            )
        )

    def _path(self, unit: Unit) -> str:
        return unit.module.relative_to(self.root).as_posix()

    def module(self, path: Path) -> Module:
        """Return a module, parsed.

        Raises:
            SyntaxError: It is no Python.
        """
        if path not in self._modules:
            self._modules[path] = Module(path, self)
        return self._modules[path]

    def find(self, dotted: str) -> tuple[Path, str] | None:
        """Return the module below tests/ that `dotted` names or is in, and what is left."""
        parts = dotted.split(".")
        if parts[0] != _TESTS:
            return None
        for count in range(len(parts), 1, -1):
            base = self.root.joinpath(*parts[:count])
            for path in (base.with_suffix(".py"), base / "__init__.py"):
                if path.is_file():
                    return path, ".".join(parts[count:])
        return None

    def named_in(self, text: str, beside: Path) -> Iterator[Path]:
        """Yield the files below tests/ that a text in the code names, or may name in part."""
        for match in _NAMED.finditer(text):
            said = match[0].rstrip("./")
            if said.startswith((f"{_TESTS}.", f"{_TESTS}/")):
                inside = said.removesuffix(".py").replace("/", ".")
                found = self.find(inside)
                folder = self.root.joinpath(*inside.split("."))
                while found is None and not folder.is_dir():
                    folder = folder.parent
                if found is not None:
                    yield found[0]
                elif folder != self.root / _TESTS:
                    yield from folder.rglob("*.py")
            elif (near := beside.parent / said).is_file():
                yield near
            elif said.endswith(".py"):
                yield from (self.root / _TESTS).rglob(Path(said).name)


class Module:
    """One file below tests/: what runs when it is imported, and its definitions."""

    def __init__(self, path: Path, sources: Sources) -> None:
        self.path = path
        self.sources = sources
        self.tree = ast.parse(path.read_bytes(), str(path))
        self._documented = reads_docstrings(self.tree)
        self._imports: list[ast.Import | ast.ImportFrom] = []
        self._running: list[ast.stmt] = []
        self.definitions: dict[str, ast.stmt] = {}
        self._aliases: dict[str, str] = {}
        self._hidden: list[str] = []
        self._read: dict[str, tuple[str, _Seen]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._note_import(node)  # those inside functions as well: names are what counts
        self._sort()

    @cached_property
    def units(self) -> list[Unit]:
        """Return all of it."""
        return [Unit(self.path, name) for name in ("", *self.definitions)]

    @cached_property
    def taken(self) -> list[Unit]:
        """Return what it imports by name: of a test's file fixtures, which need not be named."""
        seen = _Seen()
        for dotted in self._aliases.values():
            found = self.sources.find(dotted)
            if found is not None and found[1]:
                self._follow(dotted, seen)
        return [*seen.units]

    def read(self, name: str) -> tuple[str, _Seen]:
        """Return a definition, or what runs on import (no name), in normal form; what it names."""
        if name not in self._read:
            seen = _Seen()
            body = [self.definitions[name]] if name else [*self._imports, *self._running]
            for statement in body:
                self._look(statement, seen)
            for dotted in () if name else self._hidden:
                self._follow(dotted, seen)
            text = normal(body, documented=self._documented, spell=self._spell)
            origins = [f"{alias}={whence}" for alias, whence in sorted(seen.origins.items())]
            self._read[name] = " ".join([text, *origins]), seen
        return self._read[name]

    def resolve(self, name: str, seen: _Seen) -> None:
        """Note in `seen` what `name`, as this module knows it, stands for."""
        if name in self.definitions:
            seen.units.add(Unit(self.path, name))
        elif name in self._aliases:
            self._follow(self._aliases[name], seen)

    def has(self, name: str) -> bool:
        """Whether the module itself says what `name` is."""
        return name in self.definitions or name in self._aliases or name in self._bound

    # ------------------------------------------------------------ reading a file

    def _note_import(self, node: ast.Import | ast.ImportFrom) -> None:
        base = self._base(node)
        for alias in node.names:
            name, dotted = alias.asname or alias.name, ".".join(filter(None, (base, alias.name)))
            if isinstance(node, ast.Import) and alias.asname is None:
                name = dotted = alias.name.partition(".")[0]
            if self._aliases.setdefault(name, dotted) != dotted:
                self._hidden.append(dotted)

    def _base(self, node: ast.Import | ast.ImportFrom) -> str:
        """Return the module from which an import takes names, without dots in front."""
        if isinstance(node, ast.Import) or not node.level:
            return origin(node)
        package = self.path.relative_to(self.sources.root).parts[: -node.level]
        return ".".join([*package, *filter(None, [node.module])])

    def _sort(self) -> None:
        """Tell what runs on import from definitions that do nothing until they are named."""
        later = any(
            isinstance(node, ast.ImportFrom)
            and node.module == "__future__"
            and any(alias.name == "annotations" for alias in node.names)
            for node in self.tree.body
        )
        counts: dict[str, int] = {}
        for statement in self.tree.body:
            for name in _names_bound_by(statement):
                counts[name] = counts.get(name, 0) + 1
        self._bound = frozenset(counts)
        for statement in self.tree.body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                self._imports.append(statement)
                continue
            names = list(_names_bound_by(statement))
            once = len(names) == 1 and counts[names[0]] == 1 and names[0] not in self._aliases
            if once and self._is_quiet(statement, later):
                self.definitions[names[0]] = statement
                continue
            if once and isinstance(statement, (*_FUNCTION, ast.ClassDef)):
                made = self._made(statement, later)
                if made is not statement:
                    self.definitions[names[0]] = statement
                statement = made
            self._running.append(statement)

    def _made(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, later: bool
    ) -> ast.stmt:
        """Return what of a function or class runs when it is made; all, if that may call it."""
        quiet = all(self._is_quiet(one, later) for one in node.decorator_list)
        body: list[ast.stmt] = []
        if isinstance(node, ast.ClassDef):
            quiet = quiet and not node.keywords  # a metaclass may do anything
            for one in node.body:
                if isinstance(one, (*_FUNCTION, ast.ClassDef)):
                    body.append(self._made(one, later))
                else:
                    quiet = quiet and self._is_quiet(one, later)
        made = copy.copy(node)
        made.body = body
        return made if quiet else node

    def _is_quiet(self, node: ast.AST | None, later: bool) -> bool:
        """Whether nothing happens, and nothing can fail, where `node` is run.

        Args:
            node: A statement at the top of a module or class, or an expression in one.
            later: Annotations are not evaluated.
        """

        def all_quiet(*nodes: ast.AST | None) -> bool:
            return all(self._is_quiet(one, later) for one in nodes)

        if node is None or isinstance(node, (ast.Constant, ast.Pass)):
            return True
        if isinstance(node, ast.arguments):
            hints = (one.annotation for one in ast.walk(node) if isinstance(one, ast.arg))
            return all_quiet(*node.defaults, *node.kw_defaults) and (later or all_quiet(*hints))
        if isinstance(node, ast.Lambda):
            return all_quiet(node.args)
        if isinstance(node, _FUNCTION):
            hint = None if later else node.returns
            return all_quiet(node.args, hint, *node.decorator_list)
        if isinstance(node, ast.ClassDef):
            return not node.keywords and all_quiet(*node.decorator_list, *node.bases, *node.body)
        if isinstance(node, ast.Assign):
            return all(isinstance(one, ast.Name) for one in node.targets) and all_quiet(node.value)
        if isinstance(node, ast.AnnAssign):
            simple = isinstance(node.target, ast.Name)
            return simple and all_quiet(node.value) and (later or all_quiet(node.annotation))
        if isinstance(node, ast.Expr):
            return all_quiet(node.value)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return all_quiet(*node.elts)
        if isinstance(node, ast.Dict):
            return None not in node.keys and all_quiet(*node.keys, *node.values)
        if isinstance(node, ast.Call):
            called = self._dotted(node.func) in _QUIET
            return called and all_quiet(*node.args, *(one.value for one in node.keywords))
        if isinstance(node, (ast.Name, ast.Attribute)):
            dotted = self._dotted(node)
            return dotted in _QUIET or (hasattr(builtins, dotted) and dotted not in self._bound)
        return False

    # ------------------------------------------------------------ what code names

    def _look(self, node: ast.AST, seen: _Seen) -> None:
        """Note in `seen` what the code in `node` names."""
        if is_idle(node) and not self._documented:
            return
        if isinstance(node, (ast.Name, ast.Attribute)):
            self._look_at_name(node, seen)
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._look_at_import(node, seen)
            return
        if isinstance(node, ast.arg):
            self.resolve(node.arg, seen)  # a fixture goes by the name of an argument
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.resolve(node.value, seen)
            for path in self.sources.named_in(node.value, self.path):
                (seen.whole if path.suffix == ".py" else seen.files).add(path)
        elif self._looks_at_itself(node):
            seen.whole.add(self.path)
        for child in ast.iter_child_nodes(node):
            self._look(child, seen)

    def _looks_at_itself(self, node: ast.AST) -> bool:
        """Whether code takes something out of this module, or of any, and does not say what."""
        if isinstance(node, ast.Subscript) and self._dotted(node.value) == "sys.modules":
            return not all(map(self._is_foreign, ast.walk(node.slice)))
        if isinstance(node, ast.Call) and not node.args:
            return self._dotted(node.func) in _NAMESPACES
        return isinstance(node, ast.Name) and node.id in _OF_ITSELF

    def _look_at_name(self, node: ast.Name | ast.Attribute, seen: _Seen) -> None:
        base: ast.AST = node
        while isinstance(base, ast.Attribute):
            base = base.value
        if not isinstance(base, ast.Name):
            self._look(base, seen)
            return
        name, dotted = base.id, self._dotted(node)
        if self._looks_at_itself(base):
            seen.whole.add(self.path)
        if name in self.definitions:
            seen.units.add(Unit(self.path, name))
        elif name in self._aliases:
            self._follow(dotted, seen)
            found = self.sources.find(dotted)
            if found is not None and not isinstance(node.ctx, ast.Load):
                seen.whole.add(found[0])
            seen.origins[name] = self._spell(self._aliases[name])

    def _look_at_import(self, node: ast.Import | ast.ImportFrom, seen: _Seen) -> None:
        base = self._base(node)
        for alias in node.names:
            star = alias.name == "*"
            found = self.sources.find(".".join(filter(None, (base, "" if star else alias.name))))
            if found is not None:
                seen.units.add(Unit(found[0]))
                if star:
                    seen.whole.add(found[0])

    def _follow(self, dotted: str, seen: _Seen) -> None:
        """Note what a dotted name stands for, through modules that only pass it on."""
        found = self.sources.find(dotted)
        if found is None:
            return
        path, rest = found
        module = self.sources.module(path)
        seen.units.add(Unit(path))
        name = rest.partition(".")[0]
        if not name or not module.has(name):
            seen.whole.add(path)
        else:
            module.resolve(name, seen)

    def _dotted(self, node: ast.AST) -> str:
        """Return `a.b.c` as its full name, or nothing where it does not begin with a name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self._aliases.get(node.id, node.id), *reversed(parts)])

    def _is_foreign(self, node: ast.AST) -> bool:
        """Whether a name comes from elsewhere than tests/; what is no name is."""
        if not isinstance(node, ast.Name):
            return True
        dotted = self._aliases.get(node.id, "")
        found = self.sources.find(dotted)
        if found is None or not found[1]:
            return bool(dotted) and found is None
        return self.sources.module(found[0])._is_foreign(ast.Name(found[1]))

    def _spell(self, text: str) -> str:
        """Return `text` in which a module of tests/ goes by its own name, without its folder."""

        def own_name(match: re.Match[str]) -> str:
            found = self.sources.find(match[0].removesuffix(".py").replace("/", ".").rstrip("."))
            if found is None:
                return match[0]
            path, rest = found
            return ".".join(filter(None, (f"<{path.stem}>", rest)))

        return re.sub(r"\btests[./][\w./]*\w", own_name, text)


def _names_bound_by(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement at the top of a module binds, imports apart."""
    if isinstance(statement, (*_FUNCTION, ast.ClassDef)):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, (*_FUNCTION, ast.ClassDef)):
            yield node.name
