"""Which of several engine requests of one client request keeps the transfer parameters."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.llm_engine import LLMEngine

from tests.support.serving_app import REMOTE
from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.v1.engine.fanout import RemembersTransfer, transfer_done, transfer_once


def sampling(transfer: object, **extra: Any) -> SamplingParams:  # noqa: ANN401 - any setting
    return SamplingParams(seed=3, extra_args={"kv_transfer_params": transfer, **extra})


def engine(connector: str | None, path: str | None = None, *children: dict[str, Any]) -> Any:  # noqa: ANN401
    """What knows the configuration, of which this is asked for."""
    config = connector and KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path=path,
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": list(children)} if children else {},
    )
    return SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=config or None))


NIXL = engine("NixlConnector")
CHILD = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
PUSHES = {"kv_connector": "NixlPushConnector", "kv_role": "kv_both"}
OTHER = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}

MORE: dict[str, Any] = {
    "dcp_size": 1,
    "pp_size": 1,
    "remote_blocks_expiry_time": 1.0,
    "remote_num_tokens": 48,
    "remote_registration_generation": 1,
    "transfer_mode": "pull",
}
"""What later prefill servers hand out besides."""


@pytest.mark.parametrize("flag", ["do_remote_prefill", "do_remote_decode"])
def test_only_the_first_transfers(flag: str) -> None:
    params = sampling({**REMOTE, **MORE, "do_remote_prefill": False, flag: True}, mine=1)
    before = deepcopy(params)
    assert transfer_once(params, 0, NIXL) is params
    for index in (1, 7):
        other = transfer_once(params, index, NIXL)
        assert other.extra_args == {"mine": 1}
        assert other.seed == params.seed
    assert params == before, "siblings share them"
    assert taken() == {"FURTHER_READER": 2}


def test_what_belongs_to_others_stays() -> None:
    other = transfer_once(sampling({**REMOTE, "lmcache.skip_save": True}), 1, NIXL)
    assert other.extra_args == {"kv_transfer_params": {"lmcache.skip_save": True}}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(extra_args={"mine": 1}),
        sampling({"lmcache.skip_save": True}),
        sampling({"do_remote_prefill": False, "do_remote_decode": False}),
        sampling("no object"),
        sampling(None),
        BeamSearchParams(beam_width=2, max_tokens=1),
    ],
)
def test_nothing_to_transfer_costs_no_copy(params: object) -> None:
    assert transfer_once(params, 1, NIXL) is params


@pytest.mark.parametrize(
    "owner",
    [
        engine("MultiConnector", None, OTHER, CHILD),
        engine("PdConnector", "kvbm.vllm_integration.connector", OTHER, CHILD),
        SimpleNamespace(engine_client=NIXL),
    ],
)
def test_wherever_nixl_is_one_of_the_connectors(owner: object) -> None:
    assert transfer_once(sampling(dict(REMOTE)), 1, owner).extra_args == {}


@pytest.mark.parametrize(
    "owner",
    [
        SimpleNamespace(),
        SimpleNamespace(vllm_config=None),
        engine(None),
        engine("NixlPushConnector"),
        engine("MultiConnector", None, OTHER, PUSHES),
        engine("MoRIIOConnector"),
        engine("MooncakeConnector"),
        engine("LMCacheConnectorV1"),
        engine("NixlConnector", "of.somebody.else"),
        engine("NixlPushConnector", "of.somebody.else"),
        engine("MultiConnector", None, OTHER),
        engine("MultiConnector", None, CHILD | {"kv_connector_module_path": "of.somebody.else"}),
    ],
)
def test_elsewhere_all_of_them_are_known_to_both_sides_as_on_stock(owner: object) -> None:
    params = sampling({**REMOTE, "transfer_id": "x"})
    assert transfer_once(params, 1, owner) is params
    assert taken() == {}


@pytest.mark.parametrize("owner", [NIXL, engine("NixlPushConnector")])
def test_later_turns_transfer_nothing(owner: object) -> None:
    """P has computed the first, and pushes that."""
    assert transfer_done(sampling(dict(REMOTE)), owner).extra_args == {}


def test_later_turns_of_others_are_as_on_stock() -> None:
    params = sampling(dict(REMOTE))
    assert transfer_done(params, engine("NixlPushConnector", "of.somebody.else")) is params


def test_answer_is_the_one_child_s() -> None:
    first, second = RemembersTransfer(), RemembersTransfer()
    assert first.answer_transfer(None) is None
    assert first.answer_transfer(REMOTE) is REMOTE
    assert first.answer_transfer(None) is REMOTE
    assert second.answer_transfer(None) is None


def test_offline_engine_fans_out_alike() -> None:
    """`LLM` does not go through `AsyncLLM`."""
    sent: list[EngineCoreRequest] = []
    offline: Any = object.__new__(LLMEngine)
    offline.vllm_config = NIXL.vllm_config
    offline.input_processor = SimpleNamespace(
        assign_request_id=lambda request: None,
        # From 0.33.0 on:
        apply_watermarking=lambda params, wanted: None,
        resolve_watermarking=lambda params: None,
    )
    offline.output_processor = SimpleNamespace(add_request=lambda *args: None)
    offline.engine_core = SimpleNamespace(add_request=sent.append)
    params = sampling(dict(REMOTE))
    params.n = 3
    request = EngineCoreRequest(
        request_id="req",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id="req",
    )
    offline.add_request("req", request, params)
    readers = [
        child.request_id
        for child in sent
        if child.sampling_params is not None
        and (child.sampling_params.extra_args or {}).get("kv_transfer_params")
    ]
    assert len(sent) == 3
    assert readers == ["0_req"]
