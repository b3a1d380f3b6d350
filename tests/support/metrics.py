"""vLLM's own metrics, fed with what an engine has told as its API server would be.

d = decode_server(log_stats=True)
told = Told(d.scheduler)
d.step()
with told.served() as page:
    page.samples("vllm:num_requests_running")
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.support.harness import building
from tests.support.serving_app import REMOTE, body, serving, serving_config

METRIC = "vllm:kv_transfer_fixes_total"
LABELS = "engine", "fix", "reason"
"""K21's."""


class Page:
    """What /metrics would show."""

    def samples(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The values of a metric that are not 0, by the values of some of its labels."""
        text = generate_latest(REGISTRY).decode()
        return {
            tuple(sample.labels[label] for label in labels): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and sample.value
        }

    def has(self, name: str) -> bool:
        """Whether it shows this metric, if only at 0."""
        return f"\n{name}{{" in generate_latest(REGISTRY).decode()


class Told:
    """What a scheduler sends to its API server from now on, in vLLM's own wire format."""

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401 - vLLM's, with a method replaced
        self._config = scheduler.vllm_config
        self._sent: list[Any] = []
        update, encoder = scheduler.update_from_output, MsgpackEncoder()

        def keeping(*arguments: Any) -> Any:  # noqa: ANN401 - the scheduler's own
            outputs = update(*arguments)
            self._sent += [[bytes(part) for part in encoder.encode(o)] for o in outputs.values()]
            return outputs

        scheduler.update_from_output = keeping

    @contextlib.contextmanager
    def served(self) -> Iterator[Page]:
        """An API server's metrics, once it has heard all that was told."""
        decoder = MsgpackDecoder(EngineCoreOutputs)
        with serving_metrics(self._config) as (logger, page):
            for sent in self._sent:
                logger.record(decoder.decode(sent).scheduler_stats, None, engine_idx=0)
            yield page


@contextlib.contextmanager
def serving_metrics(config: Any) -> Iterator[tuple[Any, Page]]:  # noqa: ANN401
    """The logger of an API server with this configuration, and its page."""
    with building("an API server's metrics"):
        logger = PrometheusStatLogger(config)
    yield logger, Page()
    unregister_vllm_metrics()
    del logger
    gc.collect()


def counted_of_a_request(
    params: object = REMOTE,
    **changes: Any,  # noqa: ANN401
) -> Counter[tuple[str, ...]]:
    """What an API server's own process counts in K21's metric while it is sent one request."""

    async def send() -> None:
        async with serving() as server:
            path = "/v1/completions"
            await server.post(path, body(path, params, **changes))

    with serving_metrics(serving_config()) as (_, page):
        before = Counter(page.samples(METRIC, *LABELS))  # of what this process has done so far
        asyncio.run(send())
        return Counter(page.samples(METRIC, *LABELS)) - before
