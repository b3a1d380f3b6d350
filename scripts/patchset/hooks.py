"""What a hook may add to upstream's files.

An added line is an import, a base in a class statement, a decorator, a field that upstream's
contract names, or a call: as a statement, as what is returned, assigned or asked by an `if` that
only leaves, or inside an expression of upstream's. Logic belongs in the overlay.
"""

from __future__ import annotations

import ast
from difflib import SequenceMatcher


def added_lines(before: str, after: str) -> set[int]:
    """Return the numbers, from 1, of the lines of `after` that are not of `before`."""
    old, new = before.splitlines(), after.splitlines()
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    return {
        number
        for tag, _, _, first, end in matcher.get_opcodes()
        if tag in ("insert", "replace")
        for number in range(first + 1, end + 1)
    }


def logic_in_hooks(before: str, after: str) -> list[tuple[int, str]]:
    """Return the added lines, number and text, that are more than a hook may be."""
    added = added_lines(before, after)
    allowed = _Allowed(added)
    allowed.visit(ast.parse(after))
    lines = after.splitlines()
    return [
        (number, lines[number - 1].strip())
        for number in sorted(added - allowed.lines)
        if lines[number - 1].strip()
    ]


_LOGIC = (
    ast.Lambda,
    ast.IfExp,
    ast.BoolOp,
    ast.BinOp,
    ast.Compare,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


class _Allowed(ast.NodeVisitor):
    """Collects the lines that are hooks, of those in `added`."""

    def __init__(self, added: set[int]) -> None:
        self.added = added
        self.lines: set[int] = set()
        self.upstream = False  # whether the statement around has lines that are not added

    def visit(self, node: ast.AST) -> None:
        """Visit one node; each statement is upstream's as long as a line of it is."""
        around = self.upstream
        if isinstance(node, ast.stmt):
            self.upstream = not self.added.issuperset(_lines(node))
        super().visit(node)
        self.upstream = around

    def _allow(self, node: ast.expr | ast.stmt) -> None:
        self.lines.update(_lines(node))

    def visit_Import(self, node: ast.Import) -> None:
        self._allow(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._allow(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.lines.update(range(node.lineno, node.body[0].lineno))
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and _is_constant(statement.value):
                self._allow(statement)
        self._decorators(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._decorators(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._decorators(node)

    def _decorators(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        texts = [ast.unparse(decorator) for decorator in node.decorator_list]
        for decorator, text in zip(node.decorator_list, texts, strict=True):
            if texts.count(text) == 1:  # twice it would act twice
                self._allow(decorator)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if self._is_call(node.test) and not node.orelse and all(map(_leaves, node.body)):
            self._allow(node)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        self._statement(node, node.value)

    def visit_Return(self, node: ast.Return) -> None:
        self._statement(node, node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._statement(node, node.value)

    def _statement(self, node: ast.stmt, value: ast.expr | None) -> None:
        if value is not None and self._is_call(value):
            self._allow(node)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        # A call that starts on an added line, or an argument handed to one of upstream's calls.
        if self.upstream and node.lineno in self.added and self._is_call(node):
            self._allow(node)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            if self.upstream and isinstance(argument, ast.Name | ast.Attribute | ast.Constant):
                self._allow(argument)
        self.generic_visit(node)

    def _is_call(self, value: ast.expr) -> bool:
        """Whether it is a call, awaited or negated at the most, without logic of our own."""
        while isinstance(value, ast.Await | ast.UnaryOp | ast.YieldFrom):
            value = value.operand if isinstance(value, ast.UnaryOp) else value.value or value
        return isinstance(value, ast.Call) and not any(
            isinstance(node, _LOGIC) and self.added.intersection(_lines(node))
            for node in ast.walk(value)
        )


def _lines(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _is_constant(value: ast.expr | None) -> bool:
    return value is None or isinstance(value, ast.Constant)


def _leaves(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Return):
        value = statement.value
        named = value.elts if isinstance(value, ast.Tuple) else [value] if value else []
        return all(isinstance(each, ast.Constant | ast.Name) for each in named)
    return isinstance(statement, ast.Break | ast.Continue)
