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


def faults() -> list[str]:
    """Return what is not as the build was made, a sentence for each file; empty if all is.

    Looked at are the patched files of vLLM and the modules of this package, by the sha256 that the
    build keeps of them, and that Python finds vLLM beside this package. vLLM is not imported.
    """
    import hashlib
    import importlib.util
    from pathlib import Path

    site = Path(__file__).resolve().parent.parent
    found = []
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None or not Path(spec.origin).resolve().is_relative_to(site):
        where = spec and spec.origin
        found.append(f"vllm: Python imports {where or 'none'}, and not the one in {site}")
    for name, digest in files().items():
        path = site / name
        if not path.is_file():
            found.append(f"{name}: is missing")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            found.append(f"{name}: is not the file of this build")
    return found


def files() -> dict[str, str]:
    """Return sha256 by path of what the wheel changed or added, from the folder of this package on.

    Empty where vLLM was built from a patched tree.
    """
    return next((dict(module.FILES) for name, module in _records() if name == "files"), {})


def _records() -> list[tuple[str, Any]]:
    # Imported when asked: a serving process never needs them.
    import importlib
    import pkgutil

    from vllm_overlay import provenance

    names = sorted(module.name for module in pkgutil.iter_modules(provenance.__path__))
    return [(name, importlib.import_module(f"{provenance.__name__}.{name}")) for name in names]
