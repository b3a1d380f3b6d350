"""K03: an empty receive is never reported as received.

A receive without blocks belongs to a request that D rejected or aborted, or whose prompt D had
already: it only tells P that its blocks are free. The scheduler awaits nothing, may not know the
request any more, and ends on an assertion when it hears that such a request was received.
"""

from __future__ import annotations

import pytest

from tests.support.nixl_worker import (
    attempt,
    await_handshakes,
    make_worker,
    receive,
    register_peer,
    script_handshake,
    step,
)


@pytest.mark.parametrize("progress", ["no answer", "half way"])
def test_a_failed_handshake_does_not_report_a_receive_without_blocks(progress: str) -> None:
    worker = make_worker(groups=("full", "sliding"))

    def break_off(engine_id: str, tp_size: int) -> dict[int, str]:
        if progress == "half way":
            register_peer(worker, engine_id, tp_size)
        raise RuntimeError("timed out")

    script_handshake(worker, break_off)
    receive(worker, "rejected", local_blocks=[], remote_blocks=[[5], [6]])
    await_handshakes(worker)
    assert attempt(step, worker) == (set(), set())
    assert worker.get_block_ids_with_load_errors() == set()
    assert attempt(step, worker) == (set(), set())
