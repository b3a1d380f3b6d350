"""What earlier releases do not say of themselves is known all the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

older = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.older", reason="from 0.25.0 on"
)


class NixlPullConnectorWorker:
    pass


class NixlPushConnectorWorker:
    pass


class Derived(NixlPushConnectorWorker):
    pass


@pytest.mark.parametrize(
    ("part", "pulls"),
    [
        (NixlPullConnectorWorker(), True),
        (NixlPushConnectorWorker(), False),
        (Derived(), False),
        (SimpleNamespace(_TRANSFER_MODE="pull"), True),
        (SimpleNamespace(_TRANSFER_MODE="push"), False),
    ],
)
def test_who_pulls(part: object, pulls: bool) -> None:
    assert older.pulls(part) is pulls


def test_all_groups_are_transferred_unless_a_release_says_which() -> None:
    groups = ["full", "window", "scratch"]
    config: Any = SimpleNamespace(kv_cache_groups=groups)
    assert older.transfer_groups(config) == groups
    config.transfer_group_ids = [2, 0]
    assert older.transfer_groups(config) == ["scratch", "full"]
