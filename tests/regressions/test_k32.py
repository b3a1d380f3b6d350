"""K32: D looks for a P where the newest request says that it is, also for its heartbeats.

A P that comes up elsewhere under its engine id is named with its new address from then on, while
requests of the old one still wait on D.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import await_handshakes

OFFERED: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "P",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


def looked_for(*newer: dict[str, Any]) -> set[tuple[str, int, int]]:
    """Where D looks for P in one step in which nothing of it can be read.

    Args:
        newer: what requests that come one after another name differently from `OFFERED`.
    """
    engine = DecodeEngine(num_blocks=3)
    engine.ask("runs", range(1000, 1028), max_tokens=9)
    engine.step()  # there is room for nobody else
    asked: set[tuple[str, int, int]] = set()

    def handshake(host: str, port: int, tp_size: int, *_: object) -> None:
        asked.add((host, port, tp_size))
        raise ConnectionError(host)

    engine.worker._nixl_handshake = handshake
    for number, names in enumerate(({}, *newer)):
        params = {**OFFERED, **names, "remote_request_id": f"at-p-{number}"}
        engine.send(f"waits-{number}", range(100 * number, 100 * number + 32), params)
    engine.step()
    await_handshakes(engine.worker)
    return asked


@pytest.mark.parametrize(
    "moved", [{"remote_host": "127.0.0.2"}, {"remote_port": 5700}, {"tp_size": 2}], ids=str
)
def test_heartbeats_go_where_the_newest_request_says(moved: dict[str, Any]) -> None:
    place = {**OFFERED, **moved}
    expected = (place["remote_host"], place["remote_port"], place["tp_size"])
    # Up to 0.21.0 there are no heartbeats, and nobody looks before there is room.
    assert looked_for({"remote_host": "127.0.0.3"}, moved) <= {expected}
