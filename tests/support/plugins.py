"""What plugins make of NIXL's classes: methods that call vLLM's their own way, or promise less."""

from __future__ import annotations

import inspect
from typing import Any


def derive(thing: object, **methods: Any) -> None:  # noqa: ANN401 - functions
    """Make `thing` one of a plugin's class, which is derived from the one that it has."""
    kind = type(thing)
    for method in methods.values():
        method.__module__ = "plugin.nixl"
    thing.__class__ = type(kind.__name__, (kind,), {"__module__": "plugin.nixl", **methods})


def read_by_position(worker: Any) -> None:  # noqa: ANN401 - a worker of any release
    """Have reads asked for by position, where vLLM itself names what it asks for."""
    of_vllm = type(worker)._read_blocks
    names = [*inspect.signature(of_vllm).parameters][1:]

    def read(self: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401 - as the release's
        asked = dict(zip(names, args, strict=False), **named)
        return of_vllm(self, *(asked[name] for name in names))

    derive(worker, _read_blocks=read)


def leave_last_token(part: Any) -> None:  # noqa: ANN401 - a scheduler's part of any release
    """Have the last token of a prompt computed by D: P sends no block that has this alone."""
    of_vllm = type(part).get_num_new_matched_tokens

    def count(self: Any, request: Any, known: int) -> tuple[int, bool]:  # noqa: ANN401
        tokens, awaited = of_vllm(self, request, known)
        return tokens - awaited, awaited

    derive(part, get_num_new_matched_tokens=count)
