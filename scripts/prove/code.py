"""Python code without what cannot change what it does: comments, docstrings, format, import order.

The text that comes out is the same for every version of Python that can parse the code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence

_UNSEEN = frozenset({"kind", "type_comment", "type_ignores", "ctx"})
_DOCUMENTATION = ("__doc__", "getdoc")  # the names by which code looks at docstrings


def plain(tree: ast.Module) -> str:
    """Return the code of a file in normal form."""
    text = normal(tree.body)
    # To look at all nodes would take as long again, and hardly any module has such a word.
    if any(repr(name) in text for name in _DOCUMENTATION) and reads_docstrings(tree):
        return normal(tree.body, documented=True)
    return text


def reads_docstrings(tree: ast.AST) -> bool:
    """Whether code looks at docstrings, so that they count."""
    return any(
        isinstance(node, (ast.Name, ast.Attribute))
        and (node.id if isinstance(node, ast.Name) else node.attr) in _DOCUMENTATION
        for node in ast.walk(tree)
    )


def normal(
    node: ast.AST | Sequence[ast.AST],
    *,
    documented: bool = False,
    spell: Callable[[str], str] = str,
) -> str:
    """Return syntax in normal form, as one line.

    Args:
        node: A node, or statements that follow each other.
        documented: Docstrings count.
        spell: What is written instead of the name of a module, and instead of a text in the code.
    """
    words: list[str] = []
    _spell_out(node, documented, spell, words)
    return " ".join(words)


def _spell_out(
    value: object, documented: bool, spell: Callable[[str], str], words: list[str]
) -> None:
    """Append the words of `value`; a generator for each node would take three times as long.

    Most of a tree are nodes, then names and texts: in this order they are asked for.
    """
    if isinstance(value, ast.AST):
        if isinstance(value, (ast.Import, ast.ImportFrom)):
            words.append(_imports([value], spell))
            return
        words.append(f"({type(value).__name__}")
        for name in value._fields:
            if name in _UNSEEN:
                continue
            child = getattr(value, name, None)
            # Fields that a version of Python adds are empty where the code does not use them.
            if child is not None and child != []:
                words.append(f"{name}=")
                _spell_out(child, documented, spell, words)
        words.append(")")
    elif isinstance(value, str):
        words.append(repr(spell(value)))
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        words.append("[")
        imports: list[ast.Import | ast.ImportFrom] = []
        for child in value:
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                imports.append(child)
            elif documented or not is_idle(child):
                if imports:
                    words += filter(None, [_imports(imports, spell)])
                    imports = []
                _spell_out(child, documented, spell, words)
        if imports:
            words += filter(None, [_imports(imports, spell)])
        words.append("]")
    else:
        words.append(repr(value))


def _imports(statements: Iterable[ast.Import | ast.ImportFrom], spell: Callable[[str], str]) -> str:
    """Return import statements that follow each other, in any order and however they are split."""
    names = (
        # `from vllm import envs` and `import vllm.envs` bind names of their own
        f"({'import' if isinstance(one, ast.Import) else 'from'} "
        f"{spell('.'.join(filter(None, (origin(one), alias.name))))} as {alias.asname})"
        for one in statements
        for alias in one.names
    )
    return " ".join(sorted(names))


def origin(statement: ast.Import | ast.ImportFrom) -> str:
    """Return what stands between `from` and `import`, leading dots included."""
    if isinstance(statement, ast.Import):
        return ""
    return "." * statement.level + (statement.module or "")


def is_idle(node: object) -> bool:
    """Whether a statement does nothing: a docstring, another constant, `pass`."""
    alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return alone or isinstance(node, ast.Pass)
