"""K26: P frees blocks when D has read them, also if several ranks prefill the context in parallel.

They all hold the whole prompt's KV, so D reads from one of them. Each is here a real connector with
its real worker; what they say goes through the executor's own aggregator, which lets the scheduler
know of what all have said.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backend import MLAAttentionImpl
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.cp_utils import check_attention_cp_compatibility

from tests.support.decode_engine import finished
from tests.support.harness import building
from tests.support.nixl_release import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
    connector_module,
)
from tests.support.nixl_worker import (
    _MODULE,
    allocate,
    make_kv_cache_config,
    make_vllm_config,
    make_worker,
    nixl_of,
    rank_key,
    receive,
    stamp,
    surroundings,
)


@contextmanager
def context_rank(rank: int, size: int) -> Iterator[None]:
    """Be this context rank, for whoever asks."""
    group = SimpleNamespace(rank_in_group=rank, world_size=size)
    with ExitStack() as stack:
        for module in (parallel_state, _MODULE):
            if hasattr(module, "get_pcp_group"):
                stack.enter_context(mock.patch.object(module, "get_pcp_group", lambda: group))
        yield


def configuration(ranks: int) -> VllmConfig:
    """Of a prefill engine with so many context ranks."""
    config = make_vllm_config(mla=True, engine_id="P")
    config.parallel_config.prefill_context_parallel_size = ranks
    config.kv_transfer_config.kv_role = "kv_producer"  # 0.29.0 and later know it of no other
    return config


def starts(ranks: int) -> bool:
    """Whether such an engine gets past the release's own check: from 0.26.0 on."""
    config = configuration(ranks)
    # That of all backends for latent models, none of which says otherwise.
    can: bool = MLAAttentionImpl.supports_pcp
    backend = SimpleNamespace(supports_pcp=lambda: can, get_name=lambda: "latent")
    impl = SimpleNamespace(supports_pcp=can)
    layer = SimpleNamespace(impl=impl, get_attn_backend=lambda: backend)
    config.compilation_config.static_forward_context["layer"] = layer
    try:
        check_attention_cp_compatibility(config)
    except AssertionError as refusal:
        if "PCP" not in str(refusal):
            raise
        return False
    return True


class Prefill:
    """P's connectors, one for each context rank, and what its scheduler hears of them."""

    @building("a prefill engine of several context ranks")
    def __init__(self, ranks: int) -> None:
        config = configuration(ranks)
        caches = make_kv_cache_config(mla=True)
        self.connectors: list[Any] = []
        for rank in range(ranks):
            alone: dict[str, Any] = {
                "get_tensor_model_parallel_rank": lambda: 0,
                "get_tensor_model_parallel_world_size": lambda: 1,
            }
            with context_rank(rank, ranks), surroundings(mla=True, **alone):
                one = connector_module.NixlConnector(config, KVConnectorRole.WORKER, caches)
                one.register_kv_caches(allocate(caches, 16))
            self.connectors.append(one)
        self._aggregator = KVOutputAggregator.from_connector(self.connectors[0], ranks)

    def says(self) -> NixlAgentMetadata:
        """What D hears in its handshake: of ranks by one name the last one that says something."""
        said = [one.get_handshake_metadata() for one in self.connectors]
        payload = [one for one in said if one is not None][-1]
        return msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)

    def computes(self, req_id: str) -> None:
        """The step that computes a request's prompt."""
        for one in self.connectors:
            metadata = NixlConnectorMetadata()
            metadata.reqs_in_batch.add(req_id)
            one.connector_worker.start_load_kv(stamp(metadata))

    def keeps(self, req_id: str) -> None:
        """The step after it: its blocks are kept for D."""
        for one in self.connectors:
            metadata = NixlConnectorMetadata()
            metadata.reqs_to_send[req_id] = time.perf_counter() + 60
            one.connector_worker.start_load_kv(stamp(metadata))

    def hears(self, words: dict[str, list[bytes]]) -> None:
        """Deliver what was sent to each agent."""
        for one in self.connectors:
            nixl = nixl_of(one.connector_worker)
            if nixl.name in words:
                nixl.inbox = {"D": words[nixl.name]}

    def sent(self) -> set[str]:
        """A step at whose end the scheduler may hear that requests were sent: which."""
        told = [KVConnectorOutput(**finished(one, set())) for one in self.connectors]
        outputs = [
            ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=one)
            for one in told
        ]
        joined = self._aggregator.aggregate(outputs)
        assert joined is not None
        assert joined.kv_connector_output is not None
        return set(joined.kv_connector_output.finished_sending or ())


def read(p: Prefill, req_id: str) -> dict[str, list[bytes]]:
    """Let D read a request's blocks; what it tells whom."""
    d = make_worker(mla=True)
    d._remote_agents["P"] = {rank_key(0): d.add_remote_agent(p.says(), 0, 1)}
    receive(d, remote_request_id=req_id)
    nixl = nixl_of(d)
    nixl.finish(*nixl.reads)
    return nixl.heard


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_d_has_read_is_free_at_once(ranks: int) -> None:
    if not starts(ranks):
        return
    p = Prefill(ranks)
    p.computes("req-p")
    p.keeps("req-p")
    assert p.sent() == set()  # nobody has read it
    p.hears(read(p, "req-p"))
    assert p.sent() == {"req-p"}


def test_also_if_d_is_done_before_the_workers_hear_that_it_is_kept() -> None:
    if not starts(2):
        return
    p = Prefill(2)
    p.computes("req-p")
    p.hears(read(p, "req-p"))
    early = p.sent()
    p.keeps("req-p")
    assert early | p.sent() == {"req-p"}
