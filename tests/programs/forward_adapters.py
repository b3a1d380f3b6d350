"""Fixtures that let a test of a later vLLM release run on an earlier one.

`scripts.upstream_tests.later` cuts such tests out. Each fixture stands for one way in which the
interface that a test drives has changed since, and says what it makes of it. It translates what the
test does; it never supplies what the test is about, and does the same on the stock and on the
patched side.
"""

from __future__ import annotations

import pickle
import time
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


@pytest.fixture
def hnd_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """P's cache is HND and D's NHD, so that D permutes what it receives.

    Without that there is no post-processing, and a test that it is skipped for a failed receive
    cannot fail. The fake worker is HND on both sides unless told otherwise.
    """
    from tests.v1.kv_connector.unit.test_nixl_connector import (  # type: ignore[import-not-found]
        FakeNixlConnectorWorker,
    )

    monkeypatch.setitem(FakeNixlConnectorWorker.__init__.__kwdefaults__, "kv_cache_layout", "NHD")


@pytest.fixture
def transfer_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """`get_transfer_results` of 0.30.0, made of what the worker says up to 0.29.0.

    A receive that failed is there named apart from those that arrived. Before, its blocks are
    among the invalid ones, which the scheduler fetches after the finished ones.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker

    def of_worker(self: Any) -> SimpleNamespace:  # noqa: ANN401
        asked = {
            request: {block for group in meta.local_block_ids for block in group}
            for request, meta in self._recving_metadata.items()
        }
        sent, received = self.get_finished()
        failed = {request for request in received if asked[request] & self._invalid_block_ids}
        return SimpleNamespace(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def of_connector(self: Any, finished_req_ids: set[str]) -> SimpleNamespace:  # noqa: ANN401
        return of_worker(self.connector_worker)

    monkeypatch.setattr(NixlConnectorWorker, "get_transfer_results", of_worker, raising=False)
    monkeypatch.setattr(NixlConnector, "get_transfer_results", of_connector, raising=False)


@pytest.fixture
def constructed(recv_worker: Any) -> None:  # noqa: ANN401
    """The worker that the later fixture `recv_worker` makes, as this release would construct it.

    That fixture makes a worker without its constructor and sets the later release's attributes.
    """
    recv_worker._invalid_block_ids = set()
    recv_worker._failed_recv_reqs = set()
    recv_worker._remote_agents = {}
    recv_worker.use_mla = False
    recv_worker.world_size = 1
    try:
        from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.receive import ToldReceives
    except ModuleNotFoundError:
        return  # stock
    recv_worker._receives = ToldReceives(recv_worker)


@pytest.fixture
def invalid_when_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are named invalid together with the receive that failed, not earlier.

    Up to 0.29.0 a worker may name them as soon as it fails; the scheduler frees none of them, and
    computes into none, before the receive is reported.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker

    taken = NixlConnectorWorker.get_block_ids_with_load_errors

    def reported(self: Any) -> set[int]:  # noqa: ANN401
        invalid: set[int] = taken(self)
        awaited = [group for m in self._recving_metadata.values() for group in m.local_block_ids]
        early = invalid.intersection(chain.from_iterable(awaited))
        self._invalid_block_ids.update(early)
        return invalid - early

    monkeypatch.setattr(NixlConnectorWorker, "get_block_ids_with_load_errors", reported)


@pytest.fixture
def handshake_future(recv_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    """The future of a handshake comes from `_ensure_handshake`, which later tests replace.

    Up to 0.29.0 the worker looks it up among those that are under way.
    """

    class Futures(dict[str, Any]):
        def get(self, engine_id: str, default: Any = None) -> Any:  # noqa: ANN401
            return recv_worker._ensure_handshake(engine_id)

    recv_worker._handshake_futures = Futures()
    monkeypatch.setattr(type(recv_worker), "_ensure_handshake", None, raising=False)


@pytest.fixture
def awaiting_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether anybody awaits a receive follows from its blocks: without any, nobody does.

    From 0.30.0 on the scheduler says so in `awaiting_kvs`. Take only parameters for which both
    agree.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorMetadata

    add = NixlConnectorMetadata.add_new_req_to_recv

    def without(self: Any, *, awaiting_kvs: bool, **rest: Any) -> None:  # noqa: ANN401
        add(self, **rest)

    monkeypatch.setattr(NixlConnectorMetadata, "add_new_req_to_recv", without)


@pytest.fixture
def other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata reaches the worker by pickle, from a process with a clock of its own.

    From 0.27.1 on the clock is a field of the metadata (`scheduler_clock`), which tests set; it is
    what `time.perf_counter` says where the metadata is pickled.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector

    bind = NixlConnector.bind_connector_metadata

    def bound(self: Any, metadata: Any) -> None:  # noqa: ANN401
        clock = vars(metadata).pop("scheduler_clock", None)
        if clock is not None:
            with pytest.MonkeyPatch.context() as there:
                there.setattr(time, "perf_counter", lambda: clock)
                sent = pickle.dumps(metadata)
            metadata = pickle.loads(sent)  # noqa: S301 - our own
        bind(self, metadata)

    monkeypatch.setattr(NixlConnector, "bind_connector_metadata", bound)
