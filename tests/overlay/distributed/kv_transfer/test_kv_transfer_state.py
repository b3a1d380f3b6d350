"""How the ranks of an engine agree on its id: which groups are asked, in which order."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state

from tests.support.nixl_worker import make_vllm_config

pytest.importorskip("vllm_overlay.distributed.kv_transfer.kv_transfer_state", reason="up to 0.23.0")

from vllm_overlay.distributed.kv_transfer.kv_transfer_state import _sync_engine_id_across_tp

GROUPS = {"tp": "get_tp_group", "pcp": "get_pcp_group", "pp": "get_pp_group"}


@dataclasses.dataclass
class Groups:
    """Groups in which this rank is the first or not; `asked` is what each was given."""

    answers: dict[str, str | None]  # None: this rank is the first and its own value counts
    asked: list[tuple[str, Any, int]]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    scripted = Groups(answers=dict.fromkeys(GROUPS), asked=[])

    def getter(name: str) -> Any:  # noqa: ANN401 - a stand-in for a group
        def broadcast(value: str, src: int = 0) -> str:
            scripted.asked.append((name, value, src))
            answer = scripted.answers[name]
            return value if answer is None else answer

        return lambda: SimpleNamespace(broadcast_object=broadcast)

    for name, function in GROUPS.items():
        monkeypatch.setattr(parallel_state, function, getter(name))
    return scripted


def config(*, engine_id: str = "own", tp: int = 1, pcp: int = 1, pp: int = 1) -> Any:  # noqa: ANN401
    made = make_vllm_config(engine_id=engine_id)
    made.parallel_config.tensor_parallel_size = tp
    made.parallel_config.prefill_context_parallel_size = pcp
    made.parallel_config.pipeline_parallel_size = pp
    return made


@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        ({}, ["tp"]),
        ({"tp": 4}, ["tp"]),
        ({"pp": 2}, ["tp", "pp"]),
        ({"pcp": 2}, ["tp", "pcp"]),
        ({"tp": 2, "pcp": 2, "pp": 2}, ["tp", "pcp", "pp"]),
    ],
)
def test_only_groups_that_can_have_other_ranks_are_asked_and_the_first_stage_decides(
    sizes: dict[str, int], asked: list[str], groups: Groups
) -> None:
    groups.answers |= {name: f"first of {name}" for name in asked}
    made = config(engine_id="own", **sizes)
    _sync_engine_id_across_tp(made)
    assert [name for name, _, _ in groups.asked] == asked
    assert made.kv_transfer_config.engine_id == f"first of {asked[-1]}"
    # Each group hears what the one before it agreed on, from its first rank.
    values = ["own", *(f"first of {name}" for name in asked[:-1])]
    assert [(value, src) for _, value, src in groups.asked] == [(v, 0) for v in values]


def test_a_replaced_id_is_logged_once_where_vllm_logs(
    groups: Groups, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="vllm")
    groups.answers["tp"] = "first"
    _sync_engine_id_across_tp(config(tp=2))
    (record,) = [r for r in caplog.records if "engine's id" in r.getMessage()]
    assert "first" in record.getMessage()
    assert "own" in record.getMessage()
    assert record.name.startswith("vllm.")  # vLLM gives only its own loggers a handler


def test_a_rank_that_has_the_id_already_says_nothing(
    groups: Groups, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="vllm")
    groups.answers["tp"] = "chosen by the operator"
    made = config(tp=2, engine_id="chosen by the operator")
    _sync_engine_id_across_tp(made)
    assert made.kv_transfer_config.engine_id == "chosen by the operator"
    assert "engine's id" not in caplog.text


def test_an_engine_without_kv_transfer_asks_no_group(groups: Groups) -> None:
    made = config(tp=2)
    made.kv_transfer_config.kv_connector = None
    kv_transfer_state.ensure_kv_transfer_initialized(made, None)
    made.kv_transfer_config = None
    kv_transfer_state.ensure_kv_transfer_initialized(made, None)
    _sync_engine_id_across_tp(made)
    assert groups.asked == []


def test_an_engine_of_one_rank_keeps_its_id(groups: Groups) -> None:
    made = config(engine_id="own")
    _sync_engine_id_across_tp(made)
    assert made.kv_transfer_config.engine_id == "own"
