"""Runs Python modules, each in a fork of one process that has imported what they all need.

    python -m tests.programs.forks FOLDER AT_ONCE [MODULE THAT IS NOT SHARED ...]

FOLDER/runs.json is a list of runs: `arguments` (a module and its words, as after `python -m`),
`variables` (all of its environment) and `seconds` (after which it is killed). The n-th writes to
FOLDER/<n>.out and FOLDER/<n>.err, and its exit code, as `subprocess` has it, to FOLDER/<n>.code.

A fork is what a fresh process would be, but for what no side of a release changes:

- torch, transformers and what these bring are there, which is most of what it takes to import vLLM.
  Nothing of vLLM, pytest or our tests is, nor anything that a plugin of pytest rewrites (anyio).
- The version of a package is looked up once, and so are entry points: vLLM reads the whole metadata
  of transformers for every model configuration, and that of all packages for every engine.
- One thread at a time parses Python. CPython 3.11 raises SystemError where two do, and they do:
  pytest for the report of a failure, a thread of vLLM's for a traceback in the log.

Start it in a process group of its own: when what started it ends, it ends the group.

A process with threads cannot be forked safely, so none may be left when the first run starts.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import json
import os
import runpy
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

_Words = ParamSpec("_Words")
_Result = TypeVar("_Result")

SHARED = (
    "torch",
    "torch._dynamo.convert_frame",
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compile_fx",
    "transformers",
    "transformers.models.auto.image_processing_auto",
    "aiohttp",
)
"""What vLLM imports for itself, by the time that it takes. A module that is not there, or that a
release does not need, costs nothing but time."""

FIRST = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # as vLLM says: else torch starts processes on import
    "OPENBLAS_NUM_THREADS": "1",  # else numpy starts threads on import
}
"""Variables for the imports that are shared."""

_REWRITTEN = "anyio"  # by pytest, which is its plugin's wish
_KEPT_OUT = ("vllm", "vllm_overlay", "pytest", "_pytest", "hypothesis", _REWRITTEN, "nixl")


def main(folder: Path, at_once: int, *left_out: str) -> None:
    """Run what `folder` says; in each fork, this does not return."""
    parent = os.getppid()
    runs: list[dict[str, Any]] = json.loads((folder / "runs.json").read_text())
    culprit = share(left_out)
    if culprit:  # some releases of transformers bring anyio; nothing can be un-imported
        words = (str(folder), str(at_once), *left_out, culprit)
        again = [sys.executable, "-m", "tests.programs.forks", *words]
        os.execv(sys.executable, again)  # noqa: S606 - itself
    waiting = list(enumerate(runs))
    running: dict[int, tuple[int, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            number, run = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
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


def share(left_out: Sequence[str] = ()) -> str:
    """Import what all runs need, but for what is `left_out`.

    Returns:
        The module that brought anyio, if one did.

    Raises:
        RuntimeError: That has started a thread, or imported what each run has to import itself.
    """
    gc.disable()  # as the documentation of `gc.freeze` has it for a process that forks
    before = dict(os.environ)
    os.environ.update(FIRST)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read on import; tests.support.vllm_cpu sets it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in SHARED:
            if name in left_out:
                continue
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
            if _early() == [_REWRITTEN]:
                os.environ.clear()
                os.environ.update(before)
                return name
    os.environ.clear()
    os.environ.update(before)
    threads = len([*Path("/proc/self/task").iterdir()])  # those of C libraries as well
    if threads > 1 or threading.active_count() > 1 or _early():
        raise RuntimeError(f"cannot fork: {threads} threads, {_early()} imported")
    gc.freeze()  # else each collection in a fork looks at all of torch, and copies its memory
    return ""


def _early() -> list[str]:
    return [name for name in _KEPT_OUT if name in sys.modules]


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
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


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
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
