"""Which small changes of a module its tests should notice.

A mutant changes one thing: a comparison, a condition, a number, what is returned, a statement that
is gone. Nothing is changed that is there for people or for mypy: log lines, texts with a space in
them, the arguments of what is raised, assertions, annotations, docstrings, `TYPE_CHECKING`.

Of what runs when the module is imported only plain values are changed, constants of the module and
defaults of parameters: functions that decorated others by then could not be swapped soundly.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_WIDTH = 64
"""Characters of the code around a change that are shown with it."""

_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_NEGATION = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_OTHER = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGS = frozenset({"logger", "log", "logging", "warnings", "err", "_log", "_log_failure"})
_FOR_TYPES = frozenset({"cast", "TypeVar", "NewType", "init_logger", "getLogger"})
_FIXED_ORDER = frozenset(
    {"min", "max", "getattr", "setattr", "isinstance", "issubclass", "hasattr", "zip"}
)


@dataclass(frozen=True)
class Edit:
    """One place of a syntax tree, and what stands there in the mutant."""

    parent: ast.AST
    field: str
    index: int | None
    new: Any

    def apply(self) -> Callable[[], None]:
        """Make the change and return what undoes it."""
        if self.index is None:
            old = getattr(self.parent, self.field)
            setattr(self.parent, self.field, self.new)
            return lambda: setattr(self.parent, self.field, old)
        items = getattr(self.parent, self.field)
        kept = list(items)
        items[self.index : self.index + 1] = [] if self.new is None else [self.new]
        return lambda: items.__setitem__(slice(None), kept)


@dataclass(frozen=True)
class Mutant:
    """One change of a module.

    Attributes:
        function: Its qualified name; that of the constant where it is one of the module.
        change: The code before and after, with what is around it as far as it is short. Within a
            function each is another one, and line numbers are no part of it.
        first, last: The lines of which one is executed if the change can be seen.
        edit: What makes it.
        within: The innermost function; None in a module's constant.
        value: The place whose value alone is to be made anew, as it is no function's code: the
            statement of a constant, or a function whose default is changed.
    """

    function: str
    change: str
    first: int
    last: int
    edit: Edit
    within: ast.FunctionDef | ast.AsyncFunctionDef | None
    value: ast.AST | None = None


def mutants_of(tree: ast.Module) -> list[Mutant]:
    """Return the mutants of a module in the order of its code."""
    return list(_Walk(tree).found())


class _Walk:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.counts: Counter[tuple[str, str]] = Counter()
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node

    def found(self) -> Iterator[Mutant]:
        yield from self._block(self.tree.body, [])

    # ------------------------------------------------------------ what is looked at

    def _block(self, body: list[ast.stmt], path: list[str]) -> Iterator[Mutant]:
        """Look at what is in a module or a class: its functions, and a module's constants."""
        for statement in body:
            if isinstance(statement, _Function):
                yield from self._function(statement, path)
            elif isinstance(statement, ast.ClassDef):
                yield from self._block(statement.body, [*path, statement.name])
            elif isinstance(statement, (ast.If, ast.Try)) and not _types_only(statement):
                yield from self._block(statement.body, path)
            elif not path and (name := _constant(statement)) and _is_data(statement.value):  # type: ignore[attr-defined]
                for edit in self._edits(statement.value, statement, "value", None):  # type: ignore[attr-defined]
                    yield self._mutant(name, edit, statement, None, statement)

    def _function(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, path: list[str], outer: bool = True
    ) -> Iterator[Mutant]:
        name = ".".join((*path, function.name))
        if outer:
            for field in ("defaults", "kw_defaults"):
                for index, default in enumerate(getattr(function.args, field)):
                    if default is not None and _is_data(default):
                        for edit in self._edits(default, function.args, field, index):
                            yield self._mutant(name, edit, function, function, function)
        for index, statement in enumerate(function.body):
            if not (index == 0 and _is_docstring(statement)):
                yield from self._statement(statement, function.body, index, function, name)

    def _statement(
        self,
        statement: ast.stmt,
        body: list[ast.stmt],
        index: int,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
        name: str,
    ) -> Iterator[Mutant]:
        if isinstance(statement, _Function):
            yield from self._function(statement, [name], outer=False)
            return
        if isinstance(statement, ast.ClassDef):
            for inner in statement.body:
                if isinstance(inner, _Function):
                    yield from self._function(inner, [name, statement.name], outer=False)
            return
        if _is_idle(statement) or _types_only(statement):
            return
        place = self.parents[statement]
        field = next(f for f, value in ast.iter_fields(place) if value is body)
        for instead in _instead(statement, function):
            edit = Edit(place, field, index, ast.copy_location(instead, statement))
            yield self._mutant(name, edit, statement, function)
        if not isinstance(statement, ast.Raise):
            for child_field, child, at in _children(statement):
                if isinstance(child, ast.expr):
                    for edit in self._edits(child, statement, child_field, at):
                        yield self._mutant(name, edit, statement, function)
                elif isinstance(child, ast.withitem):
                    for edit in self._edits(child.context_expr, child, "context_expr", None):
                        yield self._mutant(name, edit, statement, function)
        for block in ("body", "orelse", "finalbody"):
            inner_body = getattr(statement, block, None) or []
            for number, inner in enumerate(list(inner_body)):
                yield from self._statement(inner, inner_body, number, function, name)
        for handler in getattr(statement, "handlers", ()):
            if not (len(handler.body) == 1 and isinstance(handler.body[0], ast.Raise)):
                again = [ast.copy_location(ast.Raise(), handler.body[0])]
                edit = Edit(handler, "body", None, again)
                yield self._mutant(name, edit, handler, function)
            if isinstance(handler.type, ast.Tuple):
                for edit in _without_each(handler.type, "elts"):
                    yield self._mutant(name, edit, handler, function)
            for number, inner in enumerate(list(handler.body)):
                yield from self._statement(inner, handler.body, number, function, name)

    # ------------------------------------------------------------ expressions

    def _edits(
        self, node: ast.expr, parent: ast.AST, field: str, index: int | None
    ) -> Iterator[Edit]:
        """Yield the changes of an expression and of all that is in it."""
        if _is_for_people(node) or (
            isinstance(node, ast.Call) and not _LOGS.isdisjoint(_names(node.func))
        ):
            return
        if isinstance(node, ast.Call) and _name(node.func) in _FOR_TYPES:
            for number, argument in enumerate(node.args[1:], 1):
                yield from self._edits(argument, node, "args", number)
            return
        is_test = field in ("test", "ifs")
        for new in _other(node, parent, is_test):
            yield Edit(parent, field, index, ast.copy_location(new, node))
        yield from _inside(node, is_test)
        for child_field, child, at in _children(node):
            if isinstance(child, ast.expr):
                yield from self._edits(child, node, child_field, at)
            elif isinstance(child, ast.keyword):
                yield from self._edits(child.value, child, "value", None)
            elif isinstance(child, ast.comprehension):
                yield from self._edits(child.iter, child, "iter", None)
                for place, test in enumerate(child.ifs):
                    yield from self._edits(test, child, "ifs", place)

    # ------------------------------------------------------------ what is said of a change

    def _mutant(
        self,
        name: str,
        edit: Edit,
        place: ast.AST,
        within: ast.FunctionDef | ast.AsyncFunctionDef | None,
        value: ast.AST | None = None,
    ) -> Mutant:
        around = edit.parent
        while not isinstance(around, (ast.stmt, ast.ExceptHandler)):
            above = self.parents[around]
            if isinstance(around, ast.expr) and (
                not isinstance(above, (ast.expr, ast.keyword)) or len(_said(above)) > _WIDTH
            ):
                break
            around = above
        before = _said(around)
        if isinstance(edit.new, ast.stmt):
            old = getattr(edit.parent, edit.field)[edit.index]
            change = f"{_said(old)} -> {_said(edit.new)}"
        elif isinstance(edit.parent, ast.ExceptHandler) and edit.field == "body":
            change = f"{before} -> {before} raise"
        else:
            undo = edit.apply()
            change = f"{before} -> {_said(around)}"
            undo()
        self.counts[name, change] += 1
        if (count := self.counts[name, change]) > 1:
            change += f" ({count})"
        first, last = _lines(place)
        return Mutant(name, change, first, last, edit, within, value)


def _lines(place: ast.AST) -> tuple[int, int]:
    """Return the lines of a simple statement, or those above the first of a compound one's."""
    first: int = place.lineno  # type: ignore[attr-defined]
    if isinstance(place, _Function):  # its defaults count where any of it runs
        return place.body[0].lineno, place.end_lineno or first
    body = getattr(place, "body", None)
    if body:
        return first, max(first, body[0].lineno - 1)
    return first, getattr(place, "end_lineno", None) or first


def _said(node: ast.AST) -> str:
    """Return the code of an expression, or the first line of a statement's."""
    if isinstance(node, ast.keyword):
        return f"{node.arg}={ast.unparse(node.value)}"
    return " ".join(ast.unparse(node).split("\n", 1)[0].split())


def _instead(
    statement: ast.stmt, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[ast.stmt]:
    """Yield what can stand in place of a statement."""
    if isinstance(statement, ast.Return):
        value = statement.value
        if value is None:
            yield ast.Pass()
        elif not isinstance(value, ast.Constant):
            yield ast.Return(ast.copy_location(ast.Constant(None), value))
    elif isinstance(statement, (ast.Expr, ast.Raise, ast.Delete)):
        yield ast.Pass()
    elif isinstance(statement, ast.AugAssign):
        yield ast.Pass()
        if (other := _ARITHMETIC.get(type(statement.op))) is not None:
            yield ast.AugAssign(statement.target, other(), statement.value)
    elif isinstance(statement, ast.Assign):
        if _is_kept(statement.targets[0], statement, function):
            yield ast.Pass()
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        if not isinstance(statement.target, ast.Name):
            yield ast.Pass()
    elif isinstance(statement, ast.Break):
        yield ast.Continue()
    elif isinstance(statement, ast.Continue):
        yield ast.Break()
        yield ast.Pass()


def _is_kept(
    target: ast.expr, statement: ast.stmt, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> bool:
    """Whether something has the name already, so that an assignment can be left out."""
    if not isinstance(target, ast.Name):
        return not isinstance(target, (ast.Tuple, ast.List))
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    if target.id in {argument.arg for argument in arguments}:
        return True
    return any(
        isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Store)
        and node.id == target.id
        and node.lineno < statement.lineno
        for node in ast.walk(function)
    )


def _other(node: ast.expr, parent: ast.AST, is_test: bool) -> Iterator[ast.expr]:
    """Yield what can stand in place of an expression."""
    if is_test:
        if not (isinstance(parent, ast.While) or isinstance(node, ast.Constant)):
            yield ast.Constant(True)
        if not isinstance(node, ast.Constant):
            yield ast.Constant(False)
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        if not is_test or len(node.values) > 2:
            yield ast.BoolOp(other, node.values)
        for at in range(len(node.values)):
            rest = node.values[:at] + node.values[at + 1 :]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.UnaryOp):
        if not is_test or not isinstance(node.op, ast.Not):
            yield node.operand
    elif isinstance(node, ast.BinOp):
        if (op := _ARITHMETIC.get(type(node.op))) is not None and not _is_text(node):
            yield ast.BinOp(node.left, op(), node.right)
        if isinstance(node.op, (ast.BitOr, ast.BitAnd, ast.Sub)):
            yield node.left
    elif isinstance(node, ast.Constant):
        for value in _other_values(node.value):
            yield ast.Constant(value)  # type: ignore[arg-type, unused-ignore]
    elif isinstance(node, ast.Dict) and node.keys:
        yield ast.Dict([], [])
    elif isinstance(node, ast.List) and node.elts and isinstance(node.ctx, ast.Load):
        yield ast.List([], ast.Load())
    elif isinstance(node, ast.Set):
        yield ast.Call(ast.Name("set", ast.Load()), [], [])


def _inside(node: ast.expr, is_test: bool) -> Iterator[Edit]:
    """Yield changes of an expression that leave its kind.

    A condition alone is no comparison turned round: always true and always false say more.
    """
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            if (boundary := _BOUNDARY.get(type(op))) is not None:
                yield Edit(node, "ops", at, boundary())
            if not is_test and (negation := _NEGATION.get(type(op))) is not None:
                yield Edit(node, "ops", at, negation())
            right = node.comparators[at]
            if isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, ast.Tuple):
                yield from _without_each(right, "elts")
    elif isinstance(node, ast.Call):
        name = _name(node.func)
        if isinstance(node.func, ast.Name) and name in _OTHER:
            yield Edit(node, "func", None, ast.copy_location(_named(_OTHER[name]), node.func))
        if name in ("isinstance", "issubclass") and isinstance(node.args[-1], ast.Tuple):
            yield from _without_each(node.args[-1], "elts")
        if name not in _FIXED_ORDER:
            for at in range(len(node.args) - 1):
                one, two = node.args[at : at + 2]
                starred = isinstance(one, ast.Starred) or isinstance(two, ast.Starred)
                if not starred and ast.dump(one) != ast.dump(two):
                    swapped = [*node.args[:at], two, one, *node.args[at + 2 :]]
                    yield Edit(node, "args", None, swapped)
        for at, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                yield Edit(node, "keywords", at, None)
    elif isinstance(node, ast.Slice):
        for field in ("lower", "upper", "step"):
            if getattr(node, field) is not None:
                yield Edit(node, field, None, None)
    elif isinstance(node, (ast.Dict, ast.Set)) and len(getattr(node, "elts", ())) > 1:
        yield from _without_each(node, "elts")


def _other_values(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        if value > 0:
            yield value - 1
    elif isinstance(value, float):
        yield value + 1
    elif isinstance(value, (str, bytes)):
        other = "kvfix" if isinstance(value, str) else b"kvfix"
        yield type(value)() if value else other


# ---------------------------------------------------------------- what is left alone


def _is_idle(statement: ast.stmt) -> bool:
    """Whether a statement is a log line, an assertion, or does nothing."""
    if isinstance(statement, ast.Expr):
        value = statement.value
        if isinstance(value, ast.Await):
            value = value.value
        return isinstance(value, ast.Constant) or (
            isinstance(value, ast.Call) and not _LOGS.isdisjoint(_names(value.func))
        )
    return isinstance(
        statement, (ast.Assert, ast.Pass, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)
    )


def _types_only(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_for_people(node: ast.expr) -> bool:
    """Whether an expression is a text with a space in it, or no value at all."""
    if isinstance(node, ast.Constant):
        value = node.value
        return value is None or value is ... or (isinstance(value, str) and " " in value)
    return isinstance(node, ast.JoinedStr) and any(
        isinstance(part, ast.Constant) and " " in str(part.value) for part in node.values
    )


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, (str, bytes)))
        for side in (node.left, node.right)
    )


def _constant(statement: ast.stmt) -> str | None:
    """Return the name that a statement of a module gives to something."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target = statement.target
    else:
        return None
    special = isinstance(target, ast.Name) and target.id.startswith("__")
    return target.id if isinstance(target, ast.Name) and not special else None


def _is_data(node: ast.expr) -> bool:
    """Whether an expression only builds values: no call but of a container or `re.compile`."""
    calls = {"frozenset", "set", "dict", "tuple", "list", "compile"}
    kinds = (
        ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.BinOp, ast.UnaryOp, ast.Name,
        ast.Attribute, ast.Call, ast.operator, ast.unaryop, ast.expr_context,
    )  # fmt: skip
    return not isinstance(node, (ast.Name, ast.Attribute)) and all(
        isinstance(inner, kinds) and (not isinstance(inner, ast.Call) or _name(inner.func) in calls)
        for inner in ast.walk(node)
    )


def _without_each(node: ast.AST, field: str) -> Iterator[Edit]:
    items = getattr(node, field)
    if len(items) > 1:
        for at in range(len(items)):
            yield Edit(node, field, at, None)


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST, int | None]]:
    """Yield what is directly below a node, annotations and decorators left out."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "handlers", "func") and (
            field != "func" or isinstance(value, ast.Name)
        ):
            continue
        if field in ("body", "orelse", "finalbody") and not isinstance(value, ast.AST):
            continue
        if isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.AST):
                    yield field, item, index
        elif isinstance(value, ast.AST):
            yield field, value, None


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.expr) -> set[str]:
    """Return `a`, `b` and `c` of `a.b.c`."""
    if isinstance(node, ast.Attribute):
        return {node.attr, *_names(node.value)}
    return {_name(node)}


def _named(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())
