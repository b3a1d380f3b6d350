"""K21: the metrics say which fix has acted, and why."""

from __future__ import annotations

from tests.support.metrics import METRIC, counted_of_a_request, serving_metrics
from tests.support.serving_app import serving_config


def test_it_is_there_before_anything_has_happened() -> None:
    with serving_metrics(serving_config()) as (_, page):
        assert page.has(METRIC)


def test_a_rejection_that_is_passed_on_is_counted() -> None:
    """By the API server, which tells an engine."""
    counted = counted_of_a_request(max_tokens=10**6)
    assert counted == {("", "K05", "rejection_passed_on"): 1}
