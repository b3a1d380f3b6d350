"""Hostile registries and locks: sound ones, with a value, a key or some text changed."""

from __future__ import annotations

import copy
import sys
from random import Random
from typing import Any

import tomli_w

from scripts.project import PATCHES
from tests.scripts import toys
from tests.scripts.checkouts import registry_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLES = {
    "upstream-test": {"releases": "<1", "test": "tests/x.py", "reason": "wrong ids"},
    "spared": {"releases": ">0.19", "tests": ["tests/a.py"], "reason": "half is fixed"},
    "unpatched": {"releases": ">=0.20", "reason": "nobody runs it"},
    "forward-test": {
        "release": "0.21.0",
        "test": "tests/a.py::test",
        "on": "<0.21",
        "fails-with": "AssertionError",
    },
}
_VALUES: tuple[Any, ...] = (
    "", "x", "\n", "a\nb", "a\rb", "\x1b[31mred", "\u202e", "\0", "../../x", "/etc",
    "x" * 100_000, "<" + "9" * 5000, "9" * 5000, "===x", "==0.20.*", ">=0.20,<0.19", "0.20.2",
    "none", "compatible: ", "K1", "1", 1, 0, -1, 1.5, float("nan"), True, [], {}, [1], [[]], [{}],
    ["x"], ["\n"], {"a": 1}, [["1"]], ["1", "1"], ["9"], "Backport", "A <b>", ". <>", "é <é>",
    "a" * 61, [""], "a/b#1", "tests/x::y",
)  # fmt: skip


def sound() -> dict[str, Any]:
    """Return a registry of two fixes that has every kind of table."""
    document = tomllib.loads(registry_text(toys.REGISTRY))
    for fix in document["fix"]:
        for key, table in _TABLES.items():
            fix[key] = [copy.deepcopy(table)]
    return document


def sound_lock() -> dict[str, Any]:
    """Return the lock of two releases."""
    document = tomllib.loads((PATCHES / "upstream.lock").read_text(encoding="utf-8"))
    return {name: document[name] for name in sorted(document)[:2]}


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:  # noqa: ANN401
    found = [path] if path else []
    if isinstance(value, dict):
        for key, one in value.items():
            found += _places(one, (*path, key))
    elif isinstance(value, list):
        for at, one in enumerate(value):
            found += _places(one, (*path, at))
    return found


def _mutate(rng: Random, document: dict[str, Any]) -> None:
    place = rng.choice(_places(document))
    holder: Any = document
    for key in place[:-1]:
        holder = holder[key]
    key, what = place[-1], rng.randrange(6)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, dict):
        holder[rng.choice(("x", "self", "a-b", key.replace("-", "_"), "\x1b[31m", "", "id"))] = (
            holder.pop(key)
        )
    elif what == 2:
        other: Any = document
        for step in rng.choice(_places(document)):
            other = other[step]
        holder[key] = copy.deepcopy(other)
    elif isinstance(holder[key], str) and what == 3:
        text = holder[key]
        at = rng.randrange(len(text) + 1)
        holder[key] = text[:at] + rng.choice(("\n", "\x1b", " ", '"', "<", "\0", "9")) + text[at:]
    else:
        holder[key] = copy.deepcopy(rng.choice(_VALUES))


def _text(rng: Random, document: dict[str, Any]) -> bytes:
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        if document:
            _mutate(rng, document)
    data = tomli_w.dumps(document).encode()
    chance = rng.random()
    if chance < 0.15:
        at = rng.randrange(len(data) + 1)
        new = rng.choice((b"\xff", b"\0", b"=", b"[", b'"', b"\n", b"]]", b"\xed\xa0\x80"))
        data = data[:at] + new + data[at + rng.randrange(3) :]
    elif chance < 0.2:
        deep = rng.choice((10, 5000, 200_000))
        data += b"\nx = " + b"[" * deep + b"]" * rng.choice((0, deep))
    elif chance < 0.25:
        data = data[: rng.randrange(len(data) + 1)]
    return data


def hostile(rng: Random) -> bytes:
    """Return a `fixes.toml`."""
    return _text(rng, sound())


def hostile_lock(rng: Random) -> bytes:
    """Return an `upstream.lock`."""
    return _text(rng, sound_lock())
