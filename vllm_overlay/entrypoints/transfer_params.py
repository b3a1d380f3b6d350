# SPDX-License-Identifier: Apache-2.0
"""All releases: the `kv_transfer_params` of a request, as its handler looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    Problem,
    are_for,
    find_unsendable,
    without_unread,
)
from vllm_overlay.v1.engine.stand_in import takes_stand_ins, transfer_config

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient


def transfer_params(request: object, *, field_first: bool) -> object:
    """Return what the handler will use; many kinds of requests have no such field, and a word of
    that name, which a router may give to all that it sends on, means nothing there. A beam search
    transfers nothing.

    A token-level request has two places: `field_first` says that its handler looks at its field,
    and at its sampling parameters only where that is empty. Otherwise it ignores the field.
    """
    if getattr(request, "use_beam_search", False):
        return None
    field = _field(request, "kv_transfer_params")
    if not field and isinstance(more := _field(request, "vllm_xargs"), dict):
        field = more.get("kv_transfer_params", field)  # where vLLM puts the field, too
    sampling = getattr(request, "sampling_params", None)
    if not isinstance(sampling, SamplingParams) or (field_first and field is not None):
        return field
    return (sampling.extra_args or {}).get("kv_transfer_params")


def _field(request: object, name: str) -> object:
    """Return a field that a kind of request names; a batch hands on what it does not name, too."""
    declared = getattr(type(request), "model_fields", None)
    batch = type(request).__name__ == "BatchChatCompletionRequest"
    return getattr(request, name, None) if declared is None or name in declared or batch else None


def refused(
    params: object,
    engine_client: EngineClient,
    find_problem: Callable[[object], Problem | None],
    create_error: Callable[..., Any],
) -> Any:  # noqa: ANN401 - whatever `create_error` makes
    """Return the answer to a request whose parameters cannot be used, else None.

    Only NIXL's are known in detail, to `find_problem`; with several connectors they may be meant
    for another one. But none of several can use what is no object: the first that looks into it
    ends the engine, and NIXL's own check may come too late.
    """
    if params is None:
        return None
    problem = find_unsendable(params)
    kv = transfer_config(engine_client)
    alone = kv is not None and are_for(kv.kv_connector, kv.kv_connector_module_path)
    if alone or (takes_stand_ins(kv) and not isinstance(params, dict)):
        problem = problem or find_problem(without_unread(params))
    if problem is None:
        return None
    count(Acted.PARAMS_REFUSED)
    return create_error(str(problem), param=f"kv_transfer_params.{problem.field}".rstrip("."))
