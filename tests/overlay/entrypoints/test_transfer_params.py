"""The parameters that a handler looks at, and whose are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams

from tests.support.lying_params import GOOD
from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import find_problem
from vllm_overlay.entrypoints.transfer_params import refused, transfer_params

BAD = {**GOOD, "remote_port": "x"}
UNSENDABLE = {"other": 2**70}


class OpenRequest(BaseModel):
    """As those of endpoints that transfer nothing are: without such a field, and whatever comes."""

    model_config = ConfigDict(extra="allow")


class TransferringRequest(BaseModel):
    """As those of endpoints that transfer: the field is one of theirs."""

    kv_transfer_params: dict[str, Any] | None = None


class BatchChatCompletionRequest(OpenRequest):
    """vLLM's has no such field either, and hands all that comes on to each conversation."""


def tokens(own: object, sampling: object) -> Any:  # noqa: ANN401 - a request
    """A token-level request, with parameters in both places."""
    extra: Any = sampling if sampling is None else {"kv_transfer_params": sampling}
    return SimpleNamespace(kv_transfer_params=own, sampling_params=SamplingParams(extra_args=extra))


@pytest.mark.parametrize(
    ("request_", "field_first", "sampling_only"),
    [
        (SimpleNamespace(kv_transfer_params=GOOD), GOOD, GOOD),
        (SimpleNamespace(), None, None),
        # Where they are no field, a client's own words of these names.
        (SimpleNamespace(kv_transfer_params=GOOD, sampling_params={"top_p": 1}), GOOD, GOOD),
        (OpenRequest(**{"kv_transfer_params": BAD}), None, None),
        (TransferringRequest(kv_transfer_params=BAD), BAD, BAD),
        (SimpleNamespace(kv_transfer_params=BAD, use_beam_search=True), None, None),
        (SimpleNamespace(kv_transfer_params=BAD, use_beam_search=False), BAD, BAD),
        (tokens(GOOD, BAD), GOOD, BAD),
        (tokens(None, BAD), BAD, BAD),
        # What a handler puts into the field's place if that is empty.
        (
            SimpleNamespace(kv_transfer_params=None, vllm_xargs={"kv_transfer_params": "x"}),
            "x",
            "x",
        ),
        (SimpleNamespace(kv_transfer_params={}, vllm_xargs={"kv_transfer_params": 1}), 1, 1),
        (
            SimpleNamespace(kv_transfer_params=GOOD, vllm_xargs={"kv_transfer_params": 1}),
            GOOD,
            GOOD,
        ),
        (SimpleNamespace(kv_transfer_params={}, vllm_xargs={"mine": 1}), {}, {}),
        (OpenRequest(**{"vllm_xargs": {"kv_transfer_params": "x"}}), None, None),
        (BatchChatCompletionRequest(**{"kv_transfer_params": BAD}), BAD, BAD),
        (tokens(GOOD, None), GOOD, None),
    ],
)
def test_what_the_handler_will_use(
    request_: object, field_first: object, sampling_only: object
) -> None:
    assert transfer_params(request_, field_first=True) == field_first
    assert transfer_params(request_, field_first=False) == sampling_only


def answer(
    params: object,
    connector: str | None,
    module: str | None = None,
    *,
    reads_back: bool = False,
) -> Any:  # noqa: ANN401
    more: dict[str, Any] = {
        "connectors": [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "NixlConnector"}]
    }
    more |= {"bidirectional_kv_xfer": reads_back}
    kv = connector and KVTransferConfig(
        kv_connector=connector,
        kv_role="kv_both",
        kv_connector_module_path=module,
        kv_connector_extra_config=more,
    )
    client: Any = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=kv))
    return refused(params, client, find_problem, lambda message, *, param: (message, param))


def test_without_parameters_the_engine_is_not_looked_at() -> None:
    """Programs and tests use handlers with clients that have no configuration."""
    client: Any = SimpleNamespace()
    assert refused(None, client, find_problem, pytest.fail) is None


@pytest.mark.parametrize("client", [SimpleNamespace(), SimpleNamespace(vllm_config=None)])
def test_a_client_of_somebody_elses_may_have_no_configuration(client: Any) -> None:  # noqa: ANN401
    """As on stock; what vLLM's own wire does not carry is refused all the same."""
    assert refused(BAD, client, find_problem, pytest.fail) is None
    said: Any = refused(UNSENDABLE, client, find_problem, lambda _, *, param: param)
    assert said == "kv_transfer_params.other"


@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPullConnector"])
def test_what_nixl_cannot_use(connector: str) -> None:
    message, param = answer(BAD, connector)
    assert param == "kv_transfer_params.remote_port"
    assert message.startswith(param)
    assert answer("no object", connector)[1] == "kv_transfer_params"
    assert answer(UNSENDABLE, connector)[1] == "kv_transfer_params.other"
    assert answer(GOOD, connector) is None
    assert answer(None, connector) is None


@pytest.mark.parametrize(
    ("connector", "module"),
    [
        (None, None),
        ("MultiConnector", None),
        ("MooncakeConnector", None),
        ("NixlPushConnector", None),
        # From 0.20.0 on vLLM takes the class from there, whatever its name.
        ("NixlConnector", "in.house"),
        ("NixlPullConnector", "in.house"),
    ],
)
def test_what_may_be_meant_for_another_connector(connector: str | None, module: str | None) -> None:
    assert answer(BAD, connector, module) is None
    assert answer(UNSENDABLE, connector, module)[1] == "kv_transfer_params.other"


def test_what_is_no_object_beside_nixl() -> None:
    """The first of several connectors that looks into it ends the engine."""
    message, param = answer("x", "MultiConnector")
    assert param == "kv_transfer_params"
    assert message == "kv_transfer_params must be an object, not str"
    for connector in (None, "MooncakeConnector", "NixlPushConnector"):
        assert answer("x", connector) is None


def test_what_is_refused_is_counted() -> None:
    answer(GOOD, "NixlConnector")
    assert taken() == {}
    answer(BAD, "NixlConnector")
    answer(UNSENDABLE, "MultiConnector")
    assert taken() == {"PARAMS_REFUSED": 2}


PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.mark.parametrize(
    "left_over",
    [
        {"remote_block_ids": [[1, 2]], "remote_engine_id": None, "remote_host": None},
        {**GOOD, "remote_block_ids": [1, 2]},
        {**GOOD, "remote_port": "5600"},
    ],
    ids=["nowhere", "no groups", "no port"],
)
def test_a_prefill_is_not_asked_about_what_it_is_offered(left_over: dict[str, Any]) -> None:
    params = {**left_over, **PREFILL}
    assert answer(params, "NixlConnector") is None
    assert answer(params, "NixlConnector", reads_back=True) is None
    assert answer({**left_over, "do_remote_prefill": True}, "NixlConnector")


def test_a_prefill_is_asked_about_its_role() -> None:
    message, param = answer({**PREFILL, "do_remote_decode": "yes"}, "NixlConnector")
    assert param == "kv_transfer_params.do_remote_decode"
    assert message.startswith(param)
