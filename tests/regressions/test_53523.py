"""53523: a prompt that P has in its prefix cache but for the last token does not end P.

Of a model with recurrent states P leaves a prompt's last token to D. What is then left of a prompt
of some whole blocks and a token may be in P's cache to its end: whenever that prompt comes again.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import attempt
from tests.support.prefill_engine import PrefillEngine
from tests.support.release import since

PROMPT = range(1000, 1049)
"""Three blocks of 16 and a token."""

LEFT_TO_P = list(PROMPT[:-1] if since("0.19.0") else PROMPT)

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
PUSHES = find_spec(NIXL) is not None and find_spec(f"{NIXL}.push_scheduler") is not None
TRANSFERS: dict[str, dict[str, Any]] = {"pull": {"connector": "NixlConnector"}}
if PUSHES:
    TRANSFERS["push"] = {"connector": "NixlPushConnector"}
if issubclass(MultiConnector, SupportsHMA):  # else it serves no hybrid
    one = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    TRANSFERS["several"] = {"connector": "MultiConnector", "extra_config": {"connectors": [one]}}


MODES = ["align"] if since("0.33.0") else ["align", "all"]
"""Of `mamba_cache_mode`, where prefixes are cached."""


def caching(*, mode: str = "align", **config: Any) -> PrefillEngine:  # noqa: ANN401 - handed on
    """P of a hybrid, which caches prefixes."""
    return engine_of(PrefillEngine, mode=mode, prefix_caching=True, **config)


def prefills(engine: PrefillEngine, req_id: str, params: dict[str, Any] | None = None) -> bool:
    """Let P compute the prompt, for a D unless `params` say otherwise; whether it lives on."""
    engine.prefill(req_id, PROMPT, params=params)
    return attempt(engine.run, 6) is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("async_scheduling", [True, False], ids=["overlapped", "one-by-one"])
def test_a_prompt_that_comes_again(mode: str, async_scheduling: bool) -> None:
    engine = caching(mode=mode, async_scheduling=async_scheduling)
    assert prefills(engine, "first")
    assert prefills(engine, "again"), "P has ended"
    assert engine.handed_out == {"first": LEFT_TO_P, "again": LEFT_TO_P}


def test_a_prompt_that_was_answered_here_before() -> None:
    engine = caching()
    assert prefills(engine, "here", params={})
    assert prefills(engine, "for-d"), "P has ended"
    assert engine.handed_out["for-d"] == LEFT_TO_P


@pytest.mark.parametrize("transfer", TRANSFERS.values(), ids=list(TRANSFERS))
def test_every_connector_with_nixl(transfer: dict[str, Any]) -> None:
    engine = caching(**transfer)
    assert prefills(engine, "first")
    assert prefills(engine, "again"), "P has ended"
    assert len(engine.tokens["again"]) == 1
    assert engine.answers["again"] is not None
