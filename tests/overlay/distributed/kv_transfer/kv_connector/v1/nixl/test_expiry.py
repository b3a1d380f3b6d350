"""The order in which leases are looked through."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

expiry = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.expiry", reason="0.22.0 to 0.30.0"
)

LEASES = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(LEASES, st.integers(0, 5))
def test_whoever_stops_at_the_first_that_lives_has_seen_all_that_do_not(
    leases: dict[str, float], now: float
) -> None:
    before = dict(leases)
    ordered = expiry.expired_first(leases, now)
    assert ordered == leases == before
    lives = [deadline > now for deadline in ordered.values()]
    assert lives == sorted(lives)
    for living in (True, False):
        kept = [req_id for req_id, deadline in leases.items() if (deadline > now) == living]
        assert [req_id for req_id in ordered if (leases[req_id] > now) == living] == kept


def test_nothing_is_copied_while_all_live() -> None:
    leases = {"a": 2.0, "b": 1.0}
    assert expiry.expired_first(leases, 0.5) is leases
    assert expiry.expired_first({}, 0.5) == {}
