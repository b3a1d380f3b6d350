"""Pulls that fail: the request, not the engine, and every rank of P that waits is told, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    agent_name,
    await_handshakes,
    connect,
    lives,
    make_worker,
    nixl_of,
    raising,
    receive,
    script_handshake,
    step,
)
from vllm_overlay.distributed.kv_transfer.fix_counts import taken

pull_worker = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker",
    reason="from 0.30.0 on; up to 0.29.0 see test_receive.py",
)


def pulling(ranks: int = 2) -> Any:  # noqa: ANN401 - the worker
    """A worker in the middle of a receive from each rank of P."""
    worker = make_worker(num_blocks=16)
    connect(worker, "P", tp_size=ranks)
    lives(receive, worker, tp_size=ranks)
    assert len(nixl_of(worker).reads) == ranks
    return worker


def heard(worker: Any) -> dict[str, int]:  # noqa: ANN401
    """How often each agent of P has heard of the request."""
    every = nixl_of(worker).heard
    return {agent: len([word for word in words if word]) for agent, words in every.items()}


def counted() -> dict[str, int]:
    """What fixes did, but for meeting such a peer anew, up to 0.31.0 (test_pull_renewal.py)."""
    counts = taken()
    counts.pop("PEER_MET_ANEW", None)
    return counts


ONCE = {agent_name("P", 0): 1, agent_name("P", 1): 1}


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("first", ["the bad one", "the good one"])
def test_a_rank_whose_read_failed_is_told_and_the_other_heard_from_nixl(
    bad: int, first: str
) -> None:
    worker = pulling()
    nixl = nixl_of(worker)
    ends: set[str] = set()
    for failing in (True, False) if first == "the bad one" else (False, True):
        assert not ends, "reported while a read is in flight"
        if failing:
            nixl.fail(nixl.reads[bad])
        else:
            nixl.finish(nixl.reads[1 - bad])
        ends |= lives(step, worker)[1]
    for _ in range(2):
        ends |= lives(step, worker)[1]
    assert ends == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == {1, 2}
    assert heard(worker) == ONCE
    assert set(nixl.heard[agent_name("P", bad)]) == {b"req-p:1"}
    assert counted() == {"RECEIVE_FAILED": 1, "UNREAD_TOLD": 1}


def test_when_all_is_well_nobody_is_told_twice() -> None:
    worker = pulling()
    nixl_of(worker).finish(*nixl_of(worker).reads)
    assert lives(step, worker) == (set(), {"req-d"})
    assert heard(worker) == ONCE
    assert not worker.get_block_ids_with_load_errors()
    assert taken() == {}


def test_a_peer_that_cannot_be_told_costs_a_count() -> None:
    worker = pulling()
    nixl = nixl_of(worker)
    nixl.on["send_notif"] = raising(RuntimeError("gone"))
    nixl.fail(*nixl.reads)
    ends: set[str] = set()
    for _ in range(3):
        ends |= lives(step, worker)[1]
    assert ends == {"req-d"}
    stats = worker.get_kv_connector_stats()
    assert sum(stats.data["num_failed_notifications"]) == 2
    assert counted() == {"RECEIVE_FAILED": 1}


def test_one_of_two_ranks_that_can_be_told_is() -> None:
    worker = pulling()
    nixl = nixl_of(worker)
    gone = agent_name("P", 0)
    nixl.on["send_notif"] = raising(RuntimeError("gone"), lambda agent, *_: agent == gone)
    nixl.fail(*nixl.reads)
    assert ended(worker) == {"req-d"}
    assert counted() == {"RECEIVE_FAILED": 1, "UNREAD_TOLD": 1}


def test_of_all_that_end_in_a_step_the_one_that_failed_is_told_of() -> None:
    worker = make_worker(num_blocks=16)
    connect(worker)
    for name in "abcdefgh":
        lives(receive, worker, name, remote_request_id=f"p-{name}")
    nixl = nixl_of(worker)
    nixl.fail(nixl.reads[4])
    nixl.finish(*nixl.in_flight())
    assert ended(worker, 1) == set("abcdefgh")
    assert nixl.heard[agent_name("P", 0)].count(b"p-e:1") == 1
    assert counted() == {"RECEIVE_FAILED": 1, "UNREAD_TOLD": 1}


def test_what_p_said_makes_no_sense_here() -> None:
    worker = make_worker(num_blocks=16)
    connect(worker)
    lives(receive, worker, local_blocks=[[1, 2, 3]], remote_blocks=[[5]])
    ends: set[str] = set()
    for _ in range(3):
        ends |= lives(step, worker)[1]
    assert ends == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == {1, 2, 3}
    lives(receive, worker, "next")
    nixl = nixl_of(worker)
    nixl.finish(*nixl.in_flight())
    assert lives(step, worker)[1] == {"next"}


def test_a_handle_that_nixl_keeps_stops_no_shutdown() -> None:
    worker = pulling()
    nixl = nixl_of(worker)
    nixl.on["release_xfer_handle"] = raising(RuntimeError("busy"))
    worker.shutdown()
    assert len(nixl.called("release_xfer_handle")) >= 2
    assert nixl.called("deregister_memory")
    assert nixl.misuse == []


@pytest.mark.skipif(
    not hasattr(NixlConnectorWorker, "_cleanup_remote_engines"),
    reason="upstream does not look whether NIXL still knows a peer",
)
def test_a_peer_that_nixl_has_dropped_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can reach it, until the next handshake, and that is for the next request."""
    worker = make_worker()
    connect(worker, tp_size=2)
    nixl = nixl_of(worker)
    monkeypatch.setattr(nixl, "check_remote_metadata", lambda agent: False)
    receive(worker, "reads", tp_size=2)
    failed, flies = nixl.reads
    nixl.fail(failed)
    assert lives(step, worker)[1] == set()
    receive(worker, "hits", local_blocks=[[]], remote_request_id="req-q", tp_size=2)
    receive(worker, "comes late", remote_request_id="req-r", tp_size=2)
    assert lives(step, worker)[1] == {"comes late"}
    nixl.fail(flies)
    assert lives(step, worker)[1] == {"reads"}
    assert nixl.called("send_notif") == []


def ended(worker: Any, steps: int = 3) -> set[str]:  # noqa: ANN401
    """What is reported as received within some steps."""
    return set().union(*(lives(step, worker)[1] for _ in range(steps)))


def test_p_is_told_how_many_of_our_ranks_read_from_it() -> None:
    """P counts them: with another number it would free the blocks too early, or never."""
    worker = make_worker(tp_size=2)
    connect(worker, "P", tp_size=1)
    lives(receive, worker)
    nixl = nixl_of(worker)
    (read,) = nixl.reads
    nixl.fail(read)
    assert ended(worker) == {"req-d"}
    assert nixl.heard == {agent_name("P", 0): [b"req-p:2"]}


@pytest.mark.parametrize("end", ["read", "failed", "refused"])
def test_ranks_with_the_same_latent_cache_are_told_once(end: str) -> None:
    """Upstream tells those that are not read from when the read has been posted."""
    worker = make_worker(mla=True)
    connect(worker, "P", tp_size=4)
    nixl = nixl_of(worker)
    if end == "refused":
        nixl.on["make_prepped_xfer"] = raising(RuntimeError("no such block"))
    lives(receive, worker, tp_size=4)
    (nixl.fail if end == "failed" else nixl.finish)(*nixl.in_flight())
    assert ended(worker) == {"req-d"}
    assert heard(worker) == {agent_name("P", rank): 1 for rank in range(4)}


def test_a_request_whose_prefix_we_hold_is_told_once_also_if_its_id_comes_back() -> None:
    """The id of a receive that ended well says nothing of the next one."""
    worker = pulling()
    nixl = nixl_of(worker)
    nixl.finish(*nixl.reads)
    assert ended(worker) == {"req-d"}
    lives(receive, worker, tp_size=2)
    nixl.fail(*nixl.in_flight())
    assert ended(worker) == {"req-d"}
    assert heard(worker) == {agent_name("P", 0): 2, agent_name("P", 1): 2}


def test_of_two_receives_only_the_one_that_failed_is_told_of() -> None:
    worker = pulling()
    nixl = nixl_of(worker)
    first = list(nixl.reads)
    lives(receive, worker, "other", remote_request_id="req-q", tp_size=2)
    nixl.fail(*first)
    assert ended(worker) == {"req-d"}
    assert {word for words in nixl.heard.values() for word in words} == {b"req-p:1"}
    nixl.finish(*nixl.in_flight())
    assert ended(worker) == {"other"}
    assert sorted(nixl.heard[agent_name("P", 0)]) == [b"req-p:1", b"req-q:1"]


def test_an_id_that_is_no_text_ends_nothing() -> None:
    """The client has made it up; NIXL gets bytes, and P knows no such request."""
    worker = make_worker()
    connect(worker)
    lives(receive, worker, remote_request_id="\ud800")
    nixl = nixl_of(worker)
    nixl.fail(*nixl.in_flight())
    assert ended(worker) == {"req-d"}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_whose_word_waits_for_all_its_reads_has_not_been_told(failing: int) -> None:
    """Mixed memory: a rank is read in two parts and told when all have arrived, or not at all."""
    worker: Any = make_worker(num_blocks=16)
    connect(worker, "P", tp_size=2)
    if "_mixed_mem_types" not in vars(worker):
        pytest.skip("the release knows no mixed memory")
    worker._mixed_mem_types = True
    worker._dram_src_handles_by_tp_ratio = dict(worker.src_xfer_handles_by_tp_ratio)
    worker._dram_src_handles_by_block_size = dict(worker.src_xfer_handles_by_block_size)
    every = np.arange(1024)
    worker._desc_is_dram_by_block_size = {worker.block_size: every % 2 == 0}
    worker._desc_pos_by_block_size = {worker.block_size: every}
    lives(receive, worker, tp_size=2)
    nixl = nixl_of(worker)
    assert len(nixl.reads) == 4
    nixl.fail(*nixl.reads[:failing])
    nixl.finish(*nixl.reads[failing:])
    assert ended(worker) == {"req-d"}
    assert heard(worker) == ONCE


def test_who_never_shook_hands_is_told_nothing() -> None:
    worker: Any = make_worker()
    refuses: Any = raising(RuntimeError("nobody listens"))
    script_handshake(worker, refuses)
    lives(receive, worker)
    await_handshakes(worker)
    assert ended(worker) == {"req-d"}
    assert not nixl_of(worker).heard


def test_what_fails_without_a_connection_is_upstream_s_to_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It starts a handshake there. That this raises is no failure of a read."""
    worker: Any = make_worker()
    error = RuntimeError("can't start new thread")
    monkeypatch.setattr(worker, "_background_nixl_handshake", raising(error))
    with pytest.raises(RuntimeError) as raised:
        receive(worker)
    assert raised.value is error
    assert not worker._recv_failures


def test_without_a_connection_it_is_asked_once() -> None:
    asked: list[str] = []
    meta: Any = SimpleNamespace(remote=SimpleNamespace(engine_id="P"))
    read = pull_worker.fails_between_reads(lambda self, req_id, meta: asked.append(req_id))
    read(make_worker(), "r", meta)
    assert asked == ["r"]


def test_a_read_that_was_not_posted_is_none() -> None:
    worker = pulling()
    read = pull_worker.notes_who_is_told(lambda self, *asked, **named: False)
    assert read(worker, SimpleNamespace(remote_rank=0), "P", request_id="req-d") is False


class TestFailsItsRequest:
    """40364 by itself; with K01 around it, that would catch the same."""

    @pytest.fixture
    def worker(self) -> Any:  # noqa: ANN401
        worker = make_worker()
        connect(worker)
        lives(receive, worker)
        return worker

    def test_what_is_raised_fails_the_request_and_ends_its_reads(self, worker: Any) -> None:  # noqa: ANN401
        read = pull_worker.fails_its_request(raising(ValueError("5 blocks for 3")))
        assert read(worker, "spec", "P", request_id="req-d") is False
        nixl_of(worker).finish(*nixl_of(worker).reads)
        assert ended(worker) == {"req-d"}
        assert worker.get_block_ids_with_load_errors() == {1, 2}

    @pytest.mark.parametrize("posted", [True, False])
    def test_a_read_that_raises_nothing_says_itself_what_became_of_it(
        self,
        worker: Any,  # noqa: ANN401
        posted: bool,
    ) -> None:
        read = pull_worker.fails_its_request(lambda self, *asked, **named: posted)
        assert read(worker, "spec", "P", request_id="req-d") is posted
        nixl_of(worker).finish(*nixl_of(worker).reads)
        assert ended(worker) == {"req-d"}
        assert not worker.get_block_ids_with_load_errors()


def test_a_receive_that_only_tells_p_is_no_failure() -> None:
    worker: Any = make_worker()
    connect(worker)
    lives(receive, worker, local_blocks=[])
    assert heard(worker) == {agent_name("P", 0): 1}
    assert ended(worker) == set()
    assert not worker._reads, "remembered for ever"
    assert sum(map(len, worker.xfer_stats.data.values())) == 0


def test_what_fails_between_two_ranks_is_no_receive_that_went_well() -> None:
    """Its blocks hold half of the prompt's KV; the rank that is not read from waits for a word."""
    worker: Any = make_worker(num_blocks=16)
    connect(worker, "P", tp_size=2)
    del worker.dst_xfer_side_handles["P"][1]  # as after a handshake that ended half way
    lives(receive, worker, tp_size=2)
    nixl = nixl_of(worker)
    nixl.finish(*nixl.in_flight())
    assert ended(worker) == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == {1, 2}
    assert heard(worker) == ONCE
