"""A request's word that it is to be aborted at once (41269); upstream's own from 0.21.0 on."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

pytest.importorskip("vllm_overlay.v1.request", reason="up to 0.20.2")

ARGUMENTS: tuple[Any, ...] = ("r", [1, 2], SamplingParams(max_tokens=1), None)


def test_it_is_said_by_keyword_and_otherwise_not() -> None:
    assert Request(*ARGUMENTS).abort_immediately is False
    assert Request(*ARGUMENTS, abort_immediately=True).abort_immediately is True


def test_the_constructor_is_the_release_s_own_otherwise() -> None:
    request = Request(*ARGUMENTS, priority=3, abort_immediately=True)
    assert (request.request_id, request.prompt_token_ids, request.priority) == ("r", [1, 2], 3)
    with pytest.raises(TypeError):
        Request(*ARGUMENTS, no_such_thing=1)
