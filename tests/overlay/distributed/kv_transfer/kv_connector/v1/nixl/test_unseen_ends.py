"""Which reads of a worker have ended while nobody looked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import unseen_ends as module
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.unseen_ends import LONG, UnseenEnds


@pytest.mark.parametrize("pause", [LONG, LONG + 0.1])
def test_what_was_begun_before_a_long_time_without_steps_may_have_ended_in_it(
    monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    worker: Any = SimpleNamespace(
        _recving_metadata=dict.fromkeys(["over", "under way", "shakes hands", "shook hands"]),
        _recving_transfers={"over": [1], "under way": [2]},
    )
    ends = UnseenEnds()
    assert ends.look(worker) == {}
    now[0] += pause
    for over in ("over", "shook hands"):
        del worker._recving_metadata[over]
    del worker._recving_transfers["over"]
    worker._recving_metadata["new"] = None
    seen = {"over": True, "under way": False, "shakes hands": False, "shook hands": False}
    assert ends.look(worker) == (seen if pause > LONG else {})
    assert ends.look(worker) == {}, "said once"


def test_a_worker_of_somebody_elses_may_have_no_such_tables() -> None:
    bare: Any = SimpleNamespace()
    assert UnseenEnds().look(bare) == {}
