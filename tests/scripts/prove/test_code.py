"""The normal form of code: what does something counts, what does nothing does not."""

from __future__ import annotations

import ast

import pytest

from scripts.prove.code import plain

CODE = '''
"""A module."""

from __future__ import annotations

import os
from json import dumps, loads


class Thing:
    """A thing."""

    size: int = 1
    """How large it is."""

    def run(self, *values, sep=None):
        """Run."""
        import re

        text = f"{values!r:>9} {sep}" "and" ' more'
        return [one for one in values if re.match("x", text)] or {1: None, **vars(os)}
'''


def form(text: str) -> str:
    return plain(ast.parse(text))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A module."""', "# Nothing is said."),
        ('    """A thing."""\n', ""),
        ('    """How large it is."""\n', "    # How large it is.\n"),
        ('"""Run."""', "pass"),
        ("import os\nfrom json import dumps, loads", "from json import loads, dumps\nimport os"),
        ("from json import dumps, loads", "from json import dumps\nfrom json import loads"),
        ("*values, sep=None", "*values,\n        sep=None,  # none\n    "),
        ("\"and\" ' more'", "'and more'"),
        ("size: int = 1", "size: int = 0x1"),
    ],
)
def test_what_does_nothing_does_not_count(old: str, new: str) -> None:
    assert CODE.count(old) == 1
    assert form(CODE.replace(old, new)) == form(CODE)


def test_two_ways_to_import_a_module_bind_two_names() -> None:
    assert form("import os.path") != form("from os import path")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sep=None", "sep=0"),
        ("*values, sep", "values, sep"),
        ("class Thing", "@final\nclass Thing"),
        ("class Thing", "class Thing(object)"),
        ("size: int = 1", "size: int = True"),
        ("size: int = 1", "size: int = 1.0"),
        ("!r:>9", "!s:>9"),
        (">9", ">8"),
        ("' more'", "' more '"),
        ("**vars(os)", "None: vars(os)"),
        ("import os\n", "import os as json\n"),
        ("from json import dumps, loads", "from json import dumps"),
        ("        import re\n", ""),
        ("or {1", "and {1"),
        ("from __future__ import annotations\n", ""),
    ],
)
def test_what_does_something_counts(old: str, new: str) -> None:
    assert CODE.count(old) == 1
    assert form(CODE.replace(old, new)) != form(CODE)


def test_docstrings_count_where_code_reads_them() -> None:
    reads = CODE + "\nprint(__doc__)\n"
    assert form(reads.replace('"""A module."""', '"""Another."""')) != form(reads)
