"""A mutant in place of the module that is imported, in a process that ends with it.

Functions keep their identity and get other code: whoever has imported or decorated one, calls the
mutant. Constants and defaults are computed anew where the module lives. A module that is not
imported yet, or once more, is loaded as the mutant.
"""

from __future__ import annotations

import ast
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from tests.programs.mutants.operators import Mutant, mutants_of

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class UnloadableError(Exception):
    """Of a mutant a module could not be made: the value of a constant or a default raises."""


Key = tuple[str, int, int]
"""Of code in a module: its name, its first line, and which of those it is."""


class Source:
    """A module as its file has it.

    Attributes:
        name: The name it is imported by.
        path: Its file.
        mutants: In the order of its code.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.tree = ast.parse(path.read_bytes())
        self.mutants = mutants_of(self.tree)
        self._codes = _by_key(self._compiled())
        self._functions: dict[Key, list[FunctionType]] = {}

    def _compiled(self) -> CodeType:
        tree = ast.fix_missing_locations(self.tree)
        return compile(tree, str(self.path), "exec", dont_inherit=True)

    def find_functions(self, all_functions: Sequence[FunctionType]) -> None:
        """Note the functions of this module that are alive."""
        keys: dict[CodeType, Key] = {}
        for function in all_functions:
            code = function.__code__
            if code.co_filename == str(self.path):
                key = keys.get(code) or _key_in(self._codes, code)
                if key is not None:
                    keys[code] = key
                    self._functions.setdefault(key, []).append(function)

    def install(self, mutant: Mutant | None) -> None:
        """Make this process run the mutant; with None the module as it is, by the same means.

        Raises:
            UnloadableError: It cannot be run.
        """
        module = sys.modules.get(self.name)
        if mutant is not None:
            self._keep_closure(mutant)
            mutant.edit.apply()
        code = self._compiled()
        sys.meta_path.insert(0, _Finder(self.name, self.path, code))
        if module is None:
            return
        if mutant is not None and mutant.value is not None:
            if isinstance(mutant.value, (ast.Assign, ast.AnnAssign)):
                self._replace_constant(module, mutant.function, mutant.value)
            else:
                self._replace_defaults(module, mutant.value)
            return
        for key, new in _by_key(code).items():
            if mutant is None or self._codes.get(key) != new:
                for function in self._functions.get(key, ()):
                    function.__code__ = _as_marked(new, function.__code__)

    def _keep_closure(self, mutant: Mutant) -> None:
        """Have the function name what it closes over, so that a mutant closes over no less."""
        if mutant.within is None:
            return
        place = mutant.within.name, _first_line(mutant.within)
        for (name, line, _), code in self._codes.items():
            if (name, line) == place and code.co_freevars:
                names: list[ast.expr] = [ast.Name(one, ast.Load()) for one in code.co_freevars]
                never = ast.If(ast.Constant(0), [ast.Expr(ast.Tuple(names, ast.Load()))], [])
                # Last, where nothing runs: no line and no docstring is another one for it.
                body = mutant.within.body
                ast.copy_location(never, body[-1])
                body.append(never)
                return

    def _replace_constant(self, module: ModuleType, name: str, statement: ast.AST) -> None:
        old, new = getattr(module, name), self._value(module, statement.value)  # type: ignore[attr-defined]
        for other in list(sys.modules.values()):
            space = getattr(other, "__dict__", None) or {}
            if space.get(name, self) is old:
                space[name] = new

    def _replace_defaults(self, module: ModuleType, statement: ast.AST) -> None:
        assert isinstance(statement, _FUNCTIONS)
        for (name, line, _), functions in self._functions.items():
            if (name, line) != (statement.name, _first_line(statement)):
                continue
            for function in functions:
                values = [self._value(module, one) for one in statement.args.defaults]
                function.__defaults__ = tuple(values) or None
                pairs = zip(statement.args.kwonlyargs, statement.args.kw_defaults, strict=True)
                named = {
                    argument.arg: self._value(module, value) for argument, value in pairs if value
                }
                function.__kwdefaults__ = named or None

    def _value(self, module: ModuleType, node: ast.expr) -> object:
        expression = ast.fix_missing_locations(ast.Expression(node))
        code = compile(expression, str(self.path), "eval")
        try:
            return eval(code, vars(module))  # noqa: S307
        except Exception as error:
            raise UnloadableError from error


def _as_marked(code: CodeType, old: CodeType) -> CodeType:
    """Return `code` with the mark that `types.coroutine` has set on the one that it replaces."""
    mark = old.co_flags & inspect.CO_ITERABLE_COROUTINE
    return code.replace(co_flags=code.co_flags | mark)


def living_functions() -> list[FunctionType]:
    """Return every function of this process."""
    return [one for one in gc.get_objects() if type(one) is FunctionType]  # and no stand-in


def _by_key(code: CodeType) -> dict[Key, CodeType]:
    found: dict[Key, CodeType] = {}
    for one in _within(code):
        number = 0
        while (one.co_name, one.co_firstlineno, number) in found:
            number += 1
        found[one.co_name, one.co_firstlineno, number] = one
    return found


def _key_in(codes: dict[Key, CodeType], code: CodeType) -> Key | None:
    return next(
        (
            key
            for key, one in codes.items()
            if key[:2] == (code.co_name, code.co_firstlineno) and one.co_code == code.co_code
        ),
        None,
    )


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the line that its code gives as its first."""
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, as the mutant."""

    def __init__(self, name: str, path: Path, code: CodeType) -> None:
        self._name = name
        self._path = path
        self._loader = _Loader(name, str(path), code)

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self._loader)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code
