"""How much an engine remembers: the tables of everything in it, and how many entries each has.

A table is any container that can be reached from the scheduler, the workers or the connector
through attributes of vLLM's and the overlay's own objects, by the path to it; those of all ranks
and of all entries of a table count together. Beside them stands what no path leads to: the memory
blocks that Python has given out.
"""

from __future__ import annotations

import gc
import queue
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from tests.simulation.engine import Engine

Sizes = Mapping[str, int]
"""Table -> entries."""

BLOCKS = "memory blocks of Python"

_OWN = ("vllm.", "vllm_overlay.")
_CONFIG = ("vllm.config.", "vllm.transformers_utils.")
_MODULES = ("vllm.distributed.kv_transfer.", "vllm.v1.core.", "vllm_overlay.")
_TABLES = (dict, set, frozenset, list, tuple, deque, weakref.WeakSet, weakref.WeakKeyDictionary)
_QUEUES = (queue.Queue, queue.SimpleQueue)


def sizes(engines: Mapping[str, Engine]) -> dict[str, int]:
    """The tables of engines, and of the modules that all share."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    for name, engine in engines.items():
        for rank in engine.ranks:
            _count(rank.worker, f"{name} worker", found, seen)
            _count(rank.connector, f"{name} worker's connector", found, seen)
        part = engine._connector_scheduler
        _count(part, f"{name} connector's scheduler", found, seen)
        _count(engine._aggregator, f"{name} aggregator", found, seen)
        _count(engine.scheduler, f"{name} scheduler", found, seen)
    for name, module in list(sys.modules.items()):
        if name.startswith(_MODULES):
            for key, value in list(vars(module).items()):
                if not key.startswith("__") and isinstance(value, (*_TABLES, *_QUEUES)):
                    _count(value, f"{name.rsplit('.', 1)[-1]}.py {key}", found, seen)
    # So that what is kept of this here takes no memory that grows.
    tables = {sys.intern(table): entries for table, entries in found.items()}
    gc.collect()
    return {**tables, BLOCKS: sys.getallocatedblocks()}


def _count(thing: Any, path: str, found: Counter[str], seen: set[int]) -> None:  # noqa: ANN401
    """Add what `thing` holds."""
    todo = [(thing, path)]
    while todo:
        thing, path = todo.pop()
        if id(thing) in seen:
            continue
        if isinstance(thing, _QUEUES):
            found[path] += thing.qsize()
        elif isinstance(thing, _TABLES):
            seen.add(id(thing))
            found[path] += len(thing)
            todo += [(each, f"{path}[]") for each in _entries(thing)]
        elif _is_own(thing):
            seen.add(id(thing))
            todo += [(value, f"{path}.{name}") for name, value in _attributes(thing)]


def _entries(table: Any) -> Iterator[Any]:  # noqa: ANN401 - one of `_TABLES`
    values = table.values() if isinstance(table, (dict, weakref.WeakKeyDictionary)) else table
    for each in list(values):
        if not isinstance(each, (str, int, float, bytes)):
            yield each


def _is_own(thing: object) -> bool:
    home = type(thing).__module__
    return (
        home.startswith(_OWN)
        and not home.startswith(_CONFIG)
        and not isinstance(thing, (type, Enum))
    )


def _attributes(thing: object) -> Iterator[tuple[str, Any]]:
    if hasattr(thing, "__dict__"):
        yield from list(vars(thing).items())
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(thing, name):
                yield name, getattr(thing, name)


def growing(samples: Sequence[Sizes]) -> dict[str, tuple[int, int]]:
    """The tables that have more entries in all of the last quarter than ever in the first.

    One entry that stays for good before the last quarter begins is enough.

    Returns:
        table -> the most entries in the first quarter, and the fewest in the last.
    """
    quarter = max(1, len(samples) // 4)
    first, last = samples[:quarter], samples[-quarter:]
    names = {name for sample in samples for name in sample}
    found = {
        name: (max(s.get(name, 0) for s in first), min(s.get(name, 0) for s in last))
        for name in sorted(names)
    }
    grown = {name: (most, least) for name, (most, least) in found.items() if least > most}
    # Entries of a table that grows are no table of their own.
    return {n: g for n, g in grown.items() if not (n.endswith("[]") and n[:-2] in grown)}
