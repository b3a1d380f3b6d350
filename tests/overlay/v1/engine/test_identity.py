"""Which ids data-parallel ranks have that had ids of their own before: the same as on stock."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from vllm.v1.engine import core

from tests.support.nixl_worker import make_vllm_config

pytest.importorskip("vllm_overlay.v1.engine.identity", reason="up to 0.23.0")

from vllm_overlay.v1.engine.identity import take_engine_id


@pytest.mark.parametrize(
    ("size", "rank", "engine_id"),
    [(1, 0, "set"), (2, 0, "set_dp0"), (2, 1, "set_dp1"), (8, 7, "set_dp7")],
)
def test_a_single_node_keeps_its_ids(
    size: int, rank: int, engine_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MadeError(SystemExit):
        """An engine core was to be made."""

    def make(core: Any, *args: Any, **_: Any) -> None:  # noqa: ANN401
        raise MadeError

    monkeypatch.setattr(core.EngineCoreProc, "__init__", make)
    for name in ("set_process_title", "decorate_logs", "maybe_init_worker_tracer", "signal"):
        monkeypatch.setattr(core, name, mock.Mock())
    config = make_vllm_config(engine_id="set")
    config.parallel_config.data_parallel_size = size
    with pytest.raises(MadeError):
        core.EngineCoreProc.run_engine_core(vllm_config=config, dp_rank=rank, local_dp_rank=rank)
    assert config.kv_transfer_config.engine_id == engine_id


def test_a_rank_without_kv_transfer_has_no_id() -> None:
    config = make_vllm_config()
    config.kv_transfer_config = None
    take_engine_id(config, 1)
    assert config.kv_transfer_config is None
