"""40449: skipped MLA ranks free their blocks at once.

A latent cache is the same on every rank of P, so a D with fewer ranks reads from one of them and
tells the others that they need not wait. What each P rank hears is handed, byte for byte, to a
real worker in P's role: it must free the blocks, and must not complain about a request that it
does not know. With D's own request id in the message the blocks stay until P's timeout.
"""

from __future__ import annotations

import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    agent_name,
    connect,
    hold,
    make_worker,
    nixl_of,
    receive,
    step,
)

UNKNOWN = "Potentially invalid KV blocks"  # what P logs about a request id that is not its own


def decoder(p_tp: int, d_tp: int = 1, rank: int = 0) -> NixlConnectorWorker:
    worker = make_worker(engine_id="D", tp_size=d_tp, tp_rank=rank, mla=True)
    connect(worker, "P", tp_size=p_tp)
    return worker


def freed_by(payloads: list[bytes], p_tp: int, rank: int) -> set[str]:
    """The requests that P's rank frees when it hears these notifications from D."""
    worker = make_worker(engine_id="P", tp_size=p_tp, tp_rank=rank, mla=True)
    hold(worker, "req-p")
    nixl_of(worker).inbox = {"D": payloads}
    sent, _ = step(worker)
    return sent


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("blocks", [((1, 2),), ()], ids=["read", "full-prefix-hit"])
def test_every_prefill_rank_frees_the_request_that_was_received(
    p_tp: int, d_tp: int, blocks: tuple[tuple[int, ...], ...], caplog: pytest.LogCaptureFixture
) -> None:
    heard: dict[str, list[bytes]] = {}
    for rank in range(d_tp):
        worker = decoder(p_tp, d_tp, rank)
        receive(worker, "req-d", local_blocks=blocks, remote_request_id="req-p", tp_size=p_tp)
        nixl = nixl_of(worker)
        nixl.finish(*nixl.reads)
        for agent, payloads in nixl.heard.items():
            heard.setdefault(agent, []).extend(payloads)
    freed = [freed_by(heard.get(agent_name("P", r), []), p_tp, r) for r in range(p_tp)]
    assert freed == [{"req-p"}] * p_tp
    assert UNKNOWN not in caplog.text
    assert [len(payloads) for payloads in heard.values()] == [1] * p_tp  # told once

    # What P does say of an id that is not its own, so that its silence above means something.
    assert freed_by([b"someone-else:1"], p_tp, 0) == set()
    assert UNKNOWN in caplog.text
