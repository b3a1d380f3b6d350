"""What plugins make of vLLM's classes: methods that call vLLM's their own way, or promise less;
constructors that do not call vLLM's; and objects of a class that is not derived from any."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.sched.scheduler import Scheduler


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


def put_own_pool(scheduler: Scheduler, *, derived: bool) -> None:
    """Have a scheduler's blocks come from a plugin's pool, which does all that stock's does.

    It is of a class that is not `derived` from any of vLLM's, or of one that overrides all of
    vLLM's methods and has no `free_block_queue`, as kvcached's.
    """
    manager: Any = scheduler.kv_cache_manager
    pool: Any = manager.block_pool
    kinds = type(pool).__mro__
    of_vllm = {name for kind in kinds if _is_from(kind, "vllm") for name in vars(kind)}
    ours = {name for kind in kinds if _is_from(kind, "vllm_overlay") for name in vars(kind)}
    hidden = {"free_block_queue"} if derived else ours - of_vllm

    def get(_: object, name: str) -> Any:  # noqa: ANN401 - of vLLM's pool
        if name in hidden:
            raise AttributeError(f"a plugin's pool has no {name!r}")
        return getattr(pool, name)

    overridden = {name: getattr(pool, name) for name in of_vllm if not name.startswith("__")}
    own: Any = type(
        "OwnPool",
        (type(pool),) if derived else (),
        {
            "__init__": lambda _: None,
            "__getattr__": get,
            **{name: staticmethod(method) for name, method in overridden.items() if derived},
        },
    )()
    for owner in manager, manager.coordinator, *manager.coordinator.single_type_managers:
        owner.block_pool = own


def own_coordinators() -> AbstractContextManager[object]:
    """Have hybrids made meanwhile get a coordinator with a constructor of its own.

    That of vllm-ascend does all that vLLM's does, and calls none of it.
    """
    kind: Any = kv_cache_coordinator.HybridKVCacheCoordinator
    of_vllm = next(
        base for base in kind.__mro__ if "__init__" in vars(base) and _is_from(base, "vllm")
    )
    own = type("OwnCoordinator", (kind,), {"__init__": of_vllm.__init__})
    return mock.patch.object(kv_cache_coordinator, "HybridKVCacheCoordinator", own)


def _is_from(kind: type, package: str) -> bool:
    return kind.__module__.partition(".")[0] == package
