"""A small vLLM with tests of its own: `python -m tests.scripts.upstream_toys FOLDER ARGUMENTS`.

Runs `nox -s upstream_tests` as a user would, with real wheels, real pytest processes and the real
plugins. Only what is too big for a test is replaced: the vLLM wheels, the release's source tree,
and torch, which the wheels bring as a small module of the same name. Limits are a few seconds.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from scripts.commands import upstream_tests as command
from scripts.patchset.registry import Registry, UpstreamTest
from scripts.project import project
from scripts.prove.environment import Environment
from scripts.system.console import entry
from scripts.upstream_tests import later, selection, session, side
from scripts.upstream_tests.later import ForwardTest
from tests.scripts import toys, wheels

RELEASE = "0.20.2"
UNIT = "tests/v1/kv_connector/unit"

_PLATFORM = "class CpuPlatform:\n    def is_cpu(self):\n        return True\n"
_VLLM = {
    "vllm/platforms/__init__.py": "_current_platform = None\n",
    "vllm/platforms/cpu.py": _PLATFORM,
    "vllm/config.py": "",
    "vllm/distributed/kv_transfer/kv_connector/v1/nixl/worker.py": "",
    "vllm/v1/attention/selector.py": "",
    "torch/__init__.py": "def set_num_threads(number):\n    pass\n",
    "torch/distributed.py": "def is_backend_available(name):\n    return True\n",
}

CONFIG = """
import gc, pytest, torch, vllm
from vllm.platforms import _current_platform

def test_cpu():
    assert _current_platform.is_cpu()
    assert torch.distributed.is_backend_available("gloo")
    assert not torch.distributed.is_backend_available("nccl")
    assert gc.get_freeze_count()  # the other plugin

def test_breaks():
    assert vllm.VALUE == 1

def test_mended():
    assert vllm.VALUE == 2

@pytest.mark.parametrize("n", [1, 2])
def test_named(n):
    assert vllm.VALUE == n or n == 2

def test_wants_gpu():
    raise RuntimeError("Found no NVIDIA driver on your system")

def test_skipped():
    pytest.skip("never")

@pytest.mark.parametrize("n", range(vllm.VALUE))
def test_appears(n):
    pass

@pytest.mark.parametrize("n", range(3 - vllm.VALUE))
def test_vanishes(n):
    pass

def test_abort_timeout_on_prefiller():
    assert False, "is left out"
"""

FLAKY = """
import os, pathlib, vllm

def once(name):
    path = pathlib.Path(os.environ["VLLM_CACHE_ROOT"], name)
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        return False
    path.touch()
    return True

def test_fails_once_on_patched():
    assert vllm.VALUE == 1 or not once("patched")

def test_fails_once_on_stock():
    assert vllm.VALUE == 2 or not once("stock")

STATE = []

def test_leaves_something():
    STATE.append(vllm.VALUE)

def test_fails_in_company_on_patched():
    assert 2 not in STATE
"""

CRASH = """
import os, signal, time

def test_first():
    pass

def test_exits():
    os._exit(3)

def test_between():
    pass

def test_is_killed():
    os.kill(os.getpid(), signal.SIGSEGV)

def test_last():
    pass
"""

HANG = """
import signal, time

def test_first():
    pass

def test_sleeps():
    time.sleep(600)

def test_sleeps_beyond_reach():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(600)

def test_last():
    pass
"""

DEADLY = """
import os
os._exit(7)
"""

SLOW = """
import time

def test_slow():
    time.sleep(600)
"""


LATER = """
import vllm

def test_discriminates():
    assert vllm.VALUE == 2

def test_proves_nothing():
    pass
"""


class ToyEnvironment(Environment):
    """This interpreter in place of an environment with vLLM; the real installation of a wheel."""

    def __init__(self, release: str) -> None:
        self.release = release
        self.python = Path(sys.executable)
        self.stock = _wheel(FOLDER / "stock", RELEASE, 1)

    def make(self) -> Environment:
        return self

    def contents(self) -> list[str]:
        return ["toys"]


class ToySide(side.Side):
    """A side whose pytest starts in half the time."""

    def _variables(self) -> dict[str, str]:
        return {**super()._variables(), "PYTEST_ADDOPTS": " ".join(toys.FEWER_PLUGINS)}


def _wheel(folder: Path, version: str, value: int) -> Path:
    folder.mkdir(exist_ok=True)
    files = {name: text.encode() for name, text in _VLLM.items()}
    files["vllm/__init__.py"] = f"VALUE = {value}\n".encode()
    for name in list(files):
        for parent in list(Path(name).parents)[:-1]:
            files.setdefault(f"{parent}/__init__.py", b"")
    return wheels.stock_wheel_file(folder, files, version=version, tags="py3-none-any")


def tree(folder: Path, **files: str) -> None:
    """Write a release's source tree with tests: `config=…` becomes test_config.py."""
    for name, text in files.items():
        path = folder / "tree" / UNIT / f"test_{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "tree" / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")


def _registry() -> Registry:
    test = f"{UNIT}/test_config.py::test_named"
    names = (UpstreamTest("<=0.21.0", test, "it expects the defect"),)
    return toys.registry(toys.fix("39907", upstream_tests=names), toys.fix("K00"))


def _later(release: str, registry: Registry, folder: Path) -> dict[str, ForwardTest]:
    path = folder.parent / UNIT / "test_later.py"
    path.write_text(LATER)
    test = f"{UNIT}/test_later.py"
    return {
        f"{test}::test_discriminates": ForwardTest("39907", "0.22.0", "tests/x.py::y", True, ""),
        f"{test}::test_proves_nothing": ForwardTest("K00", "0.22.0", "tests/x.py::z", False, "old"),
    }


if __name__ == "__main__":
    FOLDER = Path(sys.argv.pop(1))
    of_side = {
        "WORK": FOLDER / "work",
        "LIMIT": float(os.environ.get("TOY_LIMIT", "3")),
        "_GRACE": 4.0,
        "_START": 60.0,
        "release_tree": lambda _: FOLDER / "tree",
    }
    of_command = {"WORK": FOLDER / "work", "REPORTS": FOLDER / "reports"}
    of_session = {
        "Environment": ToyEnvironment,
        "Side": ToySide,
        "load_registry": _registry,
        "project": lambda: replace(project(), releases=(RELEASE,)),
        "patched_wheel": lambda _: _wheel(FOLDER / "patched", f"{RELEASE}+kvfix.0.1.0", 2),
        "release_tree": lambda _: FOLDER / "tree",
    }
    for module, replaced in (
        (side, of_side),
        (session, of_session),
        (command, of_command),
        (later, {"write": _later}),
        (selection, {"_BATCH": 120}),  # bytes
    ):
        for name, value in replaced.items():
            setattr(module, name, value)
    entry(command.main)
