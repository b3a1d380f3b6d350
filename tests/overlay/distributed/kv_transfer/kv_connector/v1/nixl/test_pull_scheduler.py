"""Parameters that lie, where pull and push are two classes: they end no engine.

How a scheduler that pulls plays them is in test_scheduler.py; here are its further fields.
"""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.support.lying_params import GOOD, lying_params
from tests.support.nixl_worker import make_kv_cache_config, make_vllm_config

push_scheduler = pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler", reason="from 0.24.0 on"
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
    play(data.draw(lying_params(GOOD)), aborted=data.draw(st.booleans()))


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
@pytest.mark.parametrize("value", ["1", 1.0, True, None, -1, 2**63, [1]])
def test_a_number_that_is_none(field: str, value: object) -> None:
    for find in (pull_scheduler.find_pull_problem, pull_scheduler.find_push_problem):
        problem = find({**GOOD, field: value})
        assert problem is not None and problem.field == field
    # Nobody reads it where no blocks are asked for.
    assert pull_scheduler.find_pull_problem({"do_remote_decode": True, field: value}) is None


@pytest.mark.parametrize("expiry", [None, 0, 1.5, -1.0])
def test_when_blocks_expire(expiry: object) -> None:
    params = {**GOOD, "remote_blocks_expiry_time": expiry}
    assert pull_scheduler.find_pull_problem(params) is None


@pytest.mark.parametrize("expiry", ["soon", True, [1.0]])
def test_when_blocks_expire_and_no_time(expiry: object) -> None:
    problem = pull_scheduler.find_pull_problem({**GOOD, "remote_blocks_expiry_time": expiry})
    assert problem is not None and problem.field == "remote_blocks_expiry_time"


@pytest.mark.parametrize(
    "rank", [(0, 1), (1, 0), (-1, 0), (None, 0), ("0", 0), ([], {}), (0, 0.0), (0, 2**70)]
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
