"""P is told of blocks that nobody will read, and not of those that another D may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state

from tests.support.nixl_worker import (
    agent_name,
    connect,
    lives,
    make_worker,
    nixl_of,
    raising,
    receive,
    step,
)
from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.failure_policy import (
    computes_what_is_lost,
)

Policy = Literal["recompute", "fail"]


@pytest.mark.parametrize("how", ["is refused", "fails", "makes no sense"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_read_that_failed_frees_what_d_computes_itself(policy: Policy, how: str) -> None:
    worker = make_worker(policy=policy)
    connect(worker, "P")
    nixl = nixl_of(worker)
    if how == "is refused":
        nixl.on["transfer"] = raising(RuntimeError("no route"))
    local = [[1, 2, 3]] if how == "makes no sense" else [[1]]
    lives(receive, worker, "r", local_blocks=local, remote_blocks=[[5]])
    nixl.fail(*nixl.in_flight())
    assert lives(step, worker)[1] == {"r"}
    heard = nixl.heard.get(agent_name("P", 0), [])
    assert heard == ([b"req-p:1"] if policy == "recompute" else [])
    assert taken().get("UNREAD_TOLD", 0) == len(heard)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_engines_policy_counts_and_not_that_of_one_of_several_connectors(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = SimpleNamespace(_kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy))
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", outer)
    for own in ("recompute", "fail"):
        worker = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_load_failure_policy=own))
        assert computes_what_is_lost(worker) is (policy == "recompute")


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_connector_of_somebody_elses_may_say_nothing(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", SimpleNamespace())
    assert computes_what_is_lost(make_worker(policy=policy)) is (policy == "recompute")


@pytest.mark.parametrize("worker", [SimpleNamespace(), SimpleNamespace(kv_transfer_config=None)])
def test_a_worker_without_a_configuration_tells_nobody(worker: object) -> None:
    assert computes_what_is_lost(worker) is False
