"""Every way to fail has a code of its own, and docs/exit-codes.md says what each means."""

from __future__ import annotations

import re

from scripts.project import ROOT
from scripts.system.errors import CARRIED, INTERRUPTED, TERMINATED, UNREAD, KvfixError

KINDS: list[type[KvfixError]] = [KvfixError, *KvfixError.__subclasses__()]


def test_every_kind_of_failure_has_an_exit_code_of_its_own() -> None:
    codes = [kind.exit_code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert not {0, CARRIED, INTERRUPTED, TERMINATED, UNREAD} & {*codes}
    assert all(kind.__doc__ for kind in KINDS)


def test_all_of_them_stand_in_one_module() -> None:
    assert {kind.__module__ for kind in KINDS} == {"scripts.system.errors"}


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (?:`(\w+)`)? ?\| (.+) \|$", text, re.MULTILINE)
    expected = {(kind.exit_code, kind.__name__, _line(kind)) for kind in KINDS}
    found = {(int(code), name, said) for code, name, said in rows if name}
    assert found == expected
    others = {int(code) for code, name, _ in rows if not name}
    assert others == {0, CARRIED, INTERRUPTED, TERMINATED, UNREAD}
    assert [int(code) for code, _, _ in rows] == sorted(int(code) for code, _, _ in rows)


def _line(kind: type[KvfixError]) -> str:
    return " ".join((kind.__doc__ or "").split())
