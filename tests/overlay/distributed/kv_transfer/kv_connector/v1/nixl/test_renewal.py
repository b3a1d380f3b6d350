"""An engine that a read has failed from is forgotten, neither too early nor too late."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.kv_landing import Deployment
from tests.support.nixl_release import NixlConnectorMetadata, NixlConnectorWorker
from tests.support.nixl_worker import (
    ScriptedNixl,
    agent_name,
    await_handshakes,
    connect,
    lives,
    make_worker,
    nixl_of,
    peer_port,
    raising,
    receive,
    register_peer,
    script_handshake,
    step,
    topology_of,
)
from tests.support.reaching import reaching_peers
from vllm_overlay.distributed.kv_transfer.fix_counts import taken

renewal = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.renewal", reason="up to 0.31.0"
)
if not hasattr(NixlConnectorWorker.start_load_kv, "__wrapped__"):
    pytest.skip("up to 0.31.0", allow_module_level=True)

BROKEN = RuntimeError("remote disconnected")


class Peers:
    """Peers that answer handshakes, each time as if they had just started."""

    def __init__(self, worker: NixlConnectorWorker) -> None:
        self.worker = worker
        self.asked: list[str] = []
        self.away: set[str] = set()
        self.changes: dict[str, Any] = {}
        script_handshake(worker, self._answer)

    def _answer(self, engine_id: str, tp_size: int) -> dict[Any, str]:
        self.asked.append(engine_id)
        if engine_id in self.away:
            raise ConnectionError(engine_id)
        return register_peer(self.worker, engine_id, tp_size, **self.changes)


def connected(*, ranks: int = 1, **config: Any) -> tuple[NixlConnectorWorker, ScriptedNixl, Peers]:  # noqa: ANN401
    worker = make_worker(**config)
    connect(worker, "P", tp_size=ranks)
    return worker, nixl_of(worker), Peers(worker)


def ask(worker: NixlConnectorWorker, req_id: str, block: int, **more: Any) -> None:  # noqa: ANN401
    """One step that asks for a block of a request, and ends what handshakes it began."""
    lives(receive, worker, req_id, local_blocks=[[block]], remote_blocks=[[block]], **more)
    await_handshakes(worker)


def read_failed(worker: NixlConnectorWorker, engine_id: str) -> None:
    remote = SimpleNamespace(engine_id=engine_id, host="127.0.0.1", port=peer_port(engine_id))
    renewal.read_failed(worker, SimpleNamespace(remote=remote))


def removed(nixl: ScriptedNixl) -> list[str]:
    return [agent for (agent,) in nixl.called("remove_remote_agent")]


def test_nothing_is_released_while_a_read_is_in_flight_and_new_ones_wait() -> None:
    worker, nixl, peers = connected()
    ask(worker, "slow", 1)
    ask(worker, "bad", 2)
    slow, bad = nixl.reads
    nixl.fail(bad)
    assert lives(step, worker)[1] == {"bad"}
    ask(worker, "new", 3)
    ask(worker, "newer", 4)
    assert nixl.reads == [slow, bad]
    assert (removed(nixl), nixl.called("release_dlist_handle"), peers.asked) == ([], [], [])
    assert "PEER_MET_ANEW" not in taken()
    nixl.finish(slow)
    assert worker.get_finished()[1] == {"slow"}
    lives(step, worker)
    await_handshakes(worker)
    lives(step, worker)
    assert (removed(nixl), peers.asked) == ([agent_name("P", 0)], ["P"])
    assert len(nixl.called("release_dlist_handle")) == 1
    assert taken()["PEER_MET_ANEW"] == 1
    fresh = nixl.reads[2:]
    assert len(fresh) == 2
    nixl.finish(*fresh)
    assert lives(step, worker)[1] == {"new", "newer"}
    assert worker.get_block_ids_with_load_errors() == {2}
    assert nixl.misuse == []


class nixlInvalidParamError(Exception):  # noqa: N801 - NIXL's own name
    """What NIXL raises where a number of a block is beyond what the peer has."""


def test_numbers_that_a_client_made_up_disconnect_nobody() -> None:
    worker, nixl, peers = connected()
    ask(worker, "slow", 1)
    nixl.on["make_prepped_xfer"] = raising(nixlInvalidParamError("NIXL_ERR_INVALID_PARAM"))
    ask(worker, "made up", 2)
    lives(step, worker)
    nixl.on.clear()
    ask(worker, "new", 3)
    assert len(nixl.in_flight()) == 2  # it does not wait
    nixl.finish(*nixl.in_flight())
    lives(step, worker)
    assert (removed(nixl), peers.asked) == ([], [])
    assert worker.get_block_ids_with_load_errors() == {2}


def test_a_good_read_that_ends_after_a_bad_one_is_received() -> None:
    worker, nixl, _ = connected()
    ask(worker, "good", 1)
    ask(worker, "bad", 2)
    nixl.fail(nixl.reads[1])
    lives(step, worker)
    nixl.finish(nixl.reads[0])
    assert lives(step, worker)[1] == {"good"}
    assert worker.get_block_ids_with_load_errors() == {2}


def test_new_receives_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(renewal, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    worker, nixl, peers = connected()
    ask(worker, "hangs", 1)
    ask(worker, "bad", 2)
    nixl.fail(nixl.reads[1])
    lives(step, worker)
    ask(worker, "new", 3)
    assert len(nixl.reads) == 2
    clock[0] += renewal.PATIENCE
    ask(worker, "newer", 4)
    # As on stock, over the connection that there is, which the read that hangs still needs.
    assert [read.local for read in nixl.reads[2:]] != []
    assert len(nixl.in_flight()) == 3
    assert (removed(nixl), peers.asked) == ([], [])
    nixl.finish(*nixl.in_flight())
    assert lives(step, worker)[1] == {"hangs", "new", "newer"}
    lives(step, worker)
    assert removed(nixl) == [agent_name("P", 0)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_engines_are_left_alone(ranks: int) -> None:
    worker, nixl, peers = connected(ranks=ranks)
    connect(worker, "Q")
    ask(worker, "other", 1, engine_id="Q")
    ask(worker, "bad", 2, tp_size=ranks)
    nixl.fail(*nixl.reads[1:])
    lives(step, worker)
    ask(worker, "more", 3, engine_id="Q")
    assert removed(nixl) == [agent_name("P", rank) for rank in range(ranks)]
    assert len(nixl.in_flight()) == 2
    nixl.finish(*nixl.in_flight())
    assert lives(step, worker)[1] == {"other", "more"}
    assert peers.asked == []


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("bad", [0, 1])
def test_ranks_that_answer_do_not_keep_one_that_is_gone(mla: bool, bad: int) -> None:
    worker, nixl, peers = connected(ranks=2, mla=mla)
    gone = agent_name("P", bad)
    nixl.on["transfer"] = raising(
        BROKEN, lambda handle: any(r.handle == handle and r.agent == gone for r in nixl.reads)
    )
    # Always one more before the last has ended: on its own the engine is never without reads.
    ask(worker, "1", 1, tp_size=2)
    for number in range(2, 5):
        ask(worker, str(number), number, tp_size=2)
        nixl.finish(*nixl.in_flight())
        lives(step, worker)
    if mla and bad == 1:  # a copy, which is not read
        assert peers.asked == []
        return
    assert peers.asked
    nixl.on.clear()
    lives(step, worker)
    ask(worker, "d", 5, tp_size=2)
    lives(step, worker)
    nixl.finish(*nixl.in_flight())
    assert "d" in lives(step, worker)[1]
    assert 5 not in worker.get_block_ids_with_load_errors()
    assert nixl.misuse == []


def test_what_p_is_now_counts() -> None:
    worker, nixl, peers = connected()
    ask(worker, "bad", 1)
    nixl.fail(*nixl.reads)
    lives(step, worker)
    peers.changes = {"num_blocks": worker.num_blocks + 3, "agent_metadata": b"P/anew"}
    ask(worker, "d", 2)
    lives(step, worker)
    assert worker.dst_num_blocks["P"] == worker.num_blocks + 3
    assert nixl.reads[-1].agent == "P/anew"


def test_p_may_come_back_with_other_ranks() -> None:
    worker, nixl, _ = connected()
    ask(worker, "bad", 1)
    nixl.fail(*nixl.reads)
    lives(step, worker)
    ask(worker, "d", 2, tp_size=2)
    lives(step, worker)
    assert {read.agent for read in nixl.in_flight()} == {agent_name("P", 0), agent_name("P", 1)}


def known(worker: NixlConnectorWorker) -> set[str]:
    """Where a worker and its topology have something about P."""
    return {
        name
        for where in (worker, topology_of(worker))
        for name, table in vars(where).items()
        if isinstance(table, dict)
        and any("P" in (key if type(key) is tuple else [key]) for key in table)
    }


def test_nothing_is_left_of_an_engine_that_is_forgotten() -> None:
    worker, nixl, _ = connected()
    assert known(worker)
    ask(worker, "bad", 1)
    nixl.fail(*nixl.reads)
    lives(step, worker)
    lives(step, worker)
    assert known(worker) == set()
    assert worker.engine_id in worker.dst_num_blocks


def test_a_p_that_listens_and_does_not_answer_costs_each_request_one_handshake() -> None:
    worker, nixl, peers = connected()
    peers.away = {"P"}
    ask(worker, "bad", 1)
    nixl.fail(*nixl.reads)
    lives(step, worker)
    for number in range(2, 6):
        ask(worker, str(number), number)
        assert lives(step, worker)[1] == {str(number)}
        assert len(peers.asked) == number - 1
        for _ in range(5):
            assert lives(step, worker) == (set(), set())
    assert len(peers.asked) == 4
    assert worker.get_block_ids_with_load_errors() == set(range(1, 6))


def test_from_a_p_that_is_away_all_is_read_as_on_stock(caplog: pytest.LogCaptureFixture) -> None:
    worker, nixl, peers = connected()
    with reaching_peers(away={peer_port("P")}):
        nixl.on["transfer"] = raising(BROKEN)
        for number in range(1, 5):
            ask(worker, str(number), number)
            assert lives(step, worker)[1] == {str(number)}
    assert (removed(nixl), peers.asked) == ([], [])
    assert caplog.text.count("read from engine P has failed, and nobody listens at 127.0.0.1:") == 1
    assert "PEER_MET_ANEW" not in taken()
    ask(worker, "5", 5)  # it is back
    lives(step, worker)
    nixl.on.clear()
    ask(worker, "6", 6)
    lives(step, worker)
    nixl.finish(*nixl.in_flight())
    assert lives(step, worker)[1] == {"6"}
    assert (removed(nixl), peers.asked) == ([agent_name("P", 0)], ["P"])
    assert worker.get_block_ids_with_load_errors() == set(range(1, 6))


class Trying:
    """Stands in for the pool: somebody is tried until the test says what comes of it."""

    tried: list[Future[None]]

    def __init__(self, *_: object, **__: object) -> None:
        Trying.tried = []

    def submit(self, *_: object) -> Future[None]:
        self.tried.append(Future())
        return self.tried[-1]


def test_only_the_first_receives_wait_until_it_is_known_whether_p_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renewal, "ThreadPoolExecutor", Trying)
    worker, nixl, peers = connected()
    for turn in (1, 2):
        ask(worker, f"bad-{turn}", turn)
        ask(worker, f"worse-{turn}", turn + 2)
        nixl.fail(*nixl.in_flight())
        lives(step, worker)
        assert len(Trying.tried) == turn, "once for both"
        before = len(nixl.reads)
        ask(worker, f"new-{turn}", turn + 4)
        lives(step, worker)
        assert len(nixl.reads) - before == turn - 1
        Trying.tried[-1].set_exception(OSError("no route"))
        lives(step, worker)
        assert len(nixl.reads) - before == 1
        nixl.finish(*nixl.in_flight())
        assert lives(step, worker)[1] == {f"new-{turn}"}
    ask(worker, "slow", 7)
    ask(worker, "bad-3", 8)
    nixl.fail(nixl.reads[-1])
    lives(step, worker)
    Trying.tried[-1].set_result(None)
    ask(worker, "new-3", 9)  # it is back: what is under way ends first
    assert nixl.in_flight() == [nixl.reads[-2]]
    nixl.finish(*nixl.in_flight())
    for _ in range(2):
        lives(step, worker)
        await_handshakes(worker)
    assert (removed(nixl), peers.asked) == ([agent_name("P", 0)], ["P"])
    assert worker._renewals._away == set()


@pytest.mark.parametrize("more", [0, 1])
def test_so_many_are_tried_at_a_time(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "ThreadPoolExecutor", Trying)
    monkeypatch.setattr(renewal, "AT_ONCE", 2)
    worker, _, _ = connected()
    for engine_id in "QR":
        connect(worker, engine_id)
    for engine_id in "PQ":
        read_failed(worker, engine_id)
    for tried in Trying.tried[:more]:
        tried.set_result(None)
    read_failed(worker, "R")
    assert len(Trying.tried) == 2 + more


def test_without_another_thread_all_is_as_on_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trying, "submit", raising(RuntimeError("can't start new thread")))
    monkeypatch.setattr(renewal, "ThreadPoolExecutor", Trying)
    worker, nixl, peers = connected()
    for number in (1, 2):
        ask(worker, str(number), number)
        nixl.fail(*nixl.in_flight())
        assert lives(step, worker)[1] == {str(number)}
    assert (len(nixl.reads), removed(nixl), peers.asked) == (2, [], [])


def test_nobody_is_remembered_as_away_who_is_not_connected() -> None:
    worker, _, _ = connected()
    connect(worker, "Q")
    with reaching_peers(away={peer_port("P")}):
        read_failed(worker, "P")
        lives(step, worker)
    assert worker._renewals._away == {"P"}
    renewal.disconnect(worker, "P")
    read_failed(worker, "Q")
    lives(step, worker)
    assert worker._renewals._away == set()


def test_receives_wait_no_longer_for_a_p_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no name server answers."""
    clock = [0.0]
    monkeypatch.setattr(renewal, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(renewal, "ThreadPoolExecutor", Trying)
    worker, nixl, _ = connected()
    read_failed(worker, "P")
    ask(worker, "new", 3)
    assert nixl.reads == []
    clock[0] += renewal.PATIENCE
    lives(step, worker)
    assert len(nixl.in_flight()) == 1
    assert removed(nixl) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "[127.0.0.1]", "localhost"])
def test_whoever_listens_is_reached(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "create_connection", socket.create_connection)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert renewal._reach(host, port) is None
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.recv(1) == b"", "it hangs up"
    with pytest.raises(ConnectionRefusedError):
        renewal._reach(host, port)


@pytest.mark.parametrize("call", ["make_prepped_xfer", "transfer"])
def test_a_p_that_answers_and_cannot_be_read_costs_each_request_one_handshake(call: str) -> None:
    worker, nixl, peers = connected()
    nixl.on[call] = raising(BROKEN)
    for number in range(1, 5):
        ask(worker, str(number), number)
        lives(step, worker)
        for _ in range(5):
            lives(step, worker)
        assert len(peers.asked) == number - 1
    assert worker.get_block_ids_with_load_errors() == set(range(1, 5))
    assert len(removed(nixl)) == 4


def test_a_handshake_that_is_under_way_is_waited_for() -> None:
    """Its thread loads what NIXL knows of a peer, which is no time to remove another."""
    worker, nixl, peers = connected()
    go_on = threading.Event()
    answer = peers._answer

    def slow(engine_id: str, tp_size: int) -> dict[Any, str]:
        if engine_id == "Q":
            go_on.wait(10)
        return answer(engine_id, tp_size)

    script_handshake(worker, slow)
    lives(receive, worker, "other", local_blocks=[[1]], remote_blocks=[[1]], engine_id="Q")
    lives(receive, worker, "bad", local_blocks=[[2]], remote_blocks=[[2]])
    nixl.fail(*nixl.reads)
    lives(step, worker)
    lives(receive, worker, "d", local_blocks=[[3]], remote_blocks=[[3]])
    assert (removed(nixl), len(nixl.reads)) == ([], 1)
    go_on.set()
    await_handshakes(worker)
    lives(step, worker)
    assert removed(nixl) == [agent_name("P", 0)]
    await_handshakes(worker)
    lives(step, worker)
    assert sorted(read.agent for read in nixl.in_flight()) == [
        agent_name("P", 0),
        agent_name("Q", 0),
    ]


def test_a_read_that_nixl_does_not_let_go_of_keeps_its_engine() -> None:
    worker, nixl, _ = connected()
    nixl.on["release_xfer_handle"] = raising(BROKEN)
    ask(worker, "bad", 1)
    nixl.fail(*nixl.reads)
    for _ in range(3):
        assert lives(step, worker) == (set(), set())
    assert (removed(nixl), nixl.called("release_dlist_handle")) == ([], [])
    del nixl.on["release_xfer_handle"]
    assert lives(step, worker)[1] == {"bad"}
    lives(step, worker)
    assert removed(nixl) == [agent_name("P", 0)]


@pytest.mark.parametrize("call", ["remove_remote_agent", "release_dlist_handle"])
def test_what_nixl_keeps_does_not_keep_d_from_going_on(call: str) -> None:
    worker, nixl, peers = connected()
    nixl.on[call] = raising(BROKEN)
    ask(worker, "bad", 1)
    nixl.fail(*nixl.reads)
    lives(step, worker)
    ask(worker, "d", 2)
    lives(step, worker)
    assert peers.asked == ["P"]
    nixl.finish(*nixl.in_flight())
    assert lives(step, worker)[1] == {"d"}
    del nixl.on[call]


def test_one_that_only_notifies_does_not_wait() -> None:
    """Nothing else may be asked of D for long, and then there are no steps."""
    worker, nixl, _ = connected()
    ask(worker, "slow", 1)
    ask(worker, "bad", 2)
    nixl.fail(nixl.reads[1])
    lives(step, worker)
    before = len(nixl.heard[agent_name("P", 0)])
    lives(receive, worker, "gone", local_blocks=[], remote_request_id="other")
    assert [w.split(b":")[0] for w in nixl.heard[agent_name("P", 0)][before:]] == [b"other"]


@pytest.mark.parametrize(
    ("blocks", "engine_id", "waits"),
    [
        ([], "P", False),
        ([[]], "P", False),
        ([[], [3]], "P", True),
        ([[3]], "Q", False),
        ([[3]], None, False),
    ],
)
def test_only_what_is_read_from_a_failed_engine_waits(
    blocks: list[list[int]], engine_id: str | None, waits: bool
) -> None:
    worker, _, _ = connected()
    ask(worker, "slow", 1)
    read_failed(worker, "P")
    remote = engine_id and SimpleNamespace(engine_id=engine_id)
    asked = {"asked": SimpleNamespace(local_block_ids=blocks, remote=remote)}
    metadata = SimpleNamespace(reqs_to_recv=asked)
    renewal.shakes_hands_anew(lambda *_: None)(worker, metadata)
    assert metadata.reqs_to_recv == ({} if waits else asked)


@pytest.mark.parametrize("drained", [False, True])
def test_one_that_only_notifies_leaves_the_one_of_its_id_that_waits(drained: bool) -> None:
    worker, nixl, _ = connected()
    ask(worker, "slow", 1)
    ask(worker, "bad", 2)
    nixl.fail(nixl.reads[1])
    lives(step, worker)
    ask(worker, "d", 3)
    if drained:  # the one that waits goes on in the very step that brings the other
        nixl.finish(nixl.reads[0])
        lives(step, worker)
    lives(receive, worker, "d", local_blocks=[], remote_request_id="other")
    assert drained or len(nixl.reads) == 2
    nixl.finish(*nixl.in_flight())
    for _ in range(3):
        await_handshakes(worker)
        lives(step, worker)
    told = [words.split(b":")[0] for words in nixl.heard[agent_name("P", 0)]]
    assert told.count(b"other") == 1
    assert [read.local for read in nixl.reads[2:]] != []
    nixl.finish(*nixl.in_flight())
    assert lives(step, worker)[1] == {"d"}
    assert worker.get_block_ids_with_load_errors() == {2}


@pytest.mark.parametrize(("ours", "theirs"), [([[1]], [[1], [2], [3]]), ([[1, 2, 3]], [[1]])])
def test_what_fails_before_nixl_is_asked_does_not_disconnect(
    ours: list[list[int]], theirs: list[list[int]]
) -> None:
    worker, nixl, peers = connected()
    lives(receive, worker, "bad", local_blocks=ours, remote_blocks=theirs)
    lives(step, worker)
    nixl.finish(*nixl.in_flight())
    lives(step, worker)
    lives(step, worker)
    assert (removed(nixl), peers.asked) == ([], [])


def test_a_peer_that_calls_itself_as_we_do_is_not_disconnected() -> None:
    worker = make_worker()
    with worker._handshake_lock:
        worker._remote_agents[worker.engine_id] = {0: "itself"}
    read_failed(worker, worker.engine_id)
    lives(worker.start_load_kv, NixlConnectorMetadata())
    with worker._handshake_lock:
        assert worker._remote_agents.pop(worker.engine_id) == {0: "itself"}
    assert removed(nixl_of(worker)) == []
    assert worker.engine_id in worker.dst_num_blocks


def test_an_engine_that_vllm_has_evicted_meanwhile_is_let_go() -> None:
    worker, nixl, peers = connected()
    read_failed(worker, "P")
    renewal.disconnect(worker, "P")
    ask(worker, "d", 1)
    lives(step, worker)
    assert (removed(nixl), peers.asked) == ([agent_name("P", 0)], ["P"])
    assert len(nixl.in_flight()) == 1
    assert "PEER_MET_ANEW" not in taken()


def test_what_failed_before_a_handshake_says_nothing_about_what_came_of_it() -> None:
    worker = make_worker()
    read_failed(worker, "P")
    connect(worker, "P")
    ask(worker, "d", 1)
    assert removed(nixl_of(worker)) == []
    assert len(nixl_of(worker).in_flight()) == 1


def test_an_engine_that_something_is_under_way_with_is_in_use() -> None:
    def meta(engine_id: str | None) -> Any:  # noqa: ANN401 - a stand-in
        return SimpleNamespace(remote=engine_id and SimpleNamespace(engine_id=engine_id))

    worker = make_worker()
    worker._recving_metadata["of nobody"] = meta(None)
    assert renewal.unused(worker, {"P", "Q"}) == {"P", "Q"}
    worker._ready_requests.put(("ready", meta("P")))
    assert renewal.unused(worker, {"P", "Q"}) == {"Q"}
    worker._recving_transfers["unknown"] = []
    assert renewal.unused(worker, {"P", "Q"}) == set()


@pytest.mark.skipif(
    not Deployment(1, 1, split=2, mla=True).makes_its_blocks, reason="such a peer is refused there"
)
def test_handshakes_with_smaller_blocks_share_the_descriptors_of_our_memory() -> None:
    """Up to 0.26.0 there would be a list more, and none less, after each of them."""
    worker = make_worker(mla=True)
    half = worker.block_size // 2
    halves = [length // 2 for length in worker.block_len_per_layer]
    smaller = {"block_size": half, "block_lens": halves, "num_blocks": worker.num_blocks * 2}
    nixl = nixl_of(worker)
    for engine_id in ("P", "Q", "P"):
        connect(worker, engine_id, **smaller)
        renewal.disconnect(worker, engine_id)
    made = [agent for agent, *_ in nixl.called("prep_xfer_dlist")]
    assert len([agent for agent in made if agent[:2] not in ("P/", "Q/")]) == 2, made
    connect(worker, "P", **smaller)
    ask(worker, "d", 1)
    assert len(nixl.in_flight()) == 1
    assert nixl.misuse == []


def test_a_list_of_our_descriptors_is_made_once_for_each_size() -> None:
    made = {8: 3}
    worker = SimpleNamespace(
        src_xfer_handles_by_block_size=made,
        register_local_xfer_handler=lambda size: (size + 1, "descriptors"),
    )
    assert [renewal.list_of_size(worker, size) for size in (8, 16)] == [3, 17]


def test_a_worker_that_pushes_is_left_as_it_is() -> None:
    push = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker")
    start = push.NixlPushConnectorWorker.start_load_kv
    assert not hasattr(start, "__wrapped__")
    assert NixlConnectorWorker not in push.NixlPushConnectorWorker.__mro__
