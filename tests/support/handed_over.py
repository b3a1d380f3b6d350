"""What a router hands on from P to D."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.harness import HarnessError
from tests.support.nixl_worker import peer_port
from tests.support.prefill_engine import PrefillEngine


def handed_over(p: PrefillEngine, req_id: str, prompt: Sequence[int]) -> dict[str, Any]:
    """Have P compute a prompt; return its answer, as of an engine "P", for a D that is to read."""
    p.prefill(req_id, prompt)
    p.run(8)
    answer = p.answers[req_id]
    if answer is None:
        raise HarnessError("a P that hands out nothing", "kv_transfer_params")
    answer.pop("remote_lease", None)  # nobody listens there
    return answer | {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "P",
        "remote_host": "127.0.0.1",
        "remote_port": peer_port("P"),
    }
