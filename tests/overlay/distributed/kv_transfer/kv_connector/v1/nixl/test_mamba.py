"""The NIXL scheduler knows whether the model keeps recurrent states."""

from __future__ import annotations

import pytest

from tests.support.nixl_release import NixlConnectorScheduler
from tests.support.nixl_worker import GroupKind, make_kv_cache_config, make_vllm_config

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.mamba", reason="up to 0.18.1"
)


@pytest.mark.parametrize(
    ("groups", "has"),
    [(("full",), False), (("full", "sliding"), False), (("full", "mamba"), True)],
)
def test_it_says_so(groups: tuple[GroupKind, ...], has: bool) -> None:
    config = make_vllm_config(hybrid=len(groups) > 1)
    side = NixlConnectorScheduler(config, "D", make_kv_cache_config(groups))
    assert side._has_mamba is has
