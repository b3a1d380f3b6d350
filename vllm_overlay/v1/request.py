# SPDX-License-Identifier: Apache-2.0
"""Up to 0.20.2: what a scheduler's request carries beyond vLLM's own fields."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request


class AbortableAtOnce:
    """A base for `Request`.

    Attributes:
        abort_immediately: abort the request as soon as the scheduler has it (see
            `vllm_overlay.v1.engine.core.abort_if_asked`).
    """

    abort_immediately: bool = False


def with_abort_immediately(init: Callable[..., None]) -> Callable[..., None]:
    """Give a request's constructor the keyword `abort_immediately`, stored under that name."""

    @functools.wraps(init)
    def wrapper(
        self: Request,
        *args: Any,  # noqa: ANN401 - upstream's own arguments, they differ between releases
        abort_immediately: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        init(self, *args, **kwargs)
        self.abort_immediately = abort_immediately

    return wrapper
