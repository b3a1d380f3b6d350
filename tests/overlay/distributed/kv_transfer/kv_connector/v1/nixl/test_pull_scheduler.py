"""Parameters that lie, where pull and push are two classes: they end no engine.

How a scheduler that pulls plays them is in test_scheduler.py; here are its further fields.
"""

from __future__ import annotations

import functools
import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.support.lying_params import GOOD, lying_params
from tests.support.nixl_worker import make_kv_cache_config, make_vllm_config
from tests.support.release import since
from tests.support.ring_groups import has, kept_in
from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.peers import Peers
from vllm_overlay.logging_utils.bounded_log import BoundedLog

push_scheduler = pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler", reason="from 0.24.0 on"
)

stock_pull = pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler", reason="from 0.24.0 on"
)

pull_scheduler = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler",
    reason="from 0.24.0 on",
)

_names = (f"request-{i}" for i in itertools.count())


@functools.cache
def scheduler() -> Any:  # noqa: ANN401 - the release may not have the class
    """One for all cases: what one leaves behind shows in the next."""
    config = make_vllm_config(connector="NixlPushConnector")
    return push_scheduler.NixlPushConnectorScheduler(config, "D", make_kv_cache_config())


def play(params: object, *, aborted: bool) -> Any:  # noqa: ANN401 - the metadata
    """One request's life as the scheduler leads it; what the worker is handed first."""
    side = scheduler()
    sampling = SamplingParams(max_tokens=1)
    request = Request(next(_names), list(range(40)), sampling, None)
    request.kv_transfer_params = params
    side.on_new_request(request)
    if not aborted:
        tokens, _ = side.get_num_new_matched_tokens(request, 0)
        blocks: Any = SimpleNamespace(
            get_unhashed_block_ids_all_groups=lambda: ([1, 2, 3],), blocks=((),)
        )
        side.update_state_after_alloc(request, blocks, tokens)
    else:
        request.status = RequestStatus.FINISHED_ABORTED
        side.request_finished(request, ([],))
    metadata = side.build_connector_meta(SimpleNamespace())
    if not aborted:
        request.status = RequestStatus.FINISHED_STOPPED
        side.request_finished(request, ([1, 2, 3],))
    return metadata


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_no_lie_hurts_the_engine(data: st.DataObject) -> None:
    params, aborted = data.draw(lying_params(GOOD)), data.draw(st.booleans())
    play(params, aborted=aborted)


@pytest.mark.parametrize("ids", [None, 5, [[1]]], ids=str)
def test_one_that_ends_unscheduled_need_not_name_blocks(ids: object) -> None:
    """Up to 0.25.1 stock's engine ends with a KeyError, and its worker with a TypeError."""
    params = {k: v for k, v in GOOD.items() if k != "remote_block_ids"}
    for asked in (params, {**params, "remote_block_ids": ids}):
        [told] = play(asked, aborted=True).reqs_to_recv.values()
        assert told.remote.block_ids == ()


@pytest.mark.parametrize("field", ["remote_engine_id", "remote_host", "remote_port", "tp_size"])
@pytest.mark.parametrize("aborted", [False, True])
def test_without_whom_to_ask_the_prompt_is_computed(field: str, aborted: bool) -> None:
    """Stock's engine ends with KeyError."""
    metadata = play({k: v for k, v in GOOD.items() if k != field}, aborted=aborted)
    assert not metadata.push_registrations
    assert not metadata.reqs_to_recv


@pytest.mark.parametrize("blocks", [GOOD["remote_block_ids"], None, [], [[]]])
def test_good_parameters_register(blocks: object) -> None:
    """The blocks are P's own business."""
    metadata = play({**GOOD, "remote_block_ids": blocks}, aborted=False)
    (registration,) = metadata.push_registrations.values()
    assert registration["remote_host"] == GOOD["remote_host"]
    assert list(metadata.reqs_to_recv) == list(metadata.push_registrations)
    assert list(play({**GOOD, "remote_block_ids": blocks}, aborted=True).reqs_to_recv)


@pytest.mark.parametrize("field", ["dcp_size", "pp_size", "remote_registration_generation"])
@pytest.mark.parametrize("value", ["1", 1.0, True, -1, 2**63, [1]])
def test_a_number_that_is_none(field: str, value: object) -> None:
    for find in (pull_scheduler.find_pull_problem, pull_scheduler.find_push_problem):
        problem = find({**GOOD, field: value})
        assert problem is not None and problem.field == field
    # Nobody reads it where no blocks are asked for.
    assert pull_scheduler.find_pull_problem({"do_remote_decode": True, field: value}) is None


@pytest.mark.parametrize("field", ["dcp_size", "pp_size", "remote_registration_generation"])
def test_a_number_that_is_null_is_not_said(field: str) -> None:
    metadata = play({**GOOD, field: None}, aborted=False)
    (registration,) = metadata.push_registrations.values()
    assert field not in registration or registration[field] is not None
    assert pull_scheduler.find_pull_problem({**GOOD, field: None}) is None


@pytest.mark.parametrize("expiry", [None, 0, 1.5, -1.0])
def test_when_blocks_expire(expiry: object) -> None:
    params = {**GOOD, "remote_blocks_expiry_time": expiry}
    assert pull_scheduler.find_pull_problem(params) is None


@pytest.mark.parametrize("expiry", ["soon", True, [1.0]])
def test_when_blocks_expire_and_no_time(expiry: object) -> None:
    problem = pull_scheduler.find_pull_problem({**GOOD, "remote_blocks_expiry_time": expiry})
    assert problem is not None and problem.field == "remote_blocks_expiry_time"


@pytest.mark.parametrize(
    "rank",
    [
        (0, 1),
        (1, 0),
        (-1, 0),
        (None, 0),
        ("0", 0),
        ([], 0),
        (0, []),
        ([], {}),
        (0, 0.0),
        (0, 2**70),
    ],
)
def test_the_listener_answers_whatever_rank_is_asked_for(
    rank: tuple[object, object], caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[tuple[bytes, ...]] = []
    socket: Any = SimpleNamespace(send_multipart=sent.append)
    pull_scheduler.answer_handshake(socket, b"who", {(0, 0): b"said"}, rank, b"now")
    pull_scheduler.answer_handshake(socket, b"who", {(0, 0): b"said"}, (0, 0), b"now")
    assert sent == [(b"who", b"", b"", b"now"), (b"who", b"", b"said", b"now")]
    assert len([m for m in caplog.messages if "there is none" in m]) == 1


# ---------------------------------------------------------------- how many blocks a prompt needs

PROMPT = 40
"""Tokens: three blocks of 16, the last of them half full."""


def tokens_read(
    blocks: list[int],
    *,
    groups: tuple[Any, ...] = ("full",),
    mla: bool = False,
    ranks: dict[str, int] | None = None,
    tokens: int = PROMPT,
    embedded: bool = False,
    **params: object,
) -> int:
    """How many tokens a scheduler that pulls promises to read, given so many blocks a group.

    `embedded` is a prompt without tokens, `ranks` are set in the parallel configuration, `params`
    put into good parameters.
    """
    config = make_vllm_config(
        mla=mla,
        hybrid=len(groups) > 1,
        extra_config={"bidirectional_kv_xfer": "do_remote_decode" in params},
    )
    side = stock_pull.NixlPullConnectorScheduler(config, "D", kept_in(groups, mla=mla))
    for name, count in (ranks or {}).items():
        setattr(config.parallel_config, name, count)
    if "do_remote_decode" in params:
        side.kv_recompute_threshold = 0
    request = Request(next(_names), list(range(tokens)), SamplingParams(max_tokens=1), None)
    ids = [list(range(1, count + 1)) for count in blocks]
    request.kv_transfer_params = {**GOOD, "remote_block_ids": ids, **params}
    if embedded:
        request.prompt_token_ids = None
    count, _ = side.get_num_new_matched_tokens(request, 0)
    return int(count)


@pytest.mark.parametrize(("blocks", "read"), [(2, 0), (3, PROMPT), (4, PROMPT)])
def test_a_prompt_is_read_where_the_blocks_hold_all_of_it(blocks: int, read: int) -> None:
    assert tokens_read([blocks]) == read


@pytest.mark.parametrize(
    ("ranks", "params"),
    [
        ({"decode_context_parallel_size": 2}, {}),
        ({"prefill_context_parallel_size": 2}, {}),
        ({}, {"dcp_size": 2}),
        ({"decode_context_parallel_size": 2}, {"dcp_size": 1}),
        ({"decode_context_parallel_size": 2}, {"dcp_size": 2}),
    ],
)
def test_context_ranks_share_the_blocks_of_a_prompt(
    ranks: dict[str, int], params: dict[str, Any]
) -> None:
    """Two ranks: two blocks each hold up to 64 tokens."""
    assert tokens_read([1], ranks=ranks, **params) == 0
    assert tokens_read([2], ranks=ranks, **params) == PROMPT


def test_decode_and_prefill_context_ranks_multiply() -> None:
    both = {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 2}
    assert tokens_read([1], ranks=both) == PROMPT
    assert tokens_read([1], ranks=both, tokens=65) == 0


@pytest.mark.parametrize(("blocks", "reads"), [(3, True), (2, False)])
def test_a_group_of_larger_blocks_needs_fewer(blocks: int, reads: bool) -> None:
    """80 tokens are five blocks of 16 and three of 32."""
    assert bool(tokens_read([5, blocks], groups=("full", "wide"), tokens=80)) == reads


@pytest.mark.parametrize(("blocks", "reads"), [(3, True), (2, False)])
def test_a_group_with_a_window_needs_no_more_than_its_window(blocks: int, reads: bool) -> None:
    """A window of 32 tokens lies in three blocks at the most."""
    assert bool(tokens_read([5, blocks], groups=("full", "sliding"), tokens=80)) == reads


@pytest.mark.parametrize(("blocks", "reads"), [(5, True), (4, False)])
def test_a_window_is_cut_by_the_manager_for_hybrids_only(blocks: int, reads: bool) -> None:
    """Without it a prefill server hands out the blocks of the whole prompt."""
    assert bool(tokens_read([blocks], groups=("sliding",), tokens=80)) == reads


def test_states_are_not_counted_in_tokens() -> None:
    assert tokens_read([1, 1], groups=("full", "mamba")) > 0


@pytest.mark.skipif(not since("0.29.0"), reason="from 0.29.0 on")
@pytest.mark.parametrize(("blocks", "reads"), [([5, 1], True), ([4, 1], False), ([5, 0], False)])
@pytest.mark.parametrize("kind", ["CircularBufferSpec", "KpoolTailSpec"])
def test_a_ring_is_one_block_however_long_the_prompt(
    kind: str, blocks: list[int], reads: bool
) -> None:
    if not has(kind):
        pytest.skip("not of this release")
    assert bool(tokens_read(blocks, groups=("full", kind), tokens=80)) == reads


@pytest.mark.parametrize(
    ("p", "d", "mla", "reads"),
    [
        ([5], ("full", "full"), True, since("0.30.0")),
        ([5, 5], ("full",), True, since("0.30.0")),
        ([5], ("full", "full"), False, False),
        ([5], ("full", "mamba"), True, False),
        ([4, 5], ("full", "full"), True, False),
        ([4], ("full",), True, False),
    ],
)
def test_a_p_with_other_groups_is_read_where_latent_caches_are_paired_by_region(
    p: list[int], d: tuple[Any, ...], mla: bool, reads: bool
) -> None:
    """A D with HiSparse has two groups of what are one on a P without."""
    assert bool(tokens_read(p, groups=d, mla=mla, tokens=80)) == reads


@pytest.mark.parametrize(
    "params", [{"remote_host": 7}, {"remote_num_tokens": -1}, {"dcp_size": 0}], ids=str
)
def test_what_else_is_wrong_is_refused_of_latent_caches_as_well(params: dict[str, Any]) -> None:
    assert tokens_read([3], mla=True) == PROMPT
    assert tokens_read([3], mla=True, **params) == 0


@pytest.mark.parametrize(
    ("blocks", "offered", "read"),
    [(2, 32, 32), (1, 32, 0), (1, 16, 16), (0, 0, 0), (3, 400, PROMPT), (2, 400, 0)],
)
def test_a_prefill_reads_as_much_as_it_is_offered(blocks: int, offered: int, read: int) -> None:
    """From a decode server, which says how many tokens its blocks hold."""
    prefill: dict[str, Any] = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_num_tokens": offered,
    }
    assert tokens_read([blocks], **prefill) == read


@pytest.mark.parametrize("offered", [None, 0])
def test_a_prefill_that_is_offered_no_tokens_reads_none(
    offered: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is wrong with that."""
    said: list[object] = []
    bad_params = pull_scheduler.shared.bad_params
    monkeypatch.setattr(bad_params, "warning", lambda *words: said.append(words))
    prefill: dict[str, Any] = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_num_tokens": offered,
    }
    assert tokens_read([0], **prefill) == 0
    assert said == []


def test_a_prompt_of_embeddings_is_upstream_s_to_judge() -> None:
    assert tokens_read([0], embedded=True) == 0


@pytest.mark.parametrize("params", [{}, {"do_remote_decode": True}, {"do_remote_prefill": False}])
def test_who_asks_for_no_blocks_needs_to_name_none(params: dict[str, Any]) -> None:
    config = make_vllm_config(connector="NixlPullConnector")
    side = stock_pull.NixlPullConnectorScheduler(config, "D", make_kv_cache_config())
    request = Request(next(_names), list(range(PROMPT)), SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = dict(params)
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)
    assert request.kv_transfer_params == params


def test_parameters_are_looked_at_once() -> None:
    side = scheduler()
    request = Request(next(_names), list(range(PROMPT)), SamplingParams(max_tokens=1), None)
    assert request.kv_transfer_params is None
    side.get_num_new_matched_tokens(request, 0)
    assert request.kv_transfer_params is None
    request.kv_transfer_params = dict(GOOD)
    side.get_num_new_matched_tokens(request, 0)
    checked = request.kv_transfer_params
    assert checked == {**GOOD, "remote_block_ids": ()}
    side.get_num_new_matched_tokens(request, 0)
    assert request.kv_transfer_params is checked


def test_a_scheduler_that_no_constructor_made_believes_what_it_is_given() -> None:
    """As some of vLLM's own tests make it."""
    side = object.__new__(stock_pull.NixlPullConnectorScheduler)
    request = Request(next(_names), list(range(PROMPT)), SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = {"do_remote_prefill": False, "remote_block_ids": "no list"}
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)
    assert request.kv_transfer_params["remote_block_ids"] == "no list"
    assert request.kv_transfer_params.use is pull_scheduler.shared.Use.READ


def test_the_tokens_that_d_computes_itself_need_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """33 tokens, of which the last is left to D: two blocks do."""
    side: Any = stock_pull.NixlPullConnectorScheduler
    upstream = "_mamba_prefill_token_count"  # in 0.24.0
    name = upstream if hasattr(side, upstream) else "_get_remote_prefill_token_count"
    monkeypatch.setattr(side, name, lambda self, count: count - 1)
    assert tokens_read([2], tokens=33) == 32
    assert tokens_read([2], tokens=34) == 0


# ---------------------------------------------------------------- single fields


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("dcp_size", 1, 1024),
        ("pp_size", 1, 1024),
        ("remote_registration_generation", 0, 2**63 - 1),
    ],
)
def test_a_number_is_good_from_its_least_to_its_greatest(field: str, low: int, high: int) -> None:
    for find in (pull_scheduler.find_pull_problem, pull_scheduler.find_push_problem):
        for good in (low, high):
            assert find({**GOOD, field: good}) is None
        for bad in (low - 1, high + 1):
            problem = find({**GOOD, field: bad})
            assert problem is not None and problem.field == field


def test_a_pull_counts_the_groups() -> None:
    assert pull_scheduler.find_pull_problem(GOOD, groups=1) is None
    problem = pull_scheduler.find_pull_problem(GOOD, groups=2)
    assert problem is not None and problem.field == "remote_block_ids"


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}])
def test_nothing_is_wrong_with_parameters_that_ask_for_nothing(params: object) -> None:
    for find in (pull_scheduler.find_pull_problem, pull_scheduler.find_push_problem):
        assert find(params) is None


@pytest.mark.parametrize("params", [[], {"do_remote_decode": "yes"}])
def test_what_is_no_role_is_wrong_also_without_blocks(params: object) -> None:
    for find in (pull_scheduler.find_pull_problem, pull_scheduler.find_push_problem):
        assert find(params) is not None


def test_a_push_needs_the_size_of_its_peer() -> None:
    """Upstream has no default there, other than for a pull."""
    unsized = {k: v for k, v in GOOD.items() if k != "tp_size"}
    assert pull_scheduler.find_pull_problem(unsized) is None
    problem = pull_scheduler.find_push_problem(unsized)
    assert problem is not None and problem.field == "tp_size"


@pytest.mark.parametrize("role", [True, False, None, "yes"])
def test_a_prefill_that_cannot_be_pushed_to_goes_on_for_its_own_client(role: object) -> None:
    params = {**GOOD, "remote_port": "5600", "do_remote_decode": role}
    request = Request(next(_names), list(range(40)), SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = params
    assert scheduler().get_num_new_matched_tokens(request, 0)[0] == 0
    checked = request.kv_transfer_params
    assert bool(checked.get("do_remote_prefill")) is (role is not True)
    ignored = checked.use is pull_scheduler.shared.Use.IGNORE
    assert ignored is (role is not True)


@pytest.mark.parametrize(
    ("params", "counted"),
    [
        (GOOD, {}),
        ([], {"PUSH_PARAMS_REFUSED": 1}),
        ({**GOOD, "remote_host": "10.8.0.1"}, {"PEER_NOT_ALLOWED": 1}),
        ({**GOOD, "remote_host": 7}, {"PUSH_PARAMS_REFUSED": 1}),
    ],
)
def test_what_cannot_be_pushed_is_counted_for_its_reason(
    params: Any,  # noqa: ANN401
    counted: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(vars(scheduler()), "_allowed_peers", Peers("127.0.0.1"))
    request = Request(next(_names), list(range(40)), SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = params
    scheduler().get_num_new_matched_tokens(request, 0)
    assert taken() == counted


@pytest.mark.parametrize("receives", [True, False])
def test_who_is_pushed_to_names_blocks_and_who_pushes_none(receives: bool) -> None:
    params = {**GOOD, "do_remote_prefill": receives, "do_remote_decode": not receives}
    request = Request(next(_names), list(range(40)), SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = params
    scheduler().get_num_new_matched_tokens(request, 0)
    assert request.kv_transfer_params["remote_block_ids"] == (() if receives else None)


def test_the_log_says_once_why_nothing_can_be_pushed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(pull_scheduler, "log", BoundedLog(logger))
    logger.addHandler(caplog.handler)
    try:
        play({k: v for k, v in GOOD.items() if k != "tp_size"}, aborted=False)
        play(GOOD, aborted=False)
    finally:
        logger.removeHandler(caplog.handler)
    said = {r.getMessage() for r in caplog.records if "cannot have its KV" in r.getMessage()}
    assert len(said) == 1
    assert said.pop().endswith(
        "kv_transfer_params.tp_size is missing. Its prompt is computed here."
    )
