# SPDX-License-Identifier: Apache-2.0
"""All releases: the metric that says which fix has acted how often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_overlay.distributed.kv_transfer import fix_counts
from vllm_overlay.distributed.kv_transfer.fix_counts import Acted

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats

logger = init_logger(f"vllm.{__name__}")

NAME = "vllm:kv_transfer_fixes"


class FixesProm:
    """`vllm:kv_transfer_fixes_total`, where a KV connector is configured.

    What the API server itself counts has an empty `engine`: no engine has part in it. Counters of a
    plugin may have other labels (vLLM-Omni's have). Where they do not take ours nothing is counted,
    and all other metrics are as they were.

    Args:
        counter: the release's own class of counters, prometheus_client's or Ray's.
        labelnames: those that all metrics of an engine have.
        per_engine: their values, by engine.
    """

    def __init__(
        self,
        counter: Any,  # noqa: ANN401 - of either library
        config: VllmConfig,
        labelnames: Sequence[str],
        per_engine: Mapping[int, Sequence[object]],
    ) -> None:
        self._counter: Any = None
        transfer = getattr(config, "kv_transfer_config", None)  # a plugin's may do without
        if transfer is None or not transfer.kv_connector or not per_engine:
            return
        self._engines = per_engine
        (values, *_) = per_engine.values()
        self._server = [
            "" if name == "engine" else value
            for name, value in zip(labelnames, values, strict=False)
        ]
        try:
            self._counter = counter(
                name=NAME,
                documentation="Times that a fix of kvfix has acted, by fix and reason.",
                labelnames=[*labelnames, "fix", "reason"],
            )
            for labels in (*per_engine.values(), self._server):
                for acted in Acted:  # so that there is an increase when one acts first
                    self._counter.labels(*labels, *acted.value)
        except Exception as error:
            self._counter = None
            logger.warning("%s_total is not counted: %r", NAME, error)
        else:
            fix_counts.send_to(self.count)

    def observe(self, stats: SchedulerStats | None, engine: int) -> None:
        """Count what an engine's statistics tell; those of a stock engine tell nothing."""
        told: Mapping[str, int] | None = getattr(stats, "kv_transfer_fixes", None)
        if not told or self._counter is None or engine not in self._engines:
            return
        for acted, times in fix_counts.known(told):
            self._count(self._engines[engine], acted, times)

    def count(self, acted: Acted, times: int) -> None:
        """Count what the API server's own process has counted."""
        self._count(self._server, acted, times)

    def _count(self, labels: Sequence[object], acted: Acted, times: int) -> None:
        # Not kept by label: up to 0.30.0, at least, Ray's counters are labelled in place.
        self._counter.labels(*labels, *acted.value).inc(times)
