# SPDX-License-Identifier: Apache-2.0
"""The logic of the kvfix patch set; vLLM's own files call it from a few hook lines.

Modules mirror vLLM's paths: `vllm_overlay.distributed.kv_transfer.kv_transfer_state` holds what
the hooks in `vllm/distributed/kv_transfer/kv_transfer_state.py` call. Importing this package
imports nothing of vLLM.
"""

from __future__ import annotations

from typing import Any


def fixes() -> list[dict[str, Any]]:
    """Return the fixes in this build, by id.

    Each is a dict with `id`, `title`, `kind` ("backport" of an upstream pull request or
    "companion"), `upstream_pr` ("owner/repository#number", or empty), `depends_on` (ids) and
    `tests` (pytest node ids).
    """
    return [module.FIX for name, module in _records() if name.startswith("fix_")]


def build() -> dict[str, str]:
    """Return what this wheel was made from; empty where vLLM was built from a patched tree."""
    return next((dict(module.BUILD) for name, module in _records() if name == "build"), {})


def _records() -> list[tuple[str, Any]]:
    # Imported when asked: a serving process never needs them.
    import importlib
    import pkgutil

    from vllm_overlay import provenance

    names = sorted(module.name for module in pkgutil.iter_modules(provenance.__path__))
    return [(name, importlib.import_module(f"{provenance.__name__}.{name}")) for name in names]
