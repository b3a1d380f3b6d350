"""A pytest plugin: vLLM without a GPU and without a model hub (``-p tests.support.vllm_cpu``).

It serves our tests and, alone in a folder of the import path (``-p vllm_cpu``), upstream's own.

The published wheel is built for CUDA and finds no device on a machine without a GPU. The NIXL
connector itself is plain Python, so its tests only need vLLM to believe that it runs on its own
CPU platform, and that before any module asks for the platform. Loading this plugin does that.
The nccl backend is reported as missing, so that vLLM falls back to gloo as it does by itself in
a build without it.

Also for every test of the session, unless the environment already says otherwise:

- torch computes in one thread: vLLM's worker pins its thread to a core, and with it those that
  torch starts, which then wait for each other, each for its turn on that core;
- no model hub is asked (``HF_HUB_OFFLINE``);
- vLLM's caches have a folder of their own for each installed vLLM, because releases that share
  one read each other's model-registry entries (``VLLM_CACHE_ROOT``);
- the NIXL side channel has a free port: the default one is easily taken by another run, and the
  listener then waits for a minute before it gives up (``VLLM_NIXL_SIDE_CHANNEL_PORT``).

pytest turns warnings into errors for our own code. What vLLM and its dependencies warn about
while they are imported is theirs, so imports happen here, quietly; warnings that they raise at
run time are ignored by the narrow filters of `THIRD_PARTY_WARNINGS`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import socket
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

THIRD_PARTY_WARNINGS = (
    # A deprecation counts where it is attributed to our code, that is, where we call what is
    # deprecated; what vLLM and its dependencies do among themselves is theirs to change.
    r"ignore::DeprecationWarning:(?!vllm_overlay|tests)",
    r"ignore::PendingDeprecationWarning:(?!vllm_overlay|tests)",
    r"ignore::FutureWarning:torch(\.|$)",
    # SWIG-built extension types (sentencepiece and others) warn without a module of their own.
    r"ignore:builtin type .* has no __module__ attribute:DeprecationWarning",
    # pytest-asyncio asks for a setting that pytest would reject where it is not installed.
    r"ignore:The configuration option .asyncio_default_fixture_loop_scope. is unset",
)
"""Filters in pytest's ini syntax; each names whose warning it silences."""

_MODULES = (
    # What nearly every test needs. The attention-backend helpers are imported late by vLLM
    # itself, so they are named here to be imported quietly.
    "torch",
    "vllm.config",
    "vllm.v1.attention.selector",
)

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _cache_root() -> str:
    """A folder that belongs to this user and to the vLLM that would be imported."""
    spec = importlib.util.find_spec("vllm")
    origin = spec.origin if spec is not None and spec.origin is not None else "vllm"
    key = hashlib.sha256(origin.encode()).hexdigest()[:12]
    return str(Path(tempfile.gettempdir()) / f"kvfix-vllm-cache-{os.getuid()}-{key}")


def prepare() -> None:
    """Make this process run vLLM on its CPU platform; later calls change nothing.

    Raises:
        RuntimeError: vLLM has already settled for another platform.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CACHE_ROOT", _cache_root())
    os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_PORT", str(_free_port()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        platforms: Any = importlib.import_module("vllm.platforms")
        cpu: Any = importlib.import_module("vllm.platforms.cpu")
        settled = platforms._current_platform
        # Some releases (0.26.0 to 0.31.0) ask while they are imported, find nothing, and keep no
        # more than the answer.
        if settled is None or settled.is_unspecified():
            platforms._current_platform = cpu.CpuPlatform()
        elif not platforms._current_platform.is_cpu():
            raise RuntimeError(
                "vLLM was asked for its platform before tests.support.vllm_cpu was loaded: "
                f"{platforms._current_platform!r}"
            )
        # One module up to 0.19.1, a package since.
        packaged = importlib.util.find_spec(f"{_CONNECTORS}.nixl") is not None
        nixl = f"{_CONNECTORS}.nixl.worker" if packaged else f"{_CONNECTORS}.nixl_connector"
        for name in (*_MODULES, nixl):
            importlib.import_module(name)
        # That answer among others: pinned memory takes a GPU.
        copies: Any = sys.modules.get("vllm.utils.torch_utils")
        if hasattr(copies, "PIN_MEMORY"):
            copies.PIN_MEMORY = False
        torch: Any = importlib.import_module("torch")
        torch.set_num_threads(1)
        distributed: Any = importlib.import_module("torch.distributed")
        available = distributed.is_backend_available
        distributed.is_backend_available = lambda name: name != "nccl" and available(name)


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Register the filters for warnings that are not about our code, before plugins start."""
    for line in THIRD_PARTY_WARNINGS:
        early_config.addinivalue_line("filterwarnings", line)


prepare()
