"""Counts of workers, schedulers and API servers reach the metric; K20, K04 and K10 make them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.config import KVTransferConfig
from vllm.v1.metrics.stats import SchedulerStats

from tests.support.lease_pair import PrefillServer, Server, decode_server, prefill_server
from tests.support.metrics import (
    LABELS,
    METRIC,
    Told,
    counted_of_a_request,
    serving_metrics,
)
from tests.support.nixl_worker import nixl_of
from tests.support.serving_app import REMOTE, serving_config
from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.v1.metrics.fixes import FixesProm

PROMPT = list(range(40))
SECONDS = 5.0


@pytest.fixture
def p() -> Iterator[PrefillServer]:
    with prefill_server(log_stats=True) as server:
        yield server


def to_the_end(d: Server) -> None:
    """Let the reads end, and step until all requests have."""
    nixl = nixl_of(d.worker)
    nixl.finish(*nixl.in_flight())
    end = time.monotonic() + SECONDS
    while d.scheduler.has_requests() and time.monotonic() < end:
        d.step()
        time.sleep(0.001)


def test_a_lease_that_ends_unread_is_counted(p: PrefillServer) -> None:
    """By a worker, so it goes the whole way."""
    told = Told(p.scheduler)
    p.prefill("asked", PROMPT)
    p.outlive_leases()
    p.step()
    with told.served() as page:
        assert page.samples(METRIC, *LABELS) == {("0", "K20", "lease_ended_unread"): 1}


def test_a_read_that_is_refused_is_counted(p: PrefillServer) -> None:
    offer = p.prefill("asked", PROMPT)
    d = decode_server(log_stats=True)
    told = Told(d.scheduler)
    d.send("late", PROMPT, offer)
    d.step()
    d.step()
    p.outlive_leases()
    to_the_end(d)
    with told.served() as page:
        assert page.samples(METRIC, *LABELS).get(("0", "K20", "read_refused")) == 1


def test_bad_params_are_counted() -> None:
    d = decode_server(log_stats=True)
    told = Told(d.scheduler)
    d.send("bad", PROMPT, {"do_remote_prefill": True, "remote_block_ids": "none"})
    to_the_end(d)
    with told.served() as page:
        assert page.samples(METRIC, *LABELS) == {("0", "K04", "params_refused"): 1}


def test_an_api_server_counts_parameters_that_it_refuses() -> None:
    counted = counted_of_a_request({**REMOTE, "remote_port": "x"})
    assert counted == {("", "K04", "params_refused"): 1}


def test_an_api_server_counts_samples_that_may_not_read() -> None:
    assert counted_of_a_request(n=3) == {("", "K10", "further_reader"): 2}


def test_what_is_not_known_is_passed_over() -> None:
    """A reason of another build, and an engine that this server has no metrics of."""
    with serving_metrics(serving_config()) as (logger, page):
        stats = SchedulerStats()
        stats.kv_transfer_fixes = {"SOMETHING_LATER": 3, "USED_TWICE": 2}
        logger.record(stats, None, engine_idx=0)
        fixes: FixesProm = logger.kv_transfer_fixes
        fixes.observe(stats, 7)
        assert page.samples(METRIC, *LABELS) == {("0", "K11", "used_twice"): 2}


def test_where_nothing_is_transferred_nothing_is_counted() -> None:
    transferring = serving_config()
    without, unset = (SimpleNamespace(kv_transfer_config=one) for one in (None, KVTransferConfig()))
    engines = {0: ["tiny", "0"]}
    plugins = SimpleNamespace()
    for config, per_engine in (
        (without, engines),
        (unset, engines),
        (plugins, engines),
        (transferring, {}),
    ):
        registry = CollectorRegistry()
        counter = functools.partial(prometheus_client.Counter, registry=registry)
        fixes = FixesProm(counter, config, ["model_name", "engine"], per_engine)
        stats = SchedulerStats()
        stats.kv_transfer_fixes = {"USED_TWICE": 2}
        fixes.observe(stats, 0)
        assert [*registry.collect()] == []


def test_each_reason_is_there_from_the_start() -> None:
    registry = CollectorRegistry()
    counter = functools.partial(prometheus_client.Counter, registry=registry)
    engines = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    FixesProm(counter, serving_config(), ["model_name", "engine"], engines)
    labels = {"model_name": "tiny", "fix": "K11", "reason": "used_twice"}
    for engine in ("0", "1", ""):
        assert registry.get_sample_value(METRIC, {**labels, "engine": engine}) == 0


class Relabelled(prometheus_client.Counter):
    """Counters as vLLM-Omni has them: an engine is a stage and a replica, which have numbers."""

    def __init__(self, *, labelnames: list[str], **named: Any) -> None:  # noqa: ANN401 - theirs
        at = labelnames.index("engine")
        labelnames[at : at + 1] = ["stage", "replica"]
        super().__init__(labelnames=labelnames, **named)

    def labels(self, *values: Any, **named: Any) -> Any:  # noqa: ANN401 - theirs
        if len(values) < len(self._labelnames):
            raise ValueError("no such engine")
        return super().labels(*values, **named)


def test_a_plugins_counters_with_other_labels_cost_no_metric(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counter = functools.partial(Relabelled, registry=CollectorRegistry())
    labels = ["model_name", "engine"]
    fixes = FixesProm(counter, serving_config(), labels, {0: ["tiny", "0", "1"]})
    assert "kv_transfer_fixes_total is not counted" in caplog.text
    stats = SchedulerStats()
    stats.kv_transfer_fixes = {"USED_TWICE": 2}
    fixes.observe(stats, 0)
    count(Acted.USED_TWICE)


API_SERVERS = """
import os
from tests.support.metrics import serving_metrics
from tests.support.serving_app import REMOTE, serving_config
from vllm.v1.metrics.stats import SchedulerStats
from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count

for passed_on, used_twice in (1, 2), (4, 0):
    if not (server := os.fork()):
        with serving_metrics(serving_config()) as (logger, page):
            for _ in range(passed_on):
                count(Acted.REJECTION_PASSED_ON)
            stats = SchedulerStats()
            stats.kv_transfer_fixes = {"USED_TWICE": used_twice}
            logger.record(stats, None, engine_idx=0)
        break
    assert os.waitpid(server, 0)[1] == 0
"""


def test_several_api_servers_are_summed(tmp_path: Path) -> None:
    """As with --api-server-count: each has a logger; whichever is asked reads all of their files.

    An engine sends a step's statistics to one of them.
    """
    variables = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", API_SERVERS], env=variables, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    samples: Counter[tuple[str, ...]] = Counter()
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == METRIC:
                samples[tuple(sample.labels[label] for label in LABELS)] += int(sample.value)
    assert len(samples) == 2 * len(Acted), "of each reason, at 0 from the start"
    assert +samples == {("", "K05", "rejection_passed_on"): 5, ("0", "K11", "used_twice"): 2}
