"""Which bodies are kept, however they come; against a search in the whole of them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.entrypoints.kept_body import KeptBody

NAMED = {"kv_transfer_params": {"do_remote_prefill": True}}


def kept(*chunks: bytes) -> dict[str, Any]:
    body = KeptBody()
    for number, chunk in enumerate(chunks, 1):
        body.add(chunk, more=number < len(chunks))
    return body.parsed


@given(data=st.data(), text=st.text(max_size=30), encoding=st.sampled_from(["utf-8", "utf-16"]))
def test_however_it_is_cut_a_body_that_names_a_transfer_is_kept(
    data: st.DataObject, text: str, encoding: str
) -> None:
    body = {"prompt": text, **NAMED, "more": text}
    raw = json.dumps(body, ensure_ascii=data.draw(st.booleans())).encode(encoding, "surrogatepass")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=40)))
    chunks = [raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert kept(*chunks) == json.loads(raw)


@pytest.mark.parametrize("spelled", ["do\\u005fremote_prefill", "\\u0064o_remote_prefil\\u006C"])
@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_key_that_is_spelled_with_escapes(spelled: str, cut: int) -> None:
    raw = b'{"kv_transfer_params": {"%s": true}}' % spelled.encode()
    assert kept(raw[: -cut or None], raw[-cut:]) == NAMED


@pytest.mark.parametrize(
    "body",
    [{"prompt": "caf\u00e9 \U0001f600", "path": "C:\\users", "a": '"\n<&>'}, {"prompt": [1] * 99}],
)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_other_bodies_are_let_go(body: dict[str, Any], ascii_only: bool) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_only).encode()
    assert kept(raw) == kept(raw[:7], raw[7:], b"") == {}


@pytest.mark.parametrize(
    "raw",
    [
        b'["do_remote_prefill"]',
        b'{"do_remote_prefill',
        b'{"do_remote_prefill": ' + b"[" * 100_000,
        b"\0",
        b"",
    ],
    ids=lambda raw: repr(raw[:30]),
)
def test_what_is_no_object_is_an_empty_one(raw: bytes) -> None:
    assert kept(raw) == {}


def test_a_body_that_is_let_go_is_an_empty_object() -> None:
    body = KeptBody()
    body.add(json.dumps(NAMED).encode(), more=False)
    body.clear()
    body.add(json.dumps(NAMED).encode(), more=False)
    assert body.parsed == {}


def test_it_is_parsed_once() -> None:
    body = KeptBody()
    body.add(json.dumps(NAMED).encode(), more=False)
    assert body.parsed is body.parsed


@pytest.mark.parametrize("body", [{"prompt": "hi" * 99}, NAMED])
def test_nothing_is_held_of_a_body_that_was_looked_at(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    held = sys.getrefcount(raw)
    keeps = KeptBody()
    keeps.add(raw, more=False)
    assert keeps.parsed == (body if body is NAMED else {})
    assert sys.getrefcount(raw) == held
