"""Test functions of a later release, cut out of its files so that they run on an earlier one.

Whole test files of a later release do not run on an earlier release: one name that is missing, and
nothing is collected. A single function often does, with the earlier release's own helpers. It is
cut with `ast`, together with what it needs and the earlier release lacks:

- names that the earlier file defines as well (fakes, fixtures, constants) come from there;
- other helpers, and those of modules below `tests`, are copied from the later release;
- modules of vLLM that were split or moved since are called as the earlier release calls them;
- a function within a function, which pytest never runs, becomes one of the module.

Text of upstream's exists in what is returned only; nothing of it is kept in the repository.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath

from scripts.system.errors import RegistryError

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
MODULES = {
    # 0.24.0 split worker and scheduler into what pull and push have in common, and each of them.
    f"{_NIXL}.base_worker": f"{_NIXL}.worker",
    f"{_NIXL}.pull_worker": f"{_NIXL}.worker",
    f"{_NIXL}.base_scheduler": f"{_NIXL}.scheduler",
    f"{_NIXL}.pull_scheduler": f"{_NIXL}.scheduler",
}
"""Modules of later releases, and which one a release that lacks them has instead."""

CLASSES = {
    "NixlBaseConnectorWorker": "NixlConnectorWorker",
    "NixlPullConnectorWorker": "NixlConnectorWorker",
    "NixlBaseConnectorScheduler": "NixlConnectorScheduler",
    "NixlPullConnectorScheduler": "NixlConnectorScheduler",
}
"""What the classes of `MODULES` are called where these modules are missing."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)


@dataclass(frozen=True)
class Wanted:
    """One function to cut.

    Attributes:
        name: As in a pytest node id, without the file: `test_x`, `TestY::test_x`, or
            `test_y::test_x` for a function within a function.
        fixtures: Names of fixtures of the adapters' module that it runs under.
    """

    name: str
    fixtures: tuple[str, ...] = ()


@dataclass
class _Module:
    """One file of a release, and where its top-level names come from."""

    path: str
    body: list[ast.stmt]
    own: dict[str, ast.stmt] = field(default_factory=dict)
    imported: dict[str, tuple[ast.Import | ast.ImportFrom, ast.alias]] = field(default_factory=dict)

    @classmethod
    def read(cls, tree: Path, path: str) -> _Module:
        text = (tree / path).read_text(encoding="utf-8")
        module = cls(path, ast.parse(text).body)
        module._index(module.body)
        return module

    def _index(self, body: Iterable[ast.stmt], whole: ast.stmt | None = None) -> None:
        for statement in body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                for alias in statement.names:
                    bound = (alias.asname or alias.name).partition(".")[0]
                    self.imported[bound] = (statement, alias)
            elif isinstance(statement, ast.If | ast.Try | ast.With):
                # What a condition defines is copied with the whole condition.
                blocks = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
                blocks += [handler.body for handler in getattr(statement, "handlers", [])]
                for block in blocks:
                    self._index(block, whole or statement)
            else:
                for name in _defined(statement):
                    self.own[name] = whole or statement

    def find(self, name: str) -> tuple[_Definition | None, _Function]:
        """Return what surrounds test `name`, if anything does, and the test's function.

        Raises:
            RegistryError: There is no such function.
        """
        body = self.body
        around: _Definition | None = None
        *outer, last = name.split("::")
        for part in outer:
            around = next((n for n in body if isinstance(n, _DEFINITIONS) and n.name == part), None)
            body = around.body if around else []
        # A later definition replaces an earlier one of the same name.
        for statement in reversed(body):
            if isinstance(statement, _FUNCTIONS) and statement.name == last:
                return around, statement
        raise _no_such_test(f"{self.path}::{name}")

    def fixtures(self) -> Iterator[tuple[str, bool]]:
        """Yield the name of each fixture that the file defines, and whether all tests use it."""
        for name, statement in self.own.items():
            for decorator in getattr(statement, "decorator_list", ()):
                text = ast.unparse(decorator)
                if text.startswith("pytest.fixture"):
                    yield name, "autouse=True" in text


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, _DEFINITIONS):
        yield statement.name
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    for target in targets:
        if target is not None:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


class Cut:
    """Functions of one file of a later release, as a file for an earlier one.

    Args:
        later: The later release's source tree, which holds `tests/` and `vllm/`.
        base: The earlier release's source tree.
        path: The file in the later release, relative to the tree.
        adapters: Module from which the fixtures of the tests are imported.

    Raises:
        RegistryError: The later release has no such file.
    """

    def __init__(self, later: Path, base: Path, path: str, *, adapters: str) -> None:
        self._later, self._base, self._path, self._adapters = later, base, path, adapters
        if not (later / path).is_file():
            raise _no_such_test(path)
        self._module = _Module.read(later, path)
        self._rename = _Rename(base)
        self._imports: dict[str, str] = {}
        self._copied: dict[str, tuple[str, ast.stmt]] = {}

    def text(self, tests: Iterable[Wanted]) -> str:
        """Return the file that holds `tests` and what they need.

        Raises:
            RegistryError: A test does not exist, or needs what the earlier release does not have.
        """
        kept = self._tests(list(tests))
        for name, everywhere in self._module.fixtures():
            if everywhere:
                self._need(name, self._module)
        if "pytestmark" in self._module.own:
            self._need("pytestmark", self._module)
        for node in kept:
            self._follow(node, self._module)
        order = sorted(
            {id(node): (path, node) for path, node in self._copied.values()}.values(),
            key=lambda one: (one[0] == self._path, one[0], one[1].lineno),
        )
        body = [*(node for _, node in order), *kept]
        lines = [f"# Cut by kvfix at run time out of vLLM's {self._path}, Apache-2.0."]
        lines += ["from __future__ import annotations"] if self._postponed() else []
        lines += sorted(set(self._imports.values()))
        return "\n".join([*lines, *(ast.unparse(self._rename.visit(node)) for node in body)]) + "\n"

    def _postponed(self) -> bool:
        statement, _ = self._module.imported.get("annotations", (None, None))
        return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"

    def _tests(self, tests: list[Wanted]) -> list[_Definition]:
        """Return the tests as top-level definitions; those of one class stay together."""
        classes: dict[str, ast.ClassDef] = {}
        kept: list[_Definition] = []
        # All are found before the first class loses the tests that nobody asked for.
        found = [self._module.find(test.name) for test in tests]
        for test, (around, function) in zip(tests, found, strict=True):
            for fixture in test.fixtures:
                self._imports[fixture] = f"from {self._adapters} import {fixture}"
                mark = ast.parse(f"pytest.mark.usefixtures({fixture!r})", mode="eval").body
                function.decorator_list.insert(0, mark)
            if isinstance(around, ast.ClassDef):
                if around.name not in classes:
                    around.body = [n for n in around.body if not _is_test(n)]
                    classes[around.name] = around
                    kept.append(around)
                classes[around.name].body.append(function)
                continue
            arguments = function.args.args
            if arguments and arguments[0].arg == "self":  # meant for a class, stood in a function
                del arguments[0]
            kept.append(function)
        return kept

    def _follow(self, node: ast.AST, module: _Module) -> None:
        """Make available what `node`, which stands in `module`, refers to."""
        fixtures = {name for name, _ in module.fixtures()}
        for child in ast.walk(node):
            if isinstance(child, ast.Name):
                self._need(child.id, module)
            elif isinstance(child, ast.arg) and child.arg in fixtures:
                self._need(child.arg, module)
            elif isinstance(child, ast.Constant) and child.value in fixtures:
                self._need(str(child.value), module)
            elif isinstance(child, ast.ImportFrom) and child is not node:
                for alias in child.names:
                    self._check(child, alias)

    def _need(self, name: str, module: _Module) -> None:
        if name in self._imports or name in self._copied:
            return
        base = _read_base(self._base, module.path)
        if base is not None and name in base.own and not name.startswith(("test", "Test")):
            self._imports[name] = f"from {_dotted(module.path)} import {name}"
        elif name in module.own:
            self._copied[name] = (module.path, module.own[name])
            self._follow(module.own[name], module)
        elif name in module.imported:
            self._import(name, *module.imported[name], module)
        # Otherwise it is a built-in, or a local name of the function.

    def _import(
        self, name: str, statement: ast.Import | ast.ImportFrom, alias: ast.alias, module: _Module
    ) -> None:
        if isinstance(statement, ast.Import):
            self._imports[name] = ast.unparse(ast.Import([alias]))
            return
        if statement.module == "__future__":
            return
        helper = self._helper(statement, module)
        base = _read_base(self._base, helper) if helper else None
        if helper and not (base and (alias.name in base.own or alias.name in base.imported)):
            self._need(alias.name, _Module.read(self._later, helper))
            if alias.asname:
                self._imports[name] = f"{name} = {alias.name}"
            return
        if helper:
            self._imports[name] = f"from {_dotted(helper)} import {ast.unparse(alias)}"
        else:
            self._check(statement, alias)
            self._imports[name] = ast.unparse(self._rename.import_of(statement, alias))

    def _helper(self, statement: ast.ImportFrom, module: _Module) -> str | None:
        """Return the path of the module below `tests` that `statement` imports from, if it does."""
        dotted = statement.module or ""
        if statement.level:
            folder = PurePosixPath(module.path).parents[statement.level - 1]
            dotted = ".".join([*folder.parts, *([dotted] if dotted else [])])
        if dotted.partition(".")[0] != "tests":
            return None
        path = dotted.replace(".", "/") + ".py"
        return path if (self._later / path).is_file() else None

    def _check(self, statement: ast.ImportFrom, alias: ast.alias) -> None:
        """Refuse a name of vLLM that the earlier release does not have."""
        dotted, _, name = self._rename(f"{statement.module}.{alias.name}").rpartition(".")
        if dotted.partition(".")[0] != "vllm":
            return
        path = dotted.replace(".", "/")
        package = (self._base / path).is_dir()
        module = _read_base(self._base, f"{path}/__init__.py" if package else f"{path}.py")
        if module is not None:
            known = {*module.own, *module.imported}
            below = [f"{path}/{name}", f"{path}/{name}.py"] if package else []
            if known & {name, "*", "__getattr__"} or any((self._base / p).exists() for p in below):
                return
        raise RegistryError(
            f"{self._path} needs {dotted}.{name}, which the earlier release does not have",
            expected="a test that the earlier release's own names are enough for",
            next_step="take it off the base releases of its [[fix.forward-test]] table",
        )


class _Rename(ast.NodeTransformer):
    """Calls what has moved by the name that the release in `base` has for it."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def __call__(self, dotted: str) -> str:
        for later, earlier in MODULES.items():
            if f"{dotted}.".startswith(f"{later}."):
                if (self._base / f"{later.replace('.', '/')}.py").is_file():
                    return dotted
                rest = dotted.removeprefix(later).split(".")
                return earlier + ".".join(CLASSES.get(part, part) for part in rest)
        return dotted

    def import_of(self, statement: ast.ImportFrom, alias: ast.alias) -> ast.ImportFrom:
        """Return the import of one name that `statement` imports."""
        module, _, name = self(f"{statement.module}.{alias.name}").rpartition(".")
        bound = alias.asname or alias.name
        return ast.ImportFrom(module, [ast.alias(name, bound if bound != name else None)], 0)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt | list[ast.stmt]:
        if node.level:
            return node
        return [self.import_of(node, alias) for alias in node.names]

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str):
            node.value = self(node.value)
        return node


@cache
def _read_base(tree: Path, path: str) -> _Module | None:
    """Return a file of an earlier release, of which nothing but its names is looked at."""
    return _Module.read(tree, path) if (tree / path).is_file() else None


def _no_such_test(test: str) -> RegistryError:
    return RegistryError(
        f"the later release has no {test}",
        expected="a test of a pinned later release",
        next_step="correct the [[fix.forward-test]] table of patches/fixes.toml",
    )


def _is_test(statement: ast.stmt) -> bool:
    return isinstance(statement, _DEFINITIONS) and statement.name.startswith("test")


def _dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")
