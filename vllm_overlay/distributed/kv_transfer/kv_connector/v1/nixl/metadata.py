# SPDX-License-Identifier: Apache-2.0
"""All releases: what hooks in the NIXL connector's metadata call."""

from __future__ import annotations

import re

# `<release>+kvfix.<patch set>`, or `<release>+<local>.kvfix.<patch set>` over an in-house build.
_PATCHED = re.compile(r"(?P<stock>[^+]+(?:\+[^+]+(?=\.)|(?=\+)))[+.]kvfix\.\d[^+]*")


def handshake_version(vllm_version: str) -> str:
    """Return the version that stands for this engine in the NIXL handshake.

    The handshake refuses a peer of another vLLM version. The patch set leaves what is on the
    wire as it is, so a patched engine goes by the version of the build that was patched: a
    fleet can be rolled engine by engine, in any order. Every other version, also one that is no
    version at all, is returned as it is.

    Args:
        vllm_version: what `vllm.__version__` says, as in `0.20.2+cu129.kvfix.0.1.0`.

    Returns:
        The version without the patch set's part, as in `0.20.2+cu129`.
    """
    patched = _PATCHED.fullmatch(vllm_version)
    return patched["stock"] if patched else vllm_version
