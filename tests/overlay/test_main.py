"""What `python -m vllm_overlay` says of a build whose records are made up."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_overlay
from vllm_overlay import provenance

FIXES: list[dict[str, Any]] = [
    {"id": "K1", "title": "one is mended", "upstream_pr": ""},
    {"id": "12345", "title": "another is", "upstream_pr": "o/r#12345"},
]
BUILD = {"release": "1.2.3", "patch_set": "0.1"}
OWN = "vllm_overlay/__init__.py"
DIGEST = hashlib.sha256(Path(vllm_overlay.__file__).read_bytes()).hexdigest()
SAME = {OWN: DIGEST}
CHANGED = {OWN: "0" * 64, "vllm_overlay/none.py": DIGEST}
TABLE = [
    "release: 1.2.3",
    "patch_set: 0.1",
    "fix    upstream   what is true with it",
    "K1     -          one is mended",
    "12345  o/r#12345  another is",
]

Ask = Callable[..., tuple[Any, str]]


@pytest.fixture
def ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Ask]:
    """Ask a build with such records; returns what the process ends with, and what it prints."""

    def of_a_build() -> list[str]:
        return [name for name in sys.modules if name.startswith(f"{provenance.__name__}.")]

    def forget() -> None:
        for name in of_a_build():
            del sys.modules[name]

    def asked(*words: str, **records: str) -> tuple[Any, str]:
        for name, text in records.items():
            (tmp_path / f"{name}.py").write_text(f"{text}\n")
        importlib.invalidate_caches()
        forget()
        monkeypatch.setattr(sys, "argv", ["vllm_overlay", *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_module("vllm_overlay", run_name="__main__")
        return end.value.code, capsys.readouterr().out

    for name in of_a_build():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(provenance, "__path__", [str(tmp_path)])
    yield asked
    forget()


def records(files: dict[str, str]) -> dict[str, str]:
    fixes = {f"fix_{number}": f"FIX = {fix}" for number, fix in enumerate(FIXES)}
    return {**fixes, "build": f"BUILD = {BUILD}", "files": f"FILES = {files}"}


def test_help_says_what_there_is_to_ask(ask: Ask) -> None:
    code, said = ask("--help")
    assert code == 0
    assert said.startswith("usage: python -m vllm_overlay ")
    for text in ("which fixes this vLLM carries", "print JSON", "hash every file"):
        assert text in said


def test_the_fixes_are_told_in_a_table(ask: Ask) -> None:
    assert ask(**records(SAME)) == (0, "\n".join([*TABLE, ""]))


@pytest.mark.parametrize("words", [(), ("--check",)])
def test_the_source_of_the_patch_set_is_no_build(ask: Ask, words: tuple[str, ...]) -> None:
    code, said = ask(*words)
    assert "ask from another folder" in code
    assert said == ""


def test_a_build_from_a_patched_tree_has_no_files_to_check(ask: Ask) -> None:
    code, said = ask("--check", fix_0=f"FIX = {FIXES[0]}")
    assert "ask its git" in code
    assert said == ""


def test_what_is_as_it_was_made_is_counted(ask: Ask) -> None:
    code, said = ask("--check", **records(SAME))
    assert (code, said.splitlines()) == (0, [*TABLE, "1 files are as this build was made"])


FAULTS = [f"{OWN}: is not the file of this build", "vllm_overlay/none.py: is missing"]


def test_each_file_that_is_not_is_named(ask: Ask) -> None:
    code, said = ask("--check", **records(CHANGED))
    assert code == 1
    assert said.splitlines() == [
        *TABLE,
        *(f"FAULT {fault}" for fault in FAULTS),
        "the fixes above are not all in force: install the patched wheel again",
    ]


def test_a_program_gets_the_same(ask: Ask) -> None:
    code, said = ask("--json", **records(SAME))
    assert (code, json.loads(said)) == (0, {"build": BUILD, "fixes": FIXES})
    code, said = ask("--json", "--check", **records(CHANGED))
    assert (code, json.loads(said)["faults"]) == (1, FAULTS)
    assert said.splitlines()[1] == '  "build": {', "people read it too"


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        (None, "none"),
        (SimpleNamespace(origin=None), "none"),
        (SimpleNamespace(origin="/elsewhere/vllm/__init__.py"), "/elsewhere/vllm/__init__.py"),
    ],
)
def test_a_vllm_that_python_finds_elsewhere_is_a_fault(
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    spec: Any,  # noqa: ANN401
    where: str,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: spec if name == "vllm" else find(name, *rest),
    )
    code, said = ask("--check", **records(SAME))
    assert code == 1
    assert f"FAULT vllm: Python imports {where}, and not the one in " in said
