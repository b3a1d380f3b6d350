"""K08: after a failed read P is told, once, by the ranks that did not complete.

P holds a request's blocks until all who were to read them have said that they are through, or
until VLLM_NIXL_ABORT_REQUEST_TIMEOUT. NIXL says so for a read that completes. For one that does
not, D has to; but not for one that did, because P would count that as another reader's word.
"""

from __future__ import annotations

import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    agent_name,
    attempt,
    connect,
    hold,
    make_worker,
    nixl_of,
    raising,
    receive,
    received,
    sent,
    step,
)

TOLD = [b"req-p:1"]


def decoder(p_tp: int = 2, *, mla: bool = False) -> NixlConnectorWorker:
    worker = make_worker(mla=mla)
    connect(worker, "P", tp_size=p_tp)
    return worker


def heard(worker: NixlConnectorWorker, p_tp: int = 2) -> list[list[bytes]]:
    """What each rank of P has heard so far, from reads that completed and from us."""
    return [nixl_of(worker).heard.get(agent_name("P", rank), []) for rank in range(p_tp)]


@pytest.mark.parametrize("how", ["ERR", "raises"])
@pytest.mark.parametrize("failing", [0, 1])
def test_the_rank_whose_read_failed_is_told_and_the_other_is_not_told_again(
    failing: int, how: str
) -> None:
    worker = decoder()
    nixl = nixl_of(worker)
    receive(worker, tp_size=2)
    bad, good = nixl.reads[failing], nixl.reads[1 - failing]
    if how == "raises":
        nixl.on["check_xfer_state"] = raising(RuntimeError("lost"), lambda h: h == bad.handle)
    else:
        nixl.fail(bad)
    assert isinstance(attempt(step, worker), tuple)
    assert heard(worker) == [[], []]  # not while the other read is in flight
    nixl.finish(good)
    assert received(worker) == {"req-d"}
    assert isinstance(attempt(step, worker), tuple)
    assert heard(worker) == [TOLD, TOLD]


@pytest.mark.parametrize("call", ["make_prepped_xfer", "transfer"])
@pytest.mark.parametrize("refused", [0, 1])
def test_ranks_that_are_never_read_from_are_told(refused: int, call: str) -> None:
    worker = decoder()
    nixl = nixl_of(worker)
    attempts = iter(range(2))
    nixl.on[call] = raising(RuntimeError("no route"), lambda *_: next(attempts) == refused)
    assert attempt(receive, worker, tp_size=2) is None
    nixl.finish(*nixl.in_flight())
    assert received(worker) == {"req-d"}
    assert isinstance(attempt(step, worker), tuple)
    assert heard(worker) == [TOLD, TOLD]


def test_a_request_that_makes_no_sense_here_still_frees_its_blocks_there() -> None:
    worker = decoder()
    assert (
        attempt(receive, worker, local_blocks=[[1, 2, 3]], remote_blocks=[[5]], tp_size=2) is None
    )
    assert received(worker) == {"req-d"}
    assert heard(worker) == [TOLD, TOLD]


def test_the_one_rank_that_a_latent_cache_is_read_from_is_told() -> None:
    worker = decoder(mla=True)
    receive(worker, tp_size=2)
    nixl_of(worker).fail(*nixl_of(worker).reads)
    assert received(worker) == {"req-d"}
    assert isinstance(attempt(step, worker), tuple)
    assert heard(worker)[0] == TOLD


def test_all_ranks_are_told_where_the_one_read_of_a_latent_cache_is_refused() -> None:
    """Those that it is not read from as well: upstream tells them before the read, or after it."""
    worker = decoder(p_tp=4, mla=True)
    nixl_of(worker).on["transfer"] = raising(RuntimeError("no route"))
    assert attempt(receive, worker, tp_size=4) is None
    assert isinstance(attempt(step, worker), tuple)
    assert heard(worker, 4) == [TOLD] * 4


def test_a_rank_that_cannot_be_told_does_not_keep_the_others_from_it() -> None:
    worker = decoder(p_tp=4)
    nixl = nixl_of(worker)
    receive(worker, tp_size=4)
    nixl.fail(*nixl.reads)
    nixl.on["send_notif"] = raising(RuntimeError("gone"), lambda agent, _: agent.endswith("0"))
    assert received(worker) == {"req-d"}
    assert heard(worker, 4) == [[], TOLD, TOLD, TOLD]


def test_p_frees_the_blocks_of_a_read_that_failed() -> None:
    worker = decoder(p_tp=1)
    receive(worker)
    nixl_of(worker).fail(*nixl_of(worker).reads)
    assert isinstance(attempt(step, worker), tuple)
    prefill = make_worker(engine_id="P")
    hold(prefill, "req-p")
    nixl_of(prefill).inbox = {"D": heard(worker, 1)[0]}
    assert sent(prefill) == {"req-p"}
