# SPDX-License-Identifier: Apache-2.0
"""Up to 0.31.0: an answer whose request fails before its first token says that it has failed.

A stream leaves out a piece without text and tokens, as those are of a prompt that is computed in
parts, before it asks whether the request has failed: what fails early ends like an answer. Here a
stream that is all failures ends with vLLM's own error event instead. Of several choices or prompts,
one that fails beside others that are answered is left out, as on stock.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

_ERROR = "error"
_Stream = Callable[..., AsyncIterator[str]]
_Serving = Any
"""A class of an endpoint: its base is called `OpenAIServing`, later `GenerateBaseServing`."""


def says_what_failed(stream: _Stream) -> _Stream:
    """Have a stream's generator end with an error if its `result_generator` has nothing else."""
    signature = inspect.signature(stream)

    @functools.wraps(stream)
    def wrapper(self: _Serving, *args: object, **kwargs: object) -> AsyncIterator[str]:
        bound = signature.bind(self, *args, **kwargs)
        told = bound.arguments
        request_id = told["request_id"]  # not all of them: that would be a ring
        told["result_generator"] = _Pieces(
            told["result_generator"], lambda: self._raise_if_error(_ERROR, request_id)
        )
        return stream(*bound.args, **bound.kwargs)

    return wrapper


def raises_if_all_failed(
    serving: _Serving, outputs: Sequence[CompletionOutput], request_id: str
) -> None:
    """End an answer that does not stream if there is nothing in any of its choices.

    Raises:
        GenerationError: vLLM's own, which is answered with 500.
    """
    failed = [output.finish_reason == _ERROR and not output.token_ids for output in outputs]
    if failed and all(failed):
        serving._raise_if_error(_ERROR, request_id)


class _Pieces:
    """What a stream is made of, and an error behind it if all of it has failed.

    No generator: who leaves lets go of the one inside, as they do without this.
    """

    def __init__(self, pieces: AsyncIterator[Any], ends: Callable[[], None]) -> None:
        self._next = pieces.__aiter__().__anext__
        self._ends = ends
        self._failed = self._answered = False

    def __aiter__(self) -> _Pieces:
        return self

    async def __anext__(self) -> object:
        try:
            piece = await self._next()
        except StopAsyncIteration:
            if self._failed and not self._answered:
                self._ends()
            raise
        if not self._answered:
            # Those of several prompts come with the number of theirs.
            result = piece[1] if isinstance(piece, tuple) else piece
            for output in result.outputs:
                reason = output.finish_reason
                self._failed |= reason == _ERROR
                self._answered |= bool(output.token_ids) or reason not in (None, _ERROR)
        return piece
