"""The engine core's own refusals: which of them tell the prefill server, and which must not."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.serving_app import REMOTE

if not hasattr(EngineCoreProc, "_handle_request_validation_error"):
    pytest.skip("the engine core validates nothing there", allow_module_level=True)


def with_params(params: object) -> SamplingParams:
    return SamplingParams(extra_args={"kv_transfer_params": params})


def refused(
    sampling: SamplingParams | None, *, several: bool = False, connector: str = "NixlConnector"
) -> Any:  # noqa: ANN401
    """What the engine core's thread finds in its queue after a request was refused."""
    outputs: list[str] = []
    core: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector=connector, kv_connector_module_path=None, kv_connector_extra_config={}
            )
        ),
        publish_dp_lb_stats=several,
        request_block_hasher=None,
        input_queue=queue.Queue(),
        _send_finish_outputs_to_client=lambda ids, *_: outputs.extend(ids),
    )
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        client_index=3,
    )
    error: Any = ValueError("no such grammar")
    EngineCoreProc._handle_request_validation_error(core, request, error)
    assert outputs == ["r"]
    return core.input_queue


def test_p_hears_of_a_request_that_the_engine_core_refuses() -> None:
    kind, (stand_in, _) = refused(with_params(REMOTE)).get_nowait()
    assert kind is EngineCoreRequestType.ADD
    assert stand_in.client_index == 3, "its API server's"
    assert stand_in.abort_immediately
    engine = IdleEngine()
    connect(engine.worker, REMOTE["remote_engine_id"])
    engine.scheduler.add_request(stand_in)
    engine.abort(stand_in.request_id)
    assert engine.run()
    assert nixl_of(engine.worker).heard == {"engine-p/0": [b"cmpl-p-0:1"]}


@pytest.mark.parametrize(
    "case",
    [
        {"sampling": None},  # it asks for an embedding
        {"sampling": SamplingParams()},
        {"sampling": with_params(None)},
        {"sampling": with_params("x")},
        {"sampling": with_params({"do_remote_decode": True})},
        {"sampling": with_params(REMOTE | {"do_remote_prefill": False, "do_remote_decode": True})},
        {"sampling": with_params(REMOTE), "several": True},  # the others would have to be asked
        {"sampling": with_params(REMOTE), "connector": "MooncakeConnector"},
        {"sampling": with_params(REMOTE), "connector": "NixlPushConnector"},
    ],
)
def test_and_of_no_other(case: dict[str, Any]) -> None:
    assert refused(**case).empty()
