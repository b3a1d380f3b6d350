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
)

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
    declared = getattr(type(request), "model_fields", None)
    named = declared is None or "kv_transfer_params" in declared
    field = getattr(request, "kv_transfer_params", None) if named else None
    sampling = getattr(request, "sampling_params", None)
    if not isinstance(sampling, SamplingParams) or (field_first and field is not None):
        return field
    return (sampling.extra_args or {}).get("kv_transfer_params")


def refused(
    params: object,
    engine_client: EngineClient,
    find_problem: Callable[[object], Problem | None],
    create_error: Callable[..., Any],
) -> Any:  # noqa: ANN401 - whatever `create_error` makes
    """Return the answer to a request whose parameters cannot be used, else None.

    Only NIXL's are known in detail, to `find_problem`; with several connectors they may be meant
    for another one.
    """
    if params is None:
        return None
    problem = find_unsendable(params)
    kv = engine_client.vllm_config.kv_transfer_config
    if kv is not None and are_for(kv.kv_connector, kv.kv_connector_module_path):
        problem = problem or find_problem(params)
    if problem is None:
        return None
    count(Acted.PARAMS_REFUSED)
    return create_error(str(problem), param=f"kv_transfer_params.{problem.field}".rstrip("."))
