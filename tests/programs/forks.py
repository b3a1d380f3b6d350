"""Runs Python modules, each in a fork of one process that has imported what they all need.

    python -m tests.programs.forks FOLDER AT_ONCE

FOLDER/runs.json is a list of runs: `arguments` (a module and its words, as after `python -m`),
`variables` (all of its environment) and `seconds` (after which it is killed). The n-th writes to
FOLDER/<n>.out and FOLDER/<n>.err, and its exit code, as `subprocess` has it, to FOLDER/<n>.code.

A fork is what a fresh process would be, but for what no side of a release changes:

- torch, transformers and what else vLLM brings are there, which is most of what it takes to import
  it. Nothing of vLLM, pytest or our tests is. anyio says that pytest need not rewrite it: as a
  plugin it would be, and pytest warns of what it finds imported.
- The version of a package is looked up once, and so are entry points: vLLM reads the whole metadata
  of transformers for every model configuration, and that of all packages for every engine.
- One thread at a time parses Python. CPython 3.11 raises SystemError where two do, and they do:
  pytest for the report of a failure, a thread of vLLM's for a traceback in the log.
- It has a loopback of its own, where the kernel lets it: a port that was free a moment ago, or that
  nobody listens at any more, is not another fork's. There is no other network.
- At its end nothing is taken apart. That took a sixth of its time, for memory that is shared.

Start it in a process group of its own: when what started it ends, it ends the group.

A process with threads cannot be forked safely, so none may be left when the first run starts.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.metadata
import json
import os
import runpy
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

_Words = ParamSpec("_Words")
_Result = TypeVar("_Result")

SHARED = (
    "torch",
    "torch._dynamo.convert_frame",
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compile_fx",
    "transformers",
    "transformers.models.auto.image_processing_auto",
    "transformers.tokenization_mistral_common",
    "fastapi",
    "openai",
    "xgrammar",
    "ray",
    "humming",
    "aiohttp",
)
"""What vLLM imports for itself, by the time that it takes. A module that is not there, or that a
release does not need, costs nothing but time."""

FIRST = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # as vLLM says: else torch starts processes on import
    "OPENBLAS_NUM_THREADS": "1",  # else numpy starts threads on import
}
"""Variables for the imports that are shared."""

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # of linux/sched.h
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1  # of linux/sockios.h and linux/if.h

_KEPT_OUT = ("vllm", "vllm_overlay", "pytest", "_pytest", "hypothesis", "nixl")


def main(folder: Path, at_once: int) -> None:
    """Run what `folder` says; in each fork, this does not return."""
    parent = os.getppid()
    runs: list[dict[str, Any]] = json.loads((folder / "runs.json").read_text())
    share()
    isolated = can_isolate()
    waiting = list(enumerate(runs))
    running: dict[int, tuple[int, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            number, run = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                if isolated:
                    isolate_loopback()
                become(run, folder / str(number))
            running[pid] = number, time.monotonic() + run["seconds"]
        for pid, (number, deadline) in [*running.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                code = os.waitstatus_to_exitcode(status)
                (folder / f"{number}.code").write_text(str(code))
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        if os.getppid() != parent:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        time.sleep(0.1)


def share() -> None:
    """Import what all runs need.

    Raises:
        RuntimeError: That has started a thread, or imported what each run has to import itself.
    """
    gc.disable()  # as the documentation of `gc.freeze` has it for a process that forks
    before, path = dict(os.environ), [*sys.path]
    os.environ.update(FIRST)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read on import; tests.support.vllm_cpu sets it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in SHARED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    os.environ.clear()
    os.environ.update(before)
    sys.path[:] = path  # ray puts a folder of its own in front
    if "anyio" in sys.modules:
        sys.modules["anyio"].__doc__ = "PYTEST_DONT_REWRITE"
    threads = len([*Path("/proc/self/task").iterdir()])  # those of C libraries as well
    early = [name for name in _KEPT_OUT if name in sys.modules]
    if threads > 1 or threading.active_count() > 1 or early:
        raise RuntimeError(f"cannot fork: {threads} threads, {early} imported")
    gc.freeze()  # else each collection in a fork looks at all of torch, and copies its memory


def become(run: Mapping[str, Any], output: Path) -> None:
    """Make this fork what `python -m` would be, and run the module to the end of the process."""
    gc.enable()
    for number, end in ((1, "out"), (2, "err")):
        file = os.open(f"{output}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
    own = _path_of(os.environ)
    # Where Python runs a module from comes first, then the folders that it was told of.
    here, rest = sys.path[0], sys.path[1 + len(own) :]
    os.environ.clear()
    os.environ.update(run["variables"])
    sys.path[:] = [here, *_path_of(os.environ), *rest]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    for name in ("version", "entry_points"):
        setattr(importlib.metadata, name, functools.cache(getattr(importlib.metadata, name)))
    ast.parse = _one_at_a_time(ast.parse)
    module, *words = run["arguments"]
    sys.argv = [module, *words]
    leave(functools.partial(runpy.run_module, module, run_name="__main__", alter_sys=True))


def leave(last: Callable[[], object]) -> NoReturn:
    """Do what is `last`, and then what Python does at its end, but for taking itself apart."""
    code: object = None
    try:
        last()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # also ends what executors have started
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit((code or 0) & 0xFF)


def can_isolate() -> bool:
    """Whether a process may `isolate_loopback` here: tried, as some systems forbid a part of it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            isolate_loopback()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def isolate_loopback() -> None:
    """Go where there is no network but a loopback, and nobody else.

    That is a network namespace (network_namespaces(7)). Whoever is not root needs a user namespace
    for it, in which this user is who he was.

    Raises:
        OSError: That is forbidden, or a part of it.
    """
    user, group = os.getuid(), os.getgid()
    flags = _CLONE_NEWNET if user == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    if ctypes.CDLL(None).unshare(flags):
        raise PermissionError("no network of its own for this process")
    if user:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            Path("/proc/self", name).write_text(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))


def _one_at_a_time(function: Callable[_Words, _Result]) -> Callable[_Words, _Result]:
    lock = threading.RLock()

    @functools.wraps(function)
    def wrapper(*args: _Words.args, **kwargs: _Words.kwargs) -> _Result:
        with lock:
            return function(*args, **kwargs)

    return wrapper


def _path_of(variables: Mapping[str, str]) -> list[str]:
    return [folder for folder in variables.get("PYTHONPATH", "").split(os.pathsep) if folder]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
