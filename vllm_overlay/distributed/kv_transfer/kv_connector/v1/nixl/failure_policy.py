# SPDX-License-Identifier: Apache-2.0
"""All releases: what becomes of a request whose KV did not come, and so of P's blocks.

With `kv_load_failure_policy` "recompute" D computes the prompt, and nobody will read the blocks.
With "fail", which is the default, the client gets a 500, and a router may send the request to
another D, with the same `kv_transfer_params`: that one is to find them.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group


def computes_what_is_lost(worker: object) -> bool:
    """Return whether a D's worker belongs to an engine that computes what could not be read.

    The scheduler goes by the engine's policy. One of several connectors has a configuration of its
    own, with another, or none.
    """
    outer = get_kv_transfer_group() if has_kv_transfer_group() else None
    # A test may make a worker without its constructor.
    config = getattr(outer, "_kv_transfer_config", getattr(worker, "kv_transfer_config", None))
    return getattr(config, "kv_load_failure_policy", "fail") == "recompute"
