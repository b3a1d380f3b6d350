# SPDX-License-Identifier: Apache-2.0
"""All releases: what is a plugin's own, and is left to work as it does on stock.

Plugins derive from NIXL's classes and know more than vLLM does: of a lease that several requests
read, of a prompt whose last token nobody sends, of tables of their own for each engine.
"""

from __future__ import annotations

_OURS = ("vllm", "vllm_overlay")


def is_plugins(thing: object) -> bool:
    """Whether a class or a method comes from elsewhere than vLLM and this package."""
    home: str = getattr(thing, "__module__", None) or _OURS[0]
    return home.partition(".")[0] not in _OURS
