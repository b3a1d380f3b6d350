"""A rejected request's blocks under MultiConnector: the first child that knows them tells P."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.support.nixl_release import connector_module
from tests.support.nixl_worker import make_kv_cache_config, make_vllm_config
from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count, taken
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.connector import WorkerReport
from vllm_overlay.v1.engine.stand_in import stand_in_id

MOONCAKE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"

REMOTE: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1]],
    "remote_engine_id": "P",
    "remote_request_id": "at-p",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
}


@pytest.fixture
def connector() -> MultiConnector:
    """A scheduler-side connector of two NIXL connectors."""
    child = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    config = make_vllm_config(
        connector="MultiConnector", extra_config={"connectors": [child, child]}
    )
    return MultiConnector(config, KVConnectorRole.SCHEDULER, make_kv_cache_config())


def aborted(params: dict[str, Any]) -> Request:
    """A request that ended before it was scheduled."""
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    request = Request("gone", [0], sampling, None)
    request.status = RequestStatus.FINISHED_ABORTED
    return request


def receives(connector: MultiConnector) -> list[list[str]]:
    """What each child hands to its workers."""
    metadata = connector.build_connector_meta(SchedulerOutput.make_empty())
    return [list(child.reqs_to_recv) for child in metadata.metadata]


def test_one_child_tells(connector: MultiConnector) -> None:
    assert connector.request_finished(aborted(dict(REMOTE)), []) == (False, None)
    assert receives(connector) == [["gone"], []]


def test_a_child_leaves_what_it_does_not_know(connector: MultiConnector) -> None:
    """Parameters that are not NIXL's stay as they are, for whichever child they are meant."""
    params = {"do_remote_prefill": True, "transfer_id": "of another connector"}
    request = aborted(params)
    assert connector.request_finished(request, []) == (False, None)
    assert receives(connector) == [[], []]
    assert request.kv_transfer_params == params


def report(connector: Any, pending: int) -> None:  # noqa: ANN401 - NIXL's
    connector.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=WorkerReport(pending))
    )


def test_a_child_that_wants_looks_gets_them(connector: MultiConnector) -> None:
    assert connector.next_look() is None
    connector.looks()
    assert connector.next_look() is None
    first, second = connector._connectors
    assert isinstance(second, connector_module.NixlConnector)
    report(second, 2)
    first_look = connector.next_look()
    assert first_look is not None
    report(first, 1)
    assert connector.next_look() == first_look, "the sooner of two"
    report(first, 0)
    second.update_connector_output(KVConnectorOutput())  # no news
    assert connector.next_look() == first_look
    connector.looks()
    assert (connector.next_look() or 0.0) > first_look
    report(second, 0)
    assert connector.next_look() is None


def test_a_child_of_another_kind_is_not_asked(connector: MultiConnector) -> None:
    other: Any = object()
    connector._connectors.insert(0, other)
    connector.looks()
    assert connector.next_look() is None


def stand_in() -> Request:
    """What an API server sends for a request that it refused."""
    request = aborted({**REMOTE, "transfer_id": "Mooncake's", "remote_bootstrap_addr": "h:1"})
    request.request_id = stand_in_id("gone")
    request.abort_immediately = True
    return request


FINISH: list[tuple[str, Any]] = [
    (name, blocks)
    for name, blocks in (("request_finished", []), ("request_finished_all_groups", ([],)))
    if hasattr(MultiConnector, name)
]


class Other:
    """A connector that a stand-in must not reach."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def request_finished(self, request: Request, blocks: object) -> tuple[bool, None]:
        self.seen.append(request.request_id)
        return False, None

    request_finished_all_groups = request_finished

    def on_new_request(self, request: Request) -> None:
        self.seen.append(request.request_id)


@pytest.mark.parametrize(("finish", "blocks"), FINISH)
def test_a_refused_request_is_seen_by_nixl_alone(finish: str, blocks: Any) -> None:  # noqa: ANN401
    """Mooncake would report an empty pull that nobody awaits, and the scheduler dies of that."""
    children = [{"kv_connector": n, "kv_role": "kv_both"} for n in ("NixlConnector",) * 2]
    config = make_vllm_config(connector="MultiConnector", extra_config={"connectors": children})
    several = MultiConnector(config, KVConnectorRole.SCHEDULER, make_kv_cache_config())
    other: Any = Other()
    several._connectors[0] = other
    request = stand_in()
    if hasattr(several, "on_new_request"):
        several.on_new_request(request)
    assert getattr(several, finish)(request, blocks) == (False, None)
    assert other.seen == []
    nixl = several._connectors[1].build_connector_meta(SchedulerOutput.make_empty())
    assert list(nixl.reqs_to_recv) == [request.request_id]

    left = aborted(dict(REMOTE))  # a client's own request, that is aborted: as ever
    getattr(several, finish)(left, blocks)
    assert other.seen == [left.request_id]


def test_the_release_s_own_mooncake_beside_nixl() -> None:
    """It reports an empty pull that nobody awaits as received, and the scheduler dies of that."""
    pytest.importorskip(
        MOONCAKE, reason="up to 0.18.1 it wants a package of Mooncake's", exc_type=ImportError
    )
    children = [
        {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"},
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    ]
    config = make_vllm_config(connector="MultiConnector", extra_config={"connectors": children})
    several = MultiConnector(config, KVConnectorRole.SCHEDULER, make_kv_cache_config())
    mooncake, nixl = several._connectors
    request = stand_in()
    if hasattr(several, "on_new_request"):
        several.on_new_request(request)
    several.request_finished(request, [])
    assert not mooncake.connector_scheduler._reqs_need_recv
    assert list(nixl.build_connector_meta(SchedulerOutput.make_empty()).reqs_to_recv) == [
        request.request_id
    ]


def rank_with(connector: MultiConnector, *acted: Acted) -> ModelRunnerOutput:
    """What a rank sends, in whose process fixes have acted; its second child is another's."""
    connector._connectors[0].connector_worker = SimpleNamespace(
        nixl_wrapper=SimpleNamespace(name="d/0")
    )
    for each in acted:
        count(each)
    meta = connector.build_connector_worker_meta()
    assert taken() == {}, "they travel"
    output = KVConnectorOutput(kv_connector_worker_meta=meta)
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)


@pytest.mark.parametrize("quiet", [False, True], ids=["all ranks", "one rank"])
def test_counts_of_all_ranks_arrive(connector: MultiConnector, quiet: bool) -> None:
    """Through vLLM's own wrapper of reports, its aggregator, and back to the child."""
    lines = [Acted.RECEIVE_FAILED, Acted.UNREAD_TOLD]
    ranks = [rank_with(connector, *lines), rank_with(connector, *([] if quiet else lines))]
    together = KVOutputAggregator(expected_finished_count=2).aggregate(ranks)
    assert together is not None and together.kv_connector_output is not None
    connector.update_connector_output(together.kv_connector_output)
    assert taken() == dict.fromkeys(("RECEIVE_FAILED", "UNREAD_TOLD"), 2 - quiet)
