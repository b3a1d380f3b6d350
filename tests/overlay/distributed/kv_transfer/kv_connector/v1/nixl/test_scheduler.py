"""Parameters that lie, against a real scheduler and worker: no crash, no leak, P told if it can be.

How single fields are judged is in test_params.py; what a user sees is in test_k04.py.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tests.support import decode_engine
from tests.support.idle_engine import IdleEngine
from tests.support.lying_params import GOOD, lying_params
from tests.support.nixl_worker import (
    PACKED,
    GroupKind,
    connect,
    make_kv_cache_config,
    make_vllm_config,
    nixl_of,
)
from tests.support.release import since
from tests.support.two_way import TWO_WAY, two_way
from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import scheduler
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    asks_for_blocks,
    find_problem,
    peer_problem,
)
from vllm_overlay.logging_utils.bounded_log import BoundedLog

PROMPT = range(40)
_names = (f"request-{i}" for i in itertools.count())


@functools.cache
def engine_of(groups: tuple[GroupKind, ...]) -> IdleEngine:
    """One engine for all cases: a leak in one is seen in the next."""
    engine = IdleEngine(groups=groups, num_blocks=64)
    connect(engine.worker, "P")
    return engine


def handshakes(engine: IdleEngine) -> int:
    """Engines that the worker knows or wants to know."""
    return len(engine.worker._remote_agents) + len(engine.worker._handshake_futures)


@pytest.mark.parametrize("groups", [("full",), ("full", "sliding")], ids=len)
@settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_lie_hurts_the_engine(groups: tuple[GroupKind, ...], data: st.DataObject) -> None:
    good = {**GOOD, "remote_block_ids": [[1, 2, 3]] * len(groups)}
    params = data.draw(lying_params(good))
    aborted = data.draw(st.booleans())
    try:
        play(engine_of(groups), params, aborted)
    except BaseException:
        engine_of.cache_clear()  # the next case is not to suffer from this one
        raise


def play(engine: IdleEngine, params: Any, aborted: bool) -> None:  # noqa: ANN401 - that is it
    """One request's life."""
    nixl = nixl_of(engine.worker)
    nixl.heard.clear()
    free = engine._reusable()
    if isinstance(params, dict) and peer_problem(params) is None:
        params["remote_engine_id"] = "P"  # others would have to be shaken hands with
    name = next(_names)
    # Each prompt of its own, so that none is found in the prefix cache.
    engine.ask(name, [hash((name, i)) % 1000 for i in PROMPT])
    told = (
        isinstance(params, dict)
        and bool(params.get("do_remote_prefill"))
        and peer_problem(params) is None
    )
    engine.scheduler.requests[name].kv_transfer_params = params
    if aborted:
        engine.abort(name)
    served = False
    for _ in range(10):
        if not engine.scheduler.has_requests():
            break
        served |= name in engine.step().finished
        nixl.finish(*nixl.in_flight())
    assert served or aborted, "it waits for ever"
    if isinstance(params, dict) and params.get("do_remote_decode") is True:
        nixl.inbox = {"reader": [f"{name}:1".encode()]}  # it was a prefill for somebody else
        engine.step()
    assert not engine.scheduler.requests
    assert engine._reusable() == free, "blocks are lost"
    assert nixl.misuse == []
    heard = [payload for payloads in nixl.heard.values() for payload in payloads]
    assert len(heard) <= 1
    if told:
        assert heard == [f"{params['remote_request_id']}:1".encode()]
    assert handshakes(engine) == 1


@pytest.mark.parametrize("blocks", [3, 4, 30])
def test_good_parameters_are_read(blocks: int) -> None:
    """A peer with smaller blocks has more of them."""
    engine = IdleEngine()
    connect(engine.worker, "P")
    engine.ask("good", PROMPT, [list(range(blocks))[:7]])
    assert engine.step().computed == {}
    nixl = nixl_of(engine.worker)
    assert len(nixl.reads) == 1
    nixl.finish(*nixl.reads)
    assert engine.run()
    assert nixl.heard == {"P/0": [b"good-at-p:1"]}


def test_a_single_group_needs_no_list_around_it() -> None:
    """The form of earlier releases, which vLLM's own tests of the scheduler still use."""
    engine = IdleEngine()
    connect(engine.worker, "P")
    engine.ask("good", PROMPT)
    params = {**GOOD, "remote_block_ids": [5, 6, 7]}
    engine.scheduler.requests["good"].kv_transfer_params = params
    engine.step()
    nixl = nixl_of(engine.worker)
    assert len(nixl.reads) == 1
    nixl.finish(*nixl.reads)
    assert engine.run()


def test_a_prefix_that_is_cached_needs_no_blocks_of_its_own() -> None:
    """P hands out the whole prompt's blocks; D reads those that it lacks."""
    engine = IdleEngine()
    connect(engine.worker, "P")
    engine.ask("first", PROMPT)
    assert engine.run()
    engine.ask("second", PROMPT, [[1, 2, 3]])
    engine.step()
    nixl = nixl_of(engine.worker)
    nixl.finish(*nixl.in_flight())
    assert engine.run()
    assert nixl.heard == {"P/0": [b"second-at-p:1"]}


def test_a_sliding_window_hands_out_its_window() -> None:
    """Blocks that fell out of the window are never sent: three of five here."""
    engine = IdleEngine(groups=("full", "sliding"))
    connect(engine.worker, "P")
    engine.ask("good", range(80), [[1, 2, 3, 4, 5], [3, 4, 5]])
    engine.step()
    nixl = nixl_of(engine.worker)
    assert len(nixl.reads) == 1
    nixl.finish(*nixl.reads)
    assert engine.run()


@pytest.mark.parametrize(("theirs", "reads"), [(3, 1), (2, 0)])
def test_each_group_counts_in_blocks_of_its_own_size(
    theirs: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 tokens are five blocks of 16 and three of 32."""
    if PACKED:
        pytest.skip("the scheduler wants a hash for each size of blocks, from 0.29.0 on")
    if "scheduler_block_size" in inspect.signature(KVCacheManager).parameters:  # since 0.23.0
        sizes: dict[str, Any] = {"block_size": 32, "hash_block_size": 16}
        monkeypatch.setattr(decode_engine, "Scheduler", lambda **most: Scheduler(**most | sizes))
    engine = IdleEngine(groups=("full", "wide"))
    connect(engine.worker, "P")
    engine.ask("good", range(80), [[1, 2, 3, 4, 5], [6, 7, 8][:theirs]])
    computed = engine.step().computed
    nixl = nixl_of(engine.worker)
    assert len(nixl.reads) == reads
    assert computed == ({} if reads else {"good": (0, 80)})
    nixl.finish(*nixl.reads)
    assert engine.run()
    assert nixl.heard == {"P/0": [b"good-at-p:1"]}


def test_a_prefill_goes_on_whatever_it_was_offered(caplog: pytest.LogCaptureFixture) -> None:
    """Its own client reads from it: bad blocks to start from must not keep it from that."""
    engine = IdleEngine()
    engine.ask("prefill", PROMPT, max_tokens=1)
    params = {**GOOD, "do_remote_prefill": False, "do_remote_decode": True, "remote_port": "5600"}
    engine.scheduler.requests["prefill"].kv_transfer_params = params
    assert engine.step().finished == {"prefill": "length"}
    assert engine.scheduler.requests  # its blocks wait for a reader
    assert asks_for_blocks(params)


def test_what_a_prefill_server_is_offered_is_nothing_to_it_unless_it_is_set_up_to_read() -> None:
    """A router may have left it of an answer, and be right."""
    engine = IdleEngine()
    for req_id in ("first", "second"):
        params = {**GOOD, "do_remote_prefill": False, "do_remote_decode": True}
        engine.send(req_id, PROMPT, params, max_tokens=1)
    assert engine.step().finished == {"first": "length", "second": "length"}
    assert taken() == {}  # nothing refused, nothing used twice


@pytest.mark.parametrize(("blocks", "computed"), [([[1, 2, -3]], (0, 40)), ([[1, 2, 3]], None)])
def test_a_prefill_that_reads_from_a_decode_server(
    blocks: list[list[int]], computed: tuple[int, int] | None
) -> None:
    """It is told like any other owner of blocks that cannot be read."""
    pytest.importorskip(TWO_WAY, reason="from 0.21.0 on")
    engine = two_way(IdleEngine())
    connect(engine.worker, "P")
    engine.ask("prefill", PROMPT, max_tokens=1)
    offered = {"remote_block_ids": blocks, "remote_num_tokens": 40}
    engine.scheduler.requests["prefill"].kv_transfer_params = {
        **GOOD,
        **offered,
        "do_remote_prefill": False,
        "do_remote_decode": True,
    }
    assert engine.step().computed.get("prefill") == computed
    nixl = nixl_of(engine.worker)
    nixl.finish(*nixl.in_flight())
    for _ in range(3):  # from 0.22.0 on an engine that holds blocks for a reader is never idle
        engine.step()
    assert nixl.heard == {"P/0": [b"at-p:1"]}


def test_the_log_says_once_what_is_wrong(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "bad_params", BoundedLog(scheduler.logger))
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        engine = IdleEngine()
        connect(engine.worker, "P")
        engine.ask("bad", PROMPT, [[-1, 2, 3]])
        assert engine.run()
    finally:
        logger.removeHandler(caplog.handler)
    records = dict.fromkeys(caplog.records)  # one may come by two ways
    lines = [r.getMessage() for r in records if "cannot use the KV blocks" in r.getMessage()]
    assert lines == [
        "Request bad cannot use the KV blocks it was given: kv_transfer_params.remote_block_ids "
        "must hold block numbers from 0 to 2147483647. Its prompt is computed here; "
        "their owner is told to free them."
    ]


def test_a_stand_in_was_counted_by_the_handler_that_refused_its_request() -> None:
    side: Any = SimpleNamespace(vllm_config=make_vllm_config(), block_size=16)
    side.kv_cache_config = make_kv_cache_config()

    def look(**marks: bool) -> dict[str, int]:
        params = {**GOOD, "remote_block_ids": "none"}
        request: Any = SimpleNamespace(request_id="r", kv_transfer_params=params, **marks)
        scheduler.check(side, request, 1, find_problem, lambda *_: None)
        return taken()

    assert look() == look(abort_immediately=False) == {"PARAMS_REFUSED": 1}
    assert look(abort_immediately=True) == {}


@pytest.mark.skipif(since("0.24.0"), reason="a P that names none is of 0.19.x or before")
@pytest.mark.parametrize(("states", "received"), [([0, 0, 0], False), ([0, 0, 9], True)])
def test_a_hybrid_does_not_go_on_from_no_state(states: list[int], received: bool) -> None:
    engine = IdleEngine(groups=("full", "mamba"))
    connect(engine.worker, "P")
    engine.ask("asked", PROMPT, [[1, 2, 3], states])
    assert ("asked" not in engine.step().computed) is received


LENGTHS = [1, 15, 16, 17, 33, 48]
"""Of prompts, in blocks of 16."""

KINDS: list[tuple[GroupKind, ...]] = [
    ("full",),
    ("full", "sliding"),
    ("full", "mamba"),
    ("sliding",),
]


@pytest.mark.parametrize("groups", KINDS, ids="-".join)
def test_a_request_waits_only_for_what_there_is_to_read(groups: tuple[GroupKind, ...]) -> None:
    """Up to 0.29.0 a worker reports no receive without blocks, so nobody may wait for one."""
    waiting = 0
    for tokens, cached in itertools.product(LENGTHS, [0, *LENGTHS]):
        engine = IdleEngine(groups=groups)
        connect(engine.worker, "P")
        prompt = range(1000, 1000 + tokens)
        if cached:
            engine.ask("before", prompt[:cached], max_tokens=1)
            engine.step()
        engine.ask("asked", prompt, [_named(kind, tokens) for kind in groups])
        decided: Any = engine.scheduler.schedule().kv_connector_metadata
        if engine.scheduler.requests["asked"].status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            waiting += 1
            assert any(decided.reqs_to_recv["asked"].local_block_ids), (tokens, cached)
    assert waiting > len(LENGTHS)


def _named(kind: GroupKind, tokens: int) -> list[int]:
    """What P names of a prompt's blocks: of a state the one that it is in."""
    blocks = [*range(1, -(-tokens // 16) + 1)]
    return blocks[-1:] if kind == "mamba" else blocks
