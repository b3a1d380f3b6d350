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
from unittest import mock

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
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.peers import Peers
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import Use
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


@pytest.mark.parametrize(
    ("changes", "problem", "owner"),
    [
        (
            {"remote_block_ids": [[-1, 2, 3]]},
            "remote_block_ids must hold block numbers from 0 to 2147483647",
            "is told to free them",
        ),
        (
            {"remote_block_ids": [[1]]},
            "remote_block_ids has 1 blocks where 40 tokens need 3",
            "is told to free them",
        ),
        (
            {"remote_port": 0},
            "remote_port must be from 1 to 65535",
            "cannot be told and keeps them until its own timeout",
        ),
    ],
)
def test_the_log_says_once_what_is_wrong(
    changes: dict[str, Any],
    problem: str,
    owner: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "bad_params", BoundedLog(scheduler.logger))
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        engine = IdleEngine()
        connect(engine.worker, "P")
        engine.ask("bad", PROMPT)
        engine.scheduler.requests["bad"].kv_transfer_params = {**GOOD, **changes}
        assert engine.run()
    finally:
        logger.removeHandler(caplog.handler)
    records = dict.fromkeys(caplog.records)  # one may come by two ways
    lines = [r.getMessage() for r in records if "cannot use the KV blocks" in r.getMessage()]
    assert lines == [
        f"Request bad cannot use the KV blocks it was given: kv_transfer_params.{problem}. "
        f"Its prompt is computed here; their owner {owner}."
    ]


def test_a_stand_in_was_counted_by_the_handler_that_refused_its_request() -> None:
    def look(**marks: bool) -> dict[str, int]:
        request = asking({"remote_block_ids": "none"}, **marks)
        scheduler.check(side("full"), request, 1, find_problem, lambda *_: None)
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


# ---------------------------------------------------------------- the check alone


def side(*groups: GroupKind, ranks: tuple[int, int] = (1, 1), **more: Any) -> Any:  # noqa: ANN401
    """What the check looks at in a scheduler, up to 0.23.0 in all of them.

    `ranks` that share a prompt's tokens: of decode and of prefill context parallelism.
    """
    config = make_vllm_config(hybrid=len(groups) > 1)
    config.parallel_config.decode_context_parallel_size = ranks[0]
    config.parallel_config.prefill_context_parallel_size = ranks[1]
    looked_at = {
        "vllm_config": config,
        "kv_cache_config": make_kv_cache_config(groups),
        "block_size": 16,
        "blocks_per_sw": [3 if kind == "sliding" else 0 for kind in groups],
        "use_host_buffer": False,
        "_has_mamba": "mamba" in groups,
        "_is_hma_required": len(groups) > 1,
    }
    return SimpleNamespace(**looked_at | more)


def asking(changes: dict[str, Any], tokens: int | None = 40, **more: Any) -> Any:  # noqa: ANN401
    """A request with good parameters, but for `changes`; no `tokens` are a prompt of embeddings."""
    prompt = None if tokens is None else list(range(tokens))
    return SimpleNamespace(
        request_id="r", kv_transfer_params={**GOOD, **changes}, prompt_token_ids=prompt, **more
    )


def upstream(*given: object) -> object:
    """A method of the scheduler."""
    return given


def blocks(*counts: int) -> list[list[int]]:
    return [list(range(1, count + 1)) for count in counts]


PREFILL = {"do_remote_prefill": False, "do_remote_decode": True}
BOTH = {"do_remote_prefill": True, "do_remote_decode": True}
READS_BACK: dict[str, Any] = {"is_bidirectional_kv_xfer_enabled": True}


def field_refused(part: Any, request: Any) -> str:  # noqa: ANN401 - stand-ins
    """Which of a request's parameters a scheduler refuses; none if it is empty."""
    with mock.patch.object(scheduler, "bad_params") as log:
        scheduler.skips_ignored(None)(upstream)(part, request)
    return log.warning.call_args.args[2].field if log.warning.called else ""


@pytest.mark.parametrize(
    ("groups", "ranks", "ids", "tokens", "refused"),
    [
        (["full"], (1, 1), blocks(3), 40, False),
        (["full"], (1, 1), blocks(2), 40, True),
        (["full"], (1, 1), blocks(0), None, False),  # upstream's to judge
        (["full"], (2, 1), blocks(2), 40, False),
        (["full"], (2, 1), blocks(1), 40, True),
        (["full"], (1, 2), blocks(1), 40, True),
        (["full"], (2, 2), blocks(1), 40, False),
        (["full", "wide"], (1, 1), blocks(5, 3), 80, False),
        (["full", "wide"], (1, 1), blocks(5, 2), 80, True),
        (["full", "sliding"], (1, 1), blocks(5, 3), 80, False),
        (["full", "sliding"], (1, 1), blocks(5, 2), 80, True),
        (["full", "sliding"], (1, 1), blocks(1, 1), 16, False),
        (["sliding"], (1, 1), blocks(4), 80, True),  # without the manager for hybrids
        (["full", "mamba"], (1, 1), [[0], [0, 9]], 40, False),
        (["full", "mamba"], (1, 1), [[1], [0, 0]], 40, True),
        (["full", "mamba"], (1, 1), [[1], []], 40, False),
    ],
)
def test_too_few_blocks_are_refused(
    groups: list[GroupKind],
    ranks: tuple[int, int],
    ids: list[list[int]],
    tokens: int | None,
    refused: bool,
) -> None:
    request = asking({"remote_block_ids": ids}, tokens)
    assert field_refused(side(*groups, ranks=ranks), request) == "remote_block_ids" * refused


@pytest.mark.parametrize(
    ("more", "count", "offered", "refused"),
    [
        ({}, 1, 32, False),  # it will not read them
        (READS_BACK, 1, 32, True),
        (READS_BACK, 1, 16, False),
        (READS_BACK, 3, 99, False),
        (READS_BACK, 0, None, False),
    ],
)
def test_a_prefill_is_refused_what_it_is_offered_and_cannot_read(
    more: dict[str, Any], count: int, offered: int | None, refused: bool
) -> None:
    request = asking(PREFILL | {"remote_block_ids": blocks(count), "remote_num_tokens": offered})
    assert field_refused(side("full", **more), request) == "remote_block_ids" * refused


@pytest.mark.parametrize(
    ("host_buffer", "changes", "refused"),
    [
        (True, BOTH, True),
        (False, BOTH, False),
        (True, {}, False),
        (True, PREFILL, False),
        (False, {"do_remote_prefill": False, "remote_block_ids": None}, False),
    ],
)
def test_two_roles_are_refused_with_a_host_buffer(
    host_buffer: bool, changes: dict[str, Any], refused: bool
) -> None:
    part = side("full", use_host_buffer=host_buffer, **READS_BACK)
    assert field_refused(part, asking(changes)) == "do_remote_decode" * refused


FREED = {"remote_block_ids": [[]], "remote_num_tokens": 0}
NO_ADDRESS = {"remote_port": "5600"}
STRANGER = {"remote_host": "10.8.0.1"}


@pytest.mark.parametrize(
    ("changes", "use", "left"),
    [
        ({}, Use.READ, GOOD),
        ({"remote_block_ids": [[1]]}, Use.NOTIFY, FREED),
        (NO_ADDRESS, Use.IGNORE, GOOD | NO_ADDRESS),
        (STRANGER, Use.IGNORE, GOOD | STRANGER),
        (PREFILL | {"remote_block_ids": [[-1]]}, Use.READ, PREFILL | FREED),
        (PREFILL | NO_ADDRESS, Use.READ, PREFILL | {"remote_block_ids": None}),
        (PREFILL | STRANGER, Use.READ, PREFILL | {"remote_block_ids": None}),
        (BOTH, Use.NOTIFY, FREED),
        ({"do_remote_decode": "yes"}, Use.NOTIFY, {"do_remote_decode": False} | FREED),
        ({"do_remote_decode": "yes", "do_remote_prefill": False}, Use.IGNORE, {}),
    ],
)
def test_what_becomes_of_parameters(
    changes: dict[str, Any], use: Use, left: dict[str, Any]
) -> None:
    part = side("full", use_host_buffer=True, _allowed_peers=Peers("127.0.0.1"), **READS_BACK)
    request = asking(changes)
    matches = scheduler.matches_only_readable(upstream)  # type: ignore[arg-type]
    matched: object = matches(part, request, 0)
    assert matched == ((part, request, 0) if use is Use.READ else (0, False))
    params = request.kv_transfer_params
    assert {name: params.get(name) for name in left} == left
    ended = scheduler.skips_ignored("nothing")(upstream)(part, request)
    assert ended == ("nothing" if use is Use.IGNORE else (part, request))
    assert request.kv_transfer_params is params  # it is looked at once


@pytest.mark.parametrize(
    "params", [None, {"do_remote_prefill": True, "remote_block_ids": "no list"}]
)
def test_what_is_not_looked_at_is_upstream_s(params: dict[str, Any] | None) -> None:
    """Nothing, and what some of vLLM's own tests give a scheduler that no constructor made."""
    request: Any = SimpleNamespace(kv_transfer_params=params)
    part: Any = SimpleNamespace()
    assert scheduler.skips_ignored("nothing")(upstream)(part, request) == (part, request)
    matches = scheduler.matches_only_readable(upstream)  # type: ignore[arg-type]
    matched: object = matches(part, request, 0)
    assert matched == (part, request, 0)
    assert request.kv_transfer_params == params


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({}, {}),
        (STRANGER, {"PEER_NOT_ALLOWED": 1}),
        (STRANGER | NO_ADDRESS, {"PARAMS_REFUSED": 1}),
        ({"remote_host": None}, {"PARAMS_REFUSED": 1}),
    ],
)
def test_what_is_refused_is_counted_for_its_reason(
    changes: dict[str, Any], counted: dict[str, int]
) -> None:
    part = side("full", _allowed_peers=Peers("127.0.0.1"))
    scheduler.check(part, asking(changes), 1, find_problem, lambda *_: None)
    assert taken() == counted


def test_what_is_no_object_is_refused() -> None:
    request: Any = SimpleNamespace(request_id="r", kv_transfer_params=["do_remote_prefill"])
    assert scheduler.check(side("full"), request, 1, find_problem, lambda *_: None) == {}
    assert taken() == {"PARAMS_REFUSED": 1}


@pytest.mark.parametrize(
    ("groups", "ids", "seen"),
    [
        (1, [5, 6], [[5, 6]]),
        *((1, ids, ids) for ids in ([[5]], [], (5, 6), [5, True], "56")),
        *((groups, [5, 6], [5, 6]) for groups in (0, 2)),
    ],
)
def test_only_a_list_of_numbers_stands_for_a_single_group(
    groups: int, ids: object, seen: object
) -> None:
    found: list[object] = []

    def find(params: dict[str, Any], *, groups: int) -> None:
        found.append(params["remote_block_ids"])

    request = asking({"remote_block_ids": ids})
    scheduler.check(side("full"), request, groups, find, lambda *_: None)
    assert found == [seen]


@pytest.mark.parametrize("rank", [1, -1, None, "0", 0.0, [], {}])
def test_the_listener_answers_whatever_rank_is_asked_for(rank: object) -> None:
    sent: list[tuple[bytes, ...]] = []
    socket: Any = SimpleNamespace(send_multipart=sent.append)
    with mock.patch.object(scheduler, "no_such_rank") as log:
        scheduler.answer_handshake(socket, b"who", {0: b"said"}, rank)
    assert log.warning.call_args.args[1] is rank
    assert taken() == {"NO_SUCH_RANK": 1}
    scheduler.answer_handshake(socket, b"who", {0: b"said"}, 0)
    assert sent == [(b"who", b"", b""), (b"who", b"", b"said")]
    assert taken() == {}


class Down(dict[Any, bytes]):
    """A plugin's metadata while P has no links."""

    def __getitem__(self, rank: object) -> bytes:
        return b""


def test_the_listener_says_what_a_plugin_says_of_a_rank() -> None:
    sent: list[tuple[bytes, ...]] = []
    socket: Any = SimpleNamespace(send_multipart=sent.append)
    scheduler.answer_handshake(socket, b"who", Down({0: b"said"}), 0)
    assert sent == [(b"who", b"", b"")]
    assert taken() == {}, "there is such a rank"
