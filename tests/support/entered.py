"""A pytest plugin: what of vLLM each test enters (``-p tests.support.entered --entered FILE``).

FILE is JSON: by node id, the names of

- each function of vLLM's that was called while the test ran, by any thread: ``vllm/a.py:12``, where
  its code begins, with its decorators;
- each class of vLLM's of which an instance, or which itself, had a method called, its own, an
  inherited one or one that a library made: ``vllm.a:Name``;
- ``PROCESS`` if the test began a process, of which nothing is known.

Python calls this for every call of a function, so that a run takes about three times as long.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

PROCESS = "process"
_BEGIN = ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "subprocess.Popen")
"""Audit events of a process that begins (https://docs.python.org/3/library/audit_events.html)."""
_OF_VLLM = "vllm."
_SELF = ("self", "cls")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the name of the file."""
    parser.addoption("--entered", type=Path, help="a file for what of vLLM each test enters")


def pytest_configure(config: pytest.Config) -> None:
    """Note what is entered from here on."""
    config.pluginmanager.register(Entered(config.getoption("entered")))


class Entered:
    """Notes what the test enters that runs."""

    def __init__(self, file: Path) -> None:
        """Begin; `file` is written at the end."""
        import vllm

        (package,) = vllm.__path__
        self._root = str(Path(package).parent) + "/"
        self._file = file
        self._tests: dict[str, set[str]] = {}
        self._now: set[str] | None = None
        self._functions: dict[tuple[str, CodeType], str] = {}  # two files may hold equal code
        self._classes: dict[type, tuple[str, ...]] = {}
        sys.addaudithook(self._hear)
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Let what is entered from now on be this test's."""
        self._now = self._tests.setdefault(item.nodeid, set())
        sys.settrace(self._enter)  # a test may have put its own there
        try:
            return (yield)
        finally:
            self._now = None

    def pytest_sessionfinish(self) -> None:
        """Write what was noted."""
        sys.settrace(None)
        self._file.write_text(
            json.dumps({test: sorted(seen) for test, seen in self._tests.items()})
        )

    def _hear(self, event: str, _: object) -> None:
        if self._now is not None and event in _BEGIN:
            self._now.add(PROCESS)

    def _enter(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; nothing is returned, so that the lines of the function are not traced."""
        if (now := self._now) is None or event != "call":
            return
        code = frame.f_code
        key = code.co_filename, code
        name = self._functions.get(key)
        if name is None:
            name = self._functions[key] = self._name(code)
        if name:
            now.add(name)
        if code.co_argcount and code.co_varnames[0] in _SELF:
            me: Any = frame.f_locals.get(code.co_varnames[0])
            kind = me if isinstance(me, type) else type(me)
            if kind not in self._classes:
                self._classes[kind] = tuple(_classes(kind))
            now.update(self._classes[kind])

    def _name(self, code: CodeType) -> str:
        file = code.co_filename
        if not file.startswith(f"{self._root}vllm/"):
            return ""
        return f"{file.removeprefix(self._root)}:{code.co_firstlineno}"


def _classes(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        if one.__module__.startswith(_OF_VLLM):
            yield f"{one.__module__}:{one.__qualname__}"
