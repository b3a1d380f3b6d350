# SPDX-License-Identifier: Apache-2.0
"""0.26.0 to 0.31.0: a state is cached by a part of a block before the answer goes on from it.

With async scheduling an answer's first step is decided on before its token is there, and the cache
is told of the prompt's tokens once more. It would then cache the state at the prompt's end a second
time, or, where the step that has computed the prompt exported an earlier one, for the first: that
of a block which this step overwrites, and which is copied only after that.
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
    """Have `MambaManager._cache_partial_tail_block` cache no running state of an answer."""

    @wraps(cache)
    def wrapper(
        self: MambaManager,
        request: Request,
        num_tokens: int,
        *args: Any,  # noqa: ANN401 - as it is called
        **named: Any,  # noqa: ANN401 - likewise
    ) -> BlockHashWithGroupId | None:
        # What was loaded has been computed too, but no step of an answer is under way then.
        if request.num_output_placeholders and request.num_computed_tokens >= num_tokens:
            return None
        return cache(self, request, num_tokens, *args, **named)

    return wrapper
