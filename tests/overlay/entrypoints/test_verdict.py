"""What an answer says about the request it answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_overlay.entrypoints.verdict import Verdict, is_final


def said(status: int, *chunks: bytes) -> Verdict:
    verdict = Verdict()
    verdict.note({"type": "http.response.start", "status": status, "headers": []})
    for body in ({}, *({"body": chunk} for chunk in chunks)):
        verdict.note({"type": "http.response.body", **body, "more_body": True})
    verdict.note({"type": "http.response.body"})
    return verdict


def event(content: Any) -> bytes:  # noqa: ANN401 - JSON
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 415, 422, 499])
def test_a_refusal_that_another_request_can_mend(status: int) -> None:
    assert is_final(status)
    assert said(status, b'{"error": {}}').is_final
    assert said(200, event({"error": {"code": status}})).is_final
    assert not said(status).is_fault


@pytest.mark.parametrize("status", [399, 408, 425, 429, 500, 501, 502, 503, 504, 507])
def test_a_refusal_that_asks_for_the_same_again(status: int) -> None:
    assert not is_final(status)
    assert not said(status, b'{"error": {"code": 400}}').is_final
    assert not said(200, event({"error": {"code": status}})).is_final
    assert said(status).is_fault is (status >= 500)


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [b""],
        [b'{"error": {"code": 400}}'],  # an answer that was asked for, and not a stream
        [b"data: [DONE]\n\n"],
        [b'data: {"error": {"code": 400}'],
        [event({"error": {"code": "invalid"}})],
        [event({"error": {"code": True}})],
        [event({"error": "code 400"})],
        [event(["error"])],
        [event({"choices": []}), event({"error": {"code": 400}})],
        [b'text: {"error": {"code": 400}}\n\n'],
        [b"id\n" + event({"error": {"code": 400}})],  # a table
        [b"event: message_start\n" + event({"type": "x"}), event({"error": {"code": 400}})],
        [b"data: " + b"[" * 100_000 + b"\n\n"],
    ],
    ids=lambda chunks: repr(chunks)[:40],
)
def test_an_answer_that_served_is_no_refusal(chunks: list[bytes]) -> None:
    verdict = said(200, *chunks)
    assert verdict.status in (None, 200)
    assert not verdict.is_final and not verdict.is_fault


def test_what_comes_before_an_error_and_says_nothing() -> None:
    error = b"id: 1\r\nevent: error\r\n" + event({"error": {"code": 404}})
    assert said(200, b": ping\n\n", b"retry: 3\n", error, event({})).is_final


def test_a_client_that_left_heard_nothing() -> None:
    verdict = Verdict()
    verdict.lose_client()
    verdict.note({"type": "http.response.start", "status": 400, "headers": []})
    assert verdict.begun and not verdict.is_final


def test_a_stream_whose_client_left_before_the_error() -> None:
    verdict = said(200, b": ping\n\n")
    assert not verdict.is_final
    verdict = Verdict()
    verdict.note({"type": "http.response.start", "status": 200, "headers": []})
    verdict.lose_client()
    verdict.note({"type": "http.response.body", "body": event({"error": {"code": 400}})})
    assert not verdict.is_final


def test_nothing_was_answered() -> None:
    verdict = Verdict()
    assert not verdict.begun and not verdict.is_final and not verdict.is_fault
