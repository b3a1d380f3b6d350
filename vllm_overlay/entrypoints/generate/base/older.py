# SPDX-License-Identifier: Apache-2.0
"""0.24.0 to 0.28.0: parameters and rejections, where handlers and routes do less than later.

Up to 0.28.0 the handler of a token-level request looks for transfer parameters among its sampling
parameters only; what stands in the field of that name is there by then, or ignored (see
`vllm_overlay.entrypoints.serve.disagg.own_params`). Up to 0.27.1 /v1/messages answers 500 to
whatever its handler raises, and in 0.27 all endpoints to a grammar that cannot be used.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.v1.engine.exceptions import EngineGenerateError

from vllm_overlay.entrypoints.generate.base.serving import ChecksTransferParams
from vllm_overlay.entrypoints.verdict import is_final
from vllm_overlay.v1.engine.admission import current_exchange


def tells_route(cleanup: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Have `_with_kv_transfer_rejection_cleanup` leave it to the route that watches the request.

    The route decides later and with better knowledge, but for one thing, which is noted for it:
    what a handler raises may be a refusal for good, and an endpoint may make a 500 of it. Callers
    that use a handler without HTTP keep upstream's own clean-up.
    """

    @functools.wraps(cleanup)
    async def wrapper(
        self: BaseServing,
        awaitable: Awaitable[Any],
        *request: Any,  # noqa: ANN401 - passed on as they are
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 - whatever the endpoint returns
        exchange = current_exchange()
        if exchange is None:
            return await cleanup(self, awaitable, *request, **named)
        try:
            return await awaitable
        except Exception as error:
            cause = error.__cause__ if isinstance(error, EngineGenerateError) else error
            if isinstance(cause, Exception):
                exchange.refused = is_final(self.create_error_response(cause).error.code)
            raise

    return wrapper


class ChecksSamplingParams(ChecksTransferParams):
    """A base for the handlers' own up to 0.28.0: they ignore the field of a token-level request."""

    _field_first = False
