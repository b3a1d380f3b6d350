"""K24: a client that names peers that are not there does not fill the log."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    await_handshakes,
    make_worker,
    receive,
    script_handshake,
)

REQUESTS = 100
A_FEW = 20


@pytest.fixture
def worker() -> NixlConnectorWorker:
    return make_worker()


def nobody(engine_id: str, _: int) -> dict[object, str]:
    raise ConnectionRefusedError(f"{engine_id} is not there")


def test_a_loop_of_requests_costs_few_lines(
    worker: NixlConnectorWorker, caplog: pytest.LogCaptureFixture
) -> None:
    script_handshake(worker, nobody)
    for n in range(REQUESTS):
        receive(worker, f"r{n}", engine_id=f"gone-{n}")
    await_handshakes(worker)
    said = Counter(line.split("|")[0] for line in caplog.messages)
    assert all(lines <= A_FEW for lines in said.values()), said
