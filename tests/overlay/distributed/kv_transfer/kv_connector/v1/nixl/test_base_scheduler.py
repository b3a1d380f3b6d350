"""0.24.0 counts what is read of a prompt by another name than later releases."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.nixl_worker import make_kv_cache_config, make_vllm_config

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler", reason="0.24.0 only"
)

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import (
    NixlPushConnectorScheduler,
)


@pytest.mark.parametrize("side", [NixlPullConnectorScheduler, NixlPushConnectorScheduler])
def test_the_last_token_of_a_model_with_states_is_left_to_d(side: Any) -> None:  # noqa: ANN401
    scheduler = side(make_vllm_config(), "D", make_kv_cache_config())
    assert scheduler._get_remote_prefill_token_count(40) == 40
    scheduler._has_mamba = True
    assert scheduler._get_remote_prefill_token_count(40) == 39
    assert scheduler._get_remote_prefill_token_count(1) == 1
