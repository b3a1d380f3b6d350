"""What the processes of one deployment send each other, where some are stock and some patched.

A fleet is rolled engine by engine, and an engine's API servers, cores and workers may lie on
several machines. Each scenario encodes its messages with this build's classes, hands them to the
other build and reads both its own and the other's: all four readings have to be the same.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.parity.scenario import Observed, said, scenario
from tests.parity.visits import sent
from tests.parity.wire_folder import exchange
from tests.support.decode_engine import DecodeEngine
from tests.support.idle_engine import IdleEngine
from tests.support.nixl_release import (
    NixlAgentMetadata,
    NixlHandshakePayload,
    compute_nixl_compatibility_hash,
)
from tests.support.nixl_worker import connect, make_worker, nixl_of, receive, topology_of
from tests.support.serving_app import REMOTE

_COUNTS = "vllm_overlay.distributed.kv_transfer.fix_counts"


def _both_read(name: str, data: bytes, read: Callable[[bytes], Observed]) -> Observed:
    def reading(message: bytes) -> Observed:
        try:
            return read(message)
        except Exception as error:
            return said(error)

    # The other build's is read even where this one's cannot be, and the other way round.
    theirs = exchange(name, data)
    return {"own": reading(data), "other's": reading(theirs)}


def _encoded(message: object) -> bytes:
    return msgspec.msgpack.encode([bytes(part) for part in MsgpackEncoder().encode(message)])


def _decoded(message: bytes, kind: Any) -> Any:  # noqa: ANN401 - any message
    return MsgpackDecoder(kind).decode(msgspec.msgpack.decode(message))


REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "client_index": 3,
        "current_wave": 2,
        "priority": 5,
        "trace_headers": {"traceparent": "00-1"},
        "resumable": True,
        "external_req_id": "of-the-client",
        "reasoning_ended": True,
        "reasoning_parser_kwargs": {"a": 1},
        "data_parallel_rank": 1,
        "cache_salt": "salt",
    },
    "reads from P": {"sampling_params": SamplingParams(extra_args={"kv_transfer_params": REMOTE})},
}


def _request(**fields: Any) -> EngineCoreRequest:  # noqa: ANN401 - any field
    plain: dict[str, Any] = {
        "request_id": "cmpl-1",
        "prompt_token_ids": [5, 6, 7],
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=3),
        "pooling_params": None,
        "arrival_time": 1.5,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    known = EngineCoreRequest.__struct_fields__
    return EngineCoreRequest(**plain | {k: v for k, v in fields.items() if k in known})


@scenario(*REQUESTS, exchanges=True)
def from_server_to_core(name: str) -> Observed:
    """Requests, as API servers encode and cores decode them."""

    def read(message: bytes) -> Observed:
        request = _decoded(message, EngineCoreRequest)
        return {"id": request.request_id, **sent(request)}

    return _both_read(f"request {name}", _encoded(_request(**REQUESTS[name])), read)


@scenario(exchanges=True)
def from_core_to_server() -> Observed:
    """Outputs, as cores encode and API servers decode them."""
    output = EngineCoreOutput(
        "cmpl-1", [7], finish_reason=FinishReason.LENGTH, kv_transfer_params=REMOTE
    )
    message = EngineCoreOutputs(engine_index=1, outputs=[output], finished_requests={"cmpl-1"})

    def read(data: bytes) -> Observed:
        outputs = _decoded(data, EngineCoreOutputs)
        (one,) = outputs.outputs
        return {
            "engine": outputs.engine_index,
            "finished": sorted(outputs.finished_requests),
            "output": [one.request_id, list(one.new_token_ids), str(one.finish_reason)],
            "params": one.kv_transfer_params,
        }

    return _both_read("outputs", _encoded(message), read)


@scenario("full", "full, sliding", "full, mamba", "latent", exchanges=True)
def from_p_to_d(kind: str) -> Observed:
    """The handshake: P says what its cache is like, D believes it and reads."""
    mla = kind == "latent"
    groups: Any = ("full",) if mla else tuple(kind.split(", "))
    p = make_worker(engine_id="P", groups=groups, mla=mla)
    payload = p.xfer_handshake_metadata

    def read(message: bytes) -> Observed:
        received = msgspec.msgpack.Decoder(NixlHandshakePayload).decode(message)
        metadata = msgspec.msgpack.Decoder(NixlAgentMetadata).decode(received.agent_metadata_bytes)
        d = make_worker(groups=groups, mla=mla)
        changes = {"agent_metadata": b"P/0", "kv_caches_base_addr": metadata.kv_caches_base_addr}
        fields = {f: getattr(metadata, f) for f in metadata.__dataclass_fields__}
        metadata = NixlAgentMetadata(**fields | changes)
        d.add_remote_agent(metadata, 0, 1)
        connect(d, "P")  # what a handshake notes beside that
        blocks = [[1, 2] for _ in groups]
        receive(d, "req", local_blocks=blocks, remote_blocks=blocks,
                remote_request_id="req-p", engine_id="P", tp_size=1)  # fmt: skip
        return [[len(one.local), sorted(one.remote)] for one in nixl_of(d).reads]

    return _both_read(f"handshake {kind}", msgspec.msgpack.encode(payload), read)


@scenario()
def the_handshakes_hash() -> Observed:
    """What P and D compare before anything else: stock and patched have to have one."""
    worker = make_worker(engine_id="P")
    worker.model_config.model = "model"  # a temporary folder
    topology = topology_of(worker)
    old = [topology.cross_layers_blocks] if hasattr(topology, "cross_layers_blocks") else []
    return {
        "the hash": compute_nixl_compatibility_hash(worker.vllm_config, worker.backend_name, *old)
    }


@scenario(exchanges=True)
def from_scheduler_to_worker() -> Observed:
    """What the scheduler has the workers read; they may lie on other machines."""
    engine = DecodeEngine()
    engine.ask("req", range(40), remote_blocks=[[5, 6, 7]])
    decided = engine.scheduler.schedule()

    def read(message: bytes) -> Observed:
        worker = make_worker()
        connect(worker, "P")
        worker.start_load_kv(pickle.loads(message))  # noqa: S301 - our own
        return [[len(one.local), one.remote] for one in nixl_of(worker).reads]

    return _both_read("metadata", pickle.dumps(decided.kv_connector_metadata), read)


@scenario(exchanges=True)
def from_worker_to_scheduler() -> Observed:
    """What a worker reports of a receive that is complete."""
    engine = IdleEngine()
    connect(engine.worker, "P")
    engine.ask("req", range(40), remote_blocks=[[5, 6, 7]])
    engine.step()
    nixl_of(engine.worker).finish(*nixl_of(engine.worker).reads)
    if _COUNTS in sys.modules:  # of the scheduler, whose process is another than the worker's
        sys.modules[_COUNTS].taken()
    report = engine._report()

    def read(message: bytes) -> Observed:
        received: KVConnectorOutput = pickle.loads(message)  # noqa: S301 - our own
        return sorted(received.finished_recving or ())

    return _both_read("report", pickle.dumps(report), read)
