"""44629: an engine starts whose model has layers that use another layer's KV cache.

The model runner gives the connector a cache for each layer, of such a layer that of the layer that
it shares. No KV-cache group that the connector knows has it. Such a worker says of itself, and
reads, what it would without these layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.support.harness import HarnessError
from tests.support.nixl_release import NixlAgentMetadata, NixlConnectorWorker
from tests.support.nixl_worker import (
    GroupKind,
    attempt,
    connect,
    make_worker,
    nixl_of,
    receive,
    surroundings,
)
from tests.support.stand_in_model import LAYERS

GROUPS: list[tuple[GroupKind, ...]] = [("full",), ("sliding", "full"), ("sliding", "wide")]


class Unregistered(NixlConnectorWorker):
    """A worker as its constructor leaves it."""

    caches: dict[str, Any]

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.caches = kv_caches


def unregistered(groups: Sequence[GroupKind]) -> Unregistered:
    worker = make_worker(worker_class=Unregistered, groups=groups)
    if not isinstance(worker, Unregistered):
        raise HarnessError(f"a {type(worker).__name__}", "the class that was asked for")
    return worker


def register(worker: Unregistered, caches: dict[str, Any]) -> None:
    with surroundings():
        super(Unregistered, worker).register_kv_caches(caches)


def said_by(worker: NixlConnectorWorker) -> NixlAgentMetadata:
    payload = worker.xfer_handshake_metadata
    if payload is None:
        raise HarnessError("a worker that says nothing about itself", "one with registered caches")
    return msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)


@pytest.mark.parametrize("groups", GROUPS, ids="-".join)
def test_a_layer_without_a_cache_of_its_own_is_not_registered(
    groups: tuple[GroupKind, ...],
) -> None:
    worker, plain = unregistered(groups), unregistered(groups)
    caches = worker.caches
    # Behind the owners, as the model runner adds them.
    sharing = {f"sharing{g}": caches[f"group{g}.layer{LAYERS - 1}"] for g in range(len(groups))}
    assert attempt(register, worker, caches | sharing) is None
    register(plain, caches)

    assert nixl_of(worker).called("register_memory") == nixl_of(plain).called("register_memory")
    ours, wanted = said_by(worker), said_by(plain)
    assert ours.kv_caches_base_addr == wanted.kv_caches_base_addr
    assert (ours.num_blocks, ours.block_lens) == (wanted.num_blocks, wanted.block_lens)

    for one in (worker, plain):
        connect(one)
        blocks = [[1 + g] for g in range(len(groups))]
        receive(one, local_blocks=blocks, remote_blocks=[[7 - g] for g in range(len(groups))])
    reads, expected = nixl_of(worker).reads, nixl_of(plain).reads
    assert [(r.local, r.remote) for r in reads] == [(r.local, r.remote) for r in expected]
    assert len(reads) == 1
