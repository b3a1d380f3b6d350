# SPDX-License-Identifier: Apache-2.0
"""All releases: what the engine core is sent in place of a refused request.

Aborting it runs the connector's own clean-up, which tells the prefill server that nobody will
read. Only connectors that are known to take one get it: NIXL that pulls, also as one of several.
The others do with it what they will (an assertion about a request that nobody awaits, an index
into an answer that was never begun), and that ends an engine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import uuid4

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.claims import claiming_connector
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import are_for, printable

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    from vllm.v1.request import Request

_Method = TypeVar("_Method", bound=Callable[..., Any])

_SHOWN = 64
_ID = re.compile(r".{0,64}-rejected-[0-9a-f]{32}")


def stand_in_id(name: str) -> str:
    """An id for the stand-in of the request that a client or a router calls `name`.

    They choose names of any length and with anything in them; the id ends up in logs.
    """
    # Two stand-ins under one name would be one to the scheduler, and the second prefill server
    # would never hear.
    return f"{printable(name[:_SHOWN])}-rejected-{uuid4().hex}"


def is_stand_in(request: Request) -> bool:
    """Whether a request is one of ours; upstream aborts requests of clients at once, too."""
    return bool(request.abort_immediately and _ID.fullmatch(request.request_id))


def make_stand_in(
    request_id: str, kv_transfer_params: dict[str, Any], rank: int | None
) -> EngineCoreRequest:
    """The request that gives up what `kv_transfer_params` offer, for the engine core of `rank`."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[0],
        mm_features=None,
        sampling_params=SamplingParams(
            max_tokens=1, extra_args={"kv_transfer_params": dict(kv_transfer_params)}
        ),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=rank,
        abort_immediately=True,
    )


def transfer_config(engine: object) -> KVTransferConfig | None:
    """Return how an engine, or a client of one, transfers; a client of somebody else's may not say.

    So upstream asks, from 0.23.0 on.
    """
    return getattr(getattr(engine, "vllm_config", None), "kv_transfer_config", None)


def takes_stand_ins(config: KVTransferConfig | None) -> bool:
    """Whether the connector of this configuration is known to take stand-ins."""
    if config is None or config.kv_connector_module_path:  # somebody else's class
        return False
    if config.kv_connector != "MultiConnector":
        return are_for(config.kv_connector, None)
    return any(are_for(*each) for each in configured(config))


def configured(config: KVTransferConfig) -> list[tuple[str | None, str | None]]:
    """Return name and module path of the connector, and of each of which it is made."""
    children = config.kv_connector_extra_config.get("connectors")
    return [
        (config.kv_connector, config.kv_connector_module_path),
        *(
            (child.get("kv_connector"), child.get("kv_connector_module_path"))
            for child in (children if isinstance(children, list) else [])
        ),
    ]


def stand_ins_to_nixl(method: _Method) -> _Method:
    """Have a method of `MultiConnector` that takes a request first pass stand-ins to NIXL only."""

    @wraps(method)
    def wrapper(
        self: MultiConnector,
        request: Request,
        *args: Any,  # noqa: ANN401 - passed on as they are
        **named: Any,  # noqa: ANN401
    ) -> object:
        child = claiming_connector(self) if is_stand_in(request) else None
        if child is None:
            return method(self, request, *args, **named)
        return getattr(child, method.__name__)(request, *args, **named)

    return cast("_Method", wrapper)
