"""Connectors other than NIXL's: what a request of theirs has them do is what stock has them do.

The schedulers are the release's own. Of what a deployment would need beside them only the library
that moves bytes is missing here; where a worker cannot be built without it, the scenario says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import msgspec
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.parity import recording
from tests.parity.retries import good_body
from tests.parity.scenario import LeftOutError, Observed, said, scenario
from tests.parity.visits import serving
from tests.support.nixl_worker import make_kv_cache_config, make_vllm_config
from tests.support.serving_app import ENDPOINTS, REMOTE

COMPLETIONS, CHAT, *_ = ENDPOINTS
_TOKEN = 7


class Core:
    """A scheduler with any connector, and the part of the engine core that feeds it."""

    def __init__(self, connector: str, worker: Any = None, **transfer: Any) -> None:  # noqa: ANN401
        config = make_vllm_config()
        config.cache_config.num_gpu_blocks = 64
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=connector, engine_id="D", **{"kv_role": "kv_both"} | transfer
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(16, sha256)
        self.worker = worker
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=make_kv_cache_config(num_blocks=64),
            structured_output_manager=StructuredOutputManager(config),
            block_size=16,
        )

    def add(self, request: EngineCoreRequest) -> None:
        """Take a request from an API server."""
        core: Any = SimpleNamespace(scheduler=self.scheduler)
        core.abort_requests = lambda ids: EngineCore.abort_requests(core, ids)
        EngineCore.add_request(core, Request.from_engine_core_request(request, self._hasher))

    def run(self, steps: int = 12) -> Observed:
        """Step while there is work, and one step more; what ended how, or what the core died of."""
        ends: dict[str, str] = {}
        try:
            for _ in range(steps):
                ends |= self._step()
                time.sleep(0.005)
        except Exception as error:
            return f"the engine dies of {said(error)}"
        return [*ends.values(), f"{len(self.scheduler.requests)} left"]

    @property
    def free(self) -> int:
        """How many blocks nobody holds."""
        count: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return count

    def _step(self) -> dict[str, str]:
        decided = self.scheduler.schedule()
        sampled = {}
        for req_id in decided.num_scheduled_tokens:
            request = self.scheduler.requests[req_id]
            done = request.num_computed_tokens == request.num_tokens
            sampled[req_id] = [_TOKEN] if done else []
        output = KVConnectorOutput()
        if self.worker is not None:
            self.worker.start_load_kv(decided.kv_connector_metadata)
            sent, received = _finished(self.worker)
            output = KVConnectorOutput(finished_sending=sent, finished_recving=received)
        outputs = self.scheduler.update_from_output(
            decided,
            ModelRunnerOutput(
                req_ids=list(sampled),
                req_id_to_index={req_id: i for i, req_id in enumerate(sampled)},
                sampled_token_ids=list(sampled.values()),
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=None,
                kv_connector_output=output,
            ),
        )
        return {
            one.request_id: str(one.finish_reason)
            for client in outputs.values()
            for one in client.outputs
            if one.finish_reason is not None
        }


def _finished(worker: Any) -> tuple[set[str] | None, set[str] | None]:  # noqa: ANN401
    sent, received = worker.get_finished()
    return sent or None, received or None


INVALID: dict[str, Any] = {"model": [1]}
"""No handler sees a request with this: its body does not validate."""

WRONG: tuple[dict[str, Any], ...] = ({"model": "no-such-model"}, {"max_tokens": 10_000}, INVALID)


def _visits(
    connector: str,
    params: dict[str, Any],
    *,
    good: bool = True,
    wrongs: Sequence[dict[str, Any]] = WRONG,
) -> Any:  # noqa: ANN401
    """Refused requests of several kinds, and a good one: their answers, what the core is sent."""

    async def visits() -> Any:  # noqa: ANN401
        async with serving(connector=connector) as server:
            statuses = []
            for path in (COMPLETIONS, CHAT):
                for wrong in wrongs:
                    request = good_body(path, copy.deepcopy(params)) | wrong
                    statuses.append((await server.post(path, request)).status)
            if good:
                answer = await server.post(COMPLETIONS, good_body(COMPLETIONS, params))
                statuses.append(answer.status)
            await asyncio.sleep(0.05)
            return statuses, list(server.core.requests)

    return asyncio.run(visits())


PARAMS: dict[str, dict[str, Any]] = {
    "NIXL's": REMOTE,
    "Mooncake's": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "xfer-1",
        "remote_engine_id": "P",
        "remote_bootstrap_addr": "http://127.0.0.1:9",
    },
    "LMCache's": {"ret_first_tok": True, "disagg_spec": {"req_id": "r", "receiver_host": "h"}},
    "somebody's": {"do_remote_prefill": True, "my_own": [[1]], "remote_block_ids": "all"},
    "none": {},
}


def _known(connector: str) -> None:
    if connector not in KVConnectorFactory._registry:
        raise LeftOutError(f"this release has no {connector}")


@scenario(*PARAMS)
def what_another_connector_is_called_with(whose: str) -> Observed:
    """Served requests, over a connector from outside vLLM: arguments, types, order."""
    recording.CALLS.clear()
    core = Core("RecordingConnector", kv_connector_module_path="tests.parity.recording")
    for i, path in enumerate((COMPLETIONS, CHAT)):
        core.add(_plain_request(f"req-{i}-{path}", PARAMS[whose]))
    core.add(_plain_request("leaves", PARAMS[whose]))
    core.scheduler.finish_requests("leaves", RequestStatus.FINISHED_ABORTED)
    return {"ends": core.run(), "calls": json.loads(json.dumps(recording.CALLS))}


def _plain_request(req_id: str, params: dict[str, Any]) -> EngineCoreRequest:
    sampling = SamplingParams(
        max_tokens=2, ignore_eos=True, extra_args={"kv_transfer_params": copy.deepcopy(params)}
    )
    sampling.update_from_generation_config({}, 1)
    return EngineCoreRequest(
        request_id=req_id,
        prompt_token_ids=[ord(c) for c in req_id] * 3,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


@scenario(*(f"{whose}; {name}" for whose in PARAMS for name in ("MooncakeConnector",
    "LMCacheConnectorV1", "MoRIIOConnector", "OffloadingConnector")))  # fmt: skip
def refused_over_another_connector(variant: str) -> Observed:
    """What an API server with this connector sends its core; what a connector is called with."""
    whose, connector = variant.split("; ")
    _known(connector)
    statuses, requests = _visits(connector, PARAMS[whose])
    recording.CALLS.clear()
    core = Core("RecordingConnector", kv_connector_module_path="tests.parity.recording")
    for request in requests:
        core.add(request)
    return {
        "statuses": statuses,
        "requests": len(requests),
        "ends": core.run(),
        "calls": json.loads(json.dumps(recording.CALLS)),
    }


@scenario("MooncakeConnector", "MoRIIOConnector", "OffloadingConnector")
def failed_over_another_connector(connector: str) -> Observed:
    """What the core is sent for a request that it could not be sent, and for one that left."""
    _known(connector)

    async def visits() -> Any:  # noqa: ANN401
        async with serving(connector=connector) as server:

            async def fail(request: EngineCoreRequest) -> None:
                if not getattr(request, "abort_immediately", False):
                    raise RuntimeError("no room")

            server.core.on_add = fail
            request = good_body(COMPLETIONS, copy.deepcopy(PARAMS["Mooncake's"]))
            answer = await server.post(COMPLETIONS, request)
            await asyncio.sleep(0.05)
            told = [one.sampling_params.extra_args for one in server.core.requests]
            return {"status": answer.status, "told": told}

    return cast("Observed", asyncio.run(visits()))


@scenario("MooncakeConnector", "MoRIIOConnector", "OffloadingConnector")
def refused_by_the_name_that_its_router_gave(connector: str) -> Observed:
    """Where MoRIIO's routers say addresses. No key is shown where none is asked for."""
    _known(connector)
    name = "".join(
        f"___{who}_addr_host:10.0.0.{i},notify:61005" for i, who in enumerate(("p", "d"))
    )

    async def visit() -> Any:  # noqa: ANN401
        async with serving("--api-key", "secret", connector=connector) as server:
            request = good_body(COMPLETIONS, copy.deepcopy(PARAMS["Mooncake's"]))
            answer = await server.post(
                "/invocations", request | WRONG[1] | {"request_id": 2 * name}
            )
            await asyncio.sleep(0.05)
            return {"status": answer.status, "told": [r.request_id for r in server.core.requests]}

    return cast("Observed", asyncio.run(visit()))


# ---------------------------------------------------------------- transfers that are awaited


class _Reports:
    """A worker that says in the next step what is over."""

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.received: set[str] = set()

    def start_load_kv(self, _: object) -> None:
        pass

    def get_finished(self) -> tuple[set[str], set[str]]:
        reported = self.sent, self.received
        self.sent, self.received = set(), set()
        return reported


_MODULE = "tests.parity.recording"
_MOVING: dict[str, Any] = {"kv_connector": "MovingConnector", "kv_connector_module_path": _MODULE}

HOLDERS: dict[str, dict[str, Any]] = {
    "alone": {"connector": "MovingConnector", "kv_connector_module_path": _MODULE},
    "one of two": {
        "connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [
                _MOVING | {"kv_role": "kv_both"},
                {"kv_connector": "RecordingConnector", "kv_role": "kv_both"}
                | {"kv_connector_module_path": _MODULE},
            ]
        },
    },
}

LIVES: dict[str, list[str]] = {
    "loads": ["step", "received", "step", "step"],
    "loads, keeps": ["step", "received", "step", "step", "step", "sent"],
    "loads; leaves while it does": ["step", "leaves", "step", "received"],
    "loads; leaves and is received at once": ["step", "+received", "leaves", "step"],
    "loads; leaves when it has": ["step", "received", "leaves", "step"],
    "loads, keeps; leaves when it has": ["step", "received", "leaves", "step", "sent"],
    "loads, keeps; leaves while it runs": ["step", "received", "step", "leaves", "step", "sent"],
    "loads; leaves before": ["leaves", "step"],
    "loads, keeps; leaves while it does, is received": ["step", "leaves", "step", "received"],
    "loads, keeps; leaves while it does, is sent": ["step", "leaves", "step", "sent"],
    "keeps": ["step", "step", "step", "sent"],
    "keeps; leaves while it runs": ["step", "leaves", "step", "sent"],
    "keeps; leaves before": ["leaves", "step", "sent"],
    "keeps; sent in the step after": ["step", "step", "sent"],
    "keeps; sent when another is received": ["step", "step", "+sent"],
}
"""What becomes of a request. Where two transfers of it are under way at once, stock is right if one
is reported and the other never, as by connectors that are not vLLM's own. "+" goes with the report
of the next step."""


@scenario(*(f"{life}; {holder}" for life in LIVES for holder in HOLDERS))
def transfers_are_awaited(variant: str) -> Observed:
    """When a request's blocks are free, and what its connector hears of it. Another request that
    loads and keeps goes its own way beside it, and is received after it has ended."""
    life, _, holder = variant.rpartition("; ")
    recording.CALLS.clear()
    worker = _Reports()
    core = Core(worker=worker, **HOLDERS[holder])
    words = life.partition(";")[0].split(", ")
    core.add(_plain_request("one", dict.fromkeys(words, True)))
    script = [(word, "one") for word in LIVES[life]]
    script[-1:-1] = [("arrives", "two"), ("step", "two")]
    script += [(word, "two") for word in ("received", "step", "step", "step", "sent")]
    observed = []
    for word, req_id in script:
        if word == "arrives":
            core.add(_plain_request(req_id, {"loads": True, "keeps": True}))
        elif word == "leaves":
            core.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        elif word != "step":
            getattr(worker, word.lstrip("+")).add(req_id)
        ends = core._step() if word in ("step", "received", "sent") else {}
        observed.append([word, req_id, ends, sorted(core.scheduler.requests), core.free])
    return {"steps": observed, "calls": json.loads(json.dumps(recording.CALLS))}


# ---------------------------------------------------------------- NIXL, pushed


@scenario(*PARAMS, "a P that says little")
def pushs_engine_after_refused_requests(whose: str) -> Observed:
    """The scheduler of a D to which P pushes. Stock dies of what a handler refuses (some of it),
    and not of a body that does not validate."""
    _known("NixlPushConnector")
    little = {"do_remote_prefill": True, "remote_engine_id": "P", "remote_block_ids": [[1]]}
    params = PARAMS.get(whose, little)
    statuses, requests = _visits("NixlPushConnector", params, good=False, wrongs=[INVALID])
    core = Core("NixlPushConnector")
    for request in requests:
        core.add(request)
    ends = core.run()
    core.add(_plain_request("afterwards", {}))
    return {"statuses": statuses, "ends": ends, "afterwards": core.run()}


# ---------------------------------------------------------------- Mooncake


@scenario(*(one for one in PARAMS if one != "Mooncake's"))
def mooncakes_engine_after_refused_requests(whose: str) -> Observed:
    return _mooncakes_engine_after(whose)


@scenario(shows={"K13 >=0.21.0": "the engine dies of an assertion about a transfer that ended"})
def mooncakes_engine_after_its_own_refused_requests() -> Observed:
    return _mooncakes_engine_after("Mooncake's")


def _mooncakes_engine_after(whose: str) -> Observed:
    """Its own scheduler and its own worker, P's answers being the stand-in."""
    _known("MooncakeConnector")
    mooncake = _mooncake()

    statuses, requests = _visits("MooncakeConnector", PARAMS[whose], good=False)
    core = Core("MooncakeConnector", kv_role="kv_consumer")
    with mock.patch.object(mooncake, "make_zmq_socket", _answers_ok(mooncake)):
        core.worker = _mooncake_worker(mooncake)
        for request in requests:
            core.add(request)
        ends = core.run()
        core.add(_plain_request("afterwards", {}))
        return {"statuses": statuses, "ends": ends, "afterwards": core.run()}


@scenario()
def mooncakes_engine_receives() -> Observed:
    """A good request, by the same means: what the scenario before would not tell if it failed."""
    mooncake = _mooncake()

    core = Core("MooncakeConnector", kv_role="kv_consumer")
    with mock.patch.object(mooncake, "make_zmq_socket", _answers_ok(mooncake)):
        core.worker = _mooncake_worker(mooncake)
        core.add(_plain_request("good", PARAMS["Mooncake's"]))
        ends = core.run(40)
    if ends != ["length", "0 left"]:
        raise RuntimeError(f"the stand-in for Mooncake's worker does not work: {ends}")
    return ends


def _mooncake() -> Any:  # noqa: ANN401
    """vLLM's module; up to 0.18.1 it cannot be imported without the library that moves bytes."""
    library: Any = ModuleType("mooncake.engine")
    library.TransferEngine = None
    sys.modules.setdefault("mooncake", ModuleType("mooncake"))
    sys.modules.setdefault("mooncake.engine", library)
    return importlib.import_module(
        "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
    )


def _answers_ok(mooncake: Any) -> Callable[..., Any]:  # noqa: ANN401 - upstream's module
    """A socket to a P that has sent everything it was asked for."""

    class Socket:
        def setsockopt(self, *_: object) -> None:
            pass

        async def send(self, data: bytes) -> None:
            asked = msgspec.msgpack.Decoder(mooncake.MooncakeXferMetadata).decode(data)
            self._ids = list(asked.req_blocks)

        async def recv(self) -> bytes:
            status = mooncake.MooncakeXferResponseStatus.FINISH
            answer = mooncake.MooncakeXferResponse(status=status, ok_reqs=self._ids)
            return msgspec.msgpack.encode(answer)

    @contextlib.contextmanager
    def socket(*_: object, **__: object) -> Any:  # noqa: ANN401
        yield Socket()

    return socket


def _mooncake_worker(mooncake: Any) -> Any:  # noqa: ANN401
    """A worker without the library that moves bytes: what it has to do with requests."""

    class Worker(mooncake.MooncakeConnectorWorker):
        def __init__(self) -> None:
            pass

        def __del__(self) -> None:
            pass

    worker = Worker()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    topology = SimpleNamespace(
        handshake_target_ranks=lambda size: [0],
        get_target_remote_ranks=lambda size: [0],
        get_target_remote_ranks_from_engine_id=lambda engine: [0],
    )
    worker.__dict__.update(
        is_kv_producer=False, is_kv_consumer=True, receiver_loop=loop,
        finished_recving_reqs=set(), finished_sending_reqs=set(), reqs_need_send={},
        _remote_agents={"P": {0: {0: "tcp://127.0.0.1:9"}}}, _tp_size={"P": 1, "D": 1},
        transfer_topo=topology, kv_topo=topology, hostname="127.0.0.1", rpc_port=1,
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, kv_caches_base_addr=[], block_len_per_layer=[],
        kv_block_len_per_layer=[], registered_layer_names=[], registered_layer_indices=[],
        registered_group_indices=[], region_shared_groups=[], region_row_offsets=[],
        async_zmq_ctx=None, _encoder=msgspec.msgpack.Encoder(),
        _xfer_resp_decoder=msgspec.msgpack.Decoder(mooncake.MooncakeXferResponse),
        _pending_bootstrap_queries={}, _kv_layout_id="", _acked_layout_peers=set(),
        use_mla=False, engine_id="D", xfer_stats=mock.MagicMock(),
        _build_pull_metadata=lambda metas, **_: _pull_metadata(mooncake, metas),
    )  # fmt: skip
    return worker


def _pull_metadata(mooncake: Any, metas: Any) -> Any:  # noqa: ANN401
    """What D asks P for, where that is made by a method of its own, which looks at the caches."""
    kind = mooncake.MooncakeXferMetadata
    fields = {
        "remote_hostname": "127.0.0.1", "remote_port": 1, "remote_tp_size": 1, "remote_tp_rank": 0,
        "req_blocks": {one: (m.transfer_id, m.local_block_ids) for one, m in metas.items()},
        "kv_caches_base_addr": [], "block_lens": [], "kv_block_lens": [],
    }  # fmt: skip
    return kind(**{name: fields[name] for name in kind.__struct_fields__ if name in fields})
