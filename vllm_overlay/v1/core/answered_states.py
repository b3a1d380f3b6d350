# SPDX-License-Identifier: Apache-2.0
"""0.30.0 to 0.31.0: a state is cached by a part of a block before the answer goes on from it.

With async scheduling an answer's first step is decided on before its token is there, and the cache
is told of the prompt's tokens once more. Where layers export states, what has computed the prompt
did not cache the state at its end. This step does, and overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager
    from vllm.v1.request import Request

    _Cache = Callable[..., BlockHashWithGroupId | None]


def before_the_answer(cache: _Cache) -> _Cache:
    """Have `MambaManager._cache_partial_tail_block` cache no running state of an answer.

    A state that the step exports it caches as on stock.
    """

    @wraps(cache)
    def wrapper(
        self: MambaManager,
        request: Request,
        *args: Any,  # noqa: ANN401 - as it is called
        **named: Any,  # noqa: ANN401 - likewise
    ) -> BlockHashWithGroupId | None:
        if request.num_output_placeholders and request.request_id not in self._checkpoints:
            return None
        return cache(self, request, *args, **named)

    return wrapper
