"""vLLM's own API server in one process, on a scripted engine core.

The FastAPI application, its routers and middleware, the serving classes, `AsyncLLM`, its input
and output processors and the tokenizer are the released (or patched) ones. Replaced is only what
would be another process: the engine core, by `ScriptedCore`, which records what it is sent and
answers when and how the test says. The model is a folder written by us; no hub is asked.

A test reads like a client's visit::

    async with serving() as server:
        answer = await server.post("/v1/completions", body("/v1/completions", model="no-such"))
        assert answer.status == 404
        assert server.core.told == [REMOTE]

`Server.post` speaks ASGI itself, so a test can take the client away at any moment.
Load the plugin `tests.support.vllm_cpu` first.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import inspect
import json
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from fastapi import FastAPI
from starlette.datastructures import State
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.entrypoints.openai.api_server import build_app, init_app_state
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.support.harness import HarnessError, building
from tests.support.stand_in_model import model_folder

_CLI: Any = importlib.import_module(
    next(
        name
        for name in (
            "vllm.entrypoints.openai.cli_args",  # up to 0.28.0
            "vllm.entrypoints.launchers.cli_args",  # up to 0.32.0
            "vllm.entrypoints.common.cli_args",
        )
        if importlib.util.find_spec(name)
    )
)

_WITH_MODEL = "model_config" in inspect.signature(build_app).parameters
"""The application is built for a model: from 0.19.0 on."""

MODEL = "tiny"
"""The name under which the model is served."""

MAX_MODEL_LEN = 64
"""Tokens; the tokenizer makes one token of each byte, so also the longest prompt in bytes."""

REMOTE: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine-p",
    "remote_request_id": "cmpl-p-0",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
"""What a prefill server hands out for one request: its blocks wait for us."""

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"


_VOCABULARY = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]


@lru_cache(maxsize=1)
def served_model() -> str:
    """A model folder with a tokenizer of one token per byte and a plain chat template."""
    folder = model_folder(
        "KvfixServedModel", vocab_size=len(_VOCABULARY), bos_token_id=0, eos_token_id=1
    )
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(_VOCABULARY)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": MAX_MODEL_LEN,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    # Nearly every model has this file. Where it is not, vLLM makes its content of the model's
    # configuration, once for each endpoint.
    generation = {"bos_token_id": 0, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


@lru_cache(maxsize=1)
def _model_config() -> ModelConfig:
    return ModelConfig(model=served_model(), max_model_len=MAX_MODEL_LEN, dtype="float16", seed=0)


def serving_config(connector: str | None = "NixlConnector", *, ranks: int = 1) -> VllmConfig:
    """The configuration of a decode server; without a connector it is a plain server.

    `ranks` are the data-parallel engines that this server balances its requests over.
    """
    config = VllmConfig(
        model_config=copy.deepcopy(_model_config()),
        cache_config=CacheConfig(block_size=16),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=2048,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=connector
        and KVTransferConfig(kv_connector=connector, kv_role="kv_both", engine_id="engine-d"),
    )
    config.parallel_config.data_parallel_size = ranks
    return config


class ScriptedCore:
    """Stands in for the client of the engine-core process.

    Attributes:
        requests: what the engine core was sent, after a trip through vLLM's own wire format,
            oldest first.
        aborted: internal ids of the requests that it was asked to abort.
        answers: whether a request is answered at once with as many tokens as it asked for.
        on_add: awaited before a request counts as sent; it may wait, or raise.
        ready: what the server waits for before it validates its first request; `asked` is set
            when it does.
        ranks: data-parallel engines that exist; a request for another one cannot be routed.
    """

    def __init__(self, *, ranks: int = 1) -> None:
        self.requests: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.answers = True
        self.on_add: Callable[[EngineCoreRequest], Awaitable[None]] | None = None
        self.ranks = ranks
        self.resources = SimpleNamespace(engine_dead=False)
        self.ready, self.asked = asyncio.Event(), asyncio.Event()
        self.ready.set()
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)

    @property
    def told(self) -> list[dict[str, Any]]:
        """The `kv_transfer_params` of every request sent only to free the prefill server."""
        return [_params(r) for r in self.requests if _is_rejection(r)]

    @property
    def admitted(self) -> list[EngineCoreRequest]:
        """The requests sent to be computed."""
        return [r for r in self.requests if not _is_rejection(r)]

    @property
    def readers(self) -> list[EngineCoreRequest]:
        """The requests sent to be computed that will read the prefill server's blocks."""
        return [r for r in self.admitted if _params(r).get("do_remote_prefill")]

    def reset(self) -> None:
        """Forget everything that a test did."""
        self.requests.clear()
        self.aborted.clear()
        self.answers, self.on_add = True, None
        self.ready.set()
        self.asked.clear()

    def finish(
        self,
        request: EngineCoreRequest,
        tokens: list[int] | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        cached: int | None = None,
    ) -> None:
        """Answer a request with `tokens`, or with as many as it asked for.

        `cached` tokens of its prompt were not computed.
        """
        sampling = request.sampling_params
        if sampling is None:
            raise HarnessError("a request without sampling parameters", "one for a completion")
        tokens = tokens or [_VOCABULARY.index("a")] * (sampling.max_tokens or 1)
        output = EngineCoreOutput(
            request.request_id,
            tokens,
            new_logprobs=_logprobs(tokens, sampling.logprobs) if sampling.logprobs else None,
            finish_reason=FinishReason.LENGTH,
            kv_transfer_params=kv_transfer_params,
            **({} if cached is None else counted(cached)),
        )
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))

    def fail(self, request: EngineCoreRequest) -> None:
        """End a request as one whose KV could not be loaded."""
        output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))

    # The part of EngineCoreClient that an API server calls.

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        rank = request.data_parallel_rank
        if rank is not None and self.ranks > 1:
            range(self.ranks)[rank]  # as the load-balancing client picks its engine
        if self.on_add is not None:
            await self.on_add(request)
        received: EngineCoreRequest = self._decoder.decode(self._encoder.encode(request))
        self.requests.append(received)
        if self.answers and not _is_rejection(received):
            self.finish(received)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted.extend(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        self.asked.set()
        await self.ready.wait()
        return ("generate",)

    def shutdown(self, timeout: float | None = None) -> None:
        pass


def counted(cached: int) -> dict[str, Any]:
    """The field of an `EngineCoreOutput` that says how much of a prompt was not computed."""
    if "num_cached_tokens" in EngineCoreOutput.__struct_fields__:  # up to 0.19.1
        return {"num_cached_tokens": cached}
    from vllm.v1.metrics.stats import PrefillStats

    return {"prefill_stats": PrefillStats(num_cached_tokens=cached)}


def _logprobs(tokens: list[int], count: int) -> LogprobsLists:
    """Each of `tokens`, and as many likely ones as were asked for, all equally likely."""
    ids = np.array([[token, *range(2, count + 2)] for token in tokens])
    return LogprobsLists(ids, np.full(ids.shape, -1.0), np.ones(len(tokens), int))


def _is_rejection(request: EngineCoreRequest) -> bool:
    # Stock 0.20.x has no such field.
    return bool(getattr(request, "abort_immediately", False))


def _params(request: EngineCoreRequest) -> dict[str, Any]:
    if request.sampling_params is None:
        raise HarnessError("a request without sampling parameters", "one for a completion")
    params: object = (request.sampling_params.extra_args or {}).get("kv_transfer_params")
    return params if isinstance(params, dict) else {}


ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [3, 4], "sampling_params": {"max_tokens": 2}},
}
"""Every endpoint that takes `kv_transfer_params`, with a request that it serves."""


def body(
    path: str,
    params: object = REMOTE,
    **changes: Any,  # noqa: ANN401 - any field
) -> dict[str, Any]:
    """A request for an endpoint, with `params` as its transfer parameters.

    A change to None drops the field. On the token-level endpoint, names of sampling parameters
    go where they belong.
    """
    request = copy.deepcopy({"model": MODEL, **ENDPOINTS[path]})
    target = request
    if path == "/inference/v1/generate":
        sampling = request["sampling_params"]
        sampling["extra_args"] = {"kv_transfer_params": params}
        names = SamplingParams.__struct_fields__
        sampling.update({k: v for k, v in changes.items() if k in names})
        changes = {k: v for k, v in changes.items() if k not in names}
    else:
        target["kv_transfer_params"] = params
    target.update(changes)
    return {k: v for k, v in request.items() if v is not None}


@dataclasses.dataclass
class Answer:
    """What a client got: HTTP status (0 when it left before any) and the whole body.

    `closed` says that the server closes the connection then, as it does after an application
    that raises.
    """

    status: int = 0
    body: bytes = b""
    closed: bool = False

    @property
    def error(self) -> dict[str, Any]:
        """The error object, from the body or from the first event of a stream that has one."""
        for line in self.body.splitlines() or [b""]:
            with contextlib.suppress(ValueError):
                parsed = json.loads(line.removeprefix(b"data: "))
                if isinstance(parsed, dict):
                    found = parsed.get("error") or parsed.get("response", {}).get("error")
                    if found:
                        error: dict[str, Any] = found
                        return error
        return {}


class Server:
    """A decode server: the real application over a `ScriptedCore`."""

    def __init__(self, app: Any, engine: AsyncLLM, core: ScriptedCore) -> None:  # noqa: ANN401
        self.app, self.engine, self.core = app, engine, core

    async def post(
        self,
        path: str,
        body: dict[str, Any] | bytes,
        *,
        method: str = "POST",
        headers: Sequence[tuple[str, str]] = (),
        leaves: Awaitable[object] | None = None,
        receiving: Callable[[bytes], None] = lambda _: None,
    ) -> Answer:
        """Send one request and wait until the server is done with it, whatever the client does.

        `leaves` is when the client drops the connection; `receiving` gets each piece of the
        answer's body as it arrives.
        """
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        answer = Answer()
        gone = False

        async def send(message: dict[str, Any]) -> None:
            if gone:
                return
            if message["type"] == "http.response.start":
                answer.status = message["status"]
            else:
                answer.body += message.get("body", b"")
                receiving(message.get("body", b""))

        async def leave() -> None:
            nonlocal gone
            if leaves is not None:
                await leaves
            gone = True
            incoming.put_nowait({"type": "http.disconnect"})

        leaving = asyncio.create_task(leave()) if leaves is not None else None
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"content-type", b"application/json"),
                *((name.lower().encode(), value.encode()) for name, value in headers),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
        }
        try:
            await self.app(scope, incoming.get, send)
        except HarnessError:
            raise
        except Exception:  # a server turns what escapes the application into a log line
            answer.closed = True
        finally:
            if leaving is not None:
                leaving.cancel()
        await self.settled()
        return answer

    async def settled(self) -> None:
        """Let tasks that were cancelled or have just been started come to their end."""
        for _ in range(20):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serving(
    *flags: str, connector: str | None = "NixlConnector", ranks: int = 1
) -> AsyncIterator[Server]:
    """Start a decode server; `flags` are those of ``vllm serve``."""
    with building("a decode server"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = serving_config(connector, ranks=ranks)
        core = ScriptedCore(ranks=ranks)
        with mock.patch.object(EngineCoreClient, "make_async_mp_client", lambda **_: core):
            engine = AsyncLLM(config, executor_class=object, log_stats=False)
        args = _arguments(*flags)
        app = _application(*flags)
        await init_app_state(engine, app.state, args, ("generate",))
        app.state.server = SimpleNamespace(should_exit=False)
    try:
        yield Server(app, engine, core)
    finally:
        engine.shutdown()
        with contextlib.suppress(asyncio.CancelledError):
            if engine.output_handler is not None:
                await engine.output_handler


def _application(*flags: str) -> FastAPI:
    """An application with a state of its own; its routes are those of all with the same flags."""
    built = _routes(*flags)
    app = copy.copy(built)
    app.state = State(dict(built.state._state))
    return app


@lru_cache(maxsize=8)
def _routes(*flags: str) -> FastAPI:
    """The application as vLLM builds it; it is never called itself."""
    model = {"model_config": _model_config()} if _WITH_MODEL else {}
    return build_app(_arguments(*flags), ("generate",), **model)


@lru_cache(maxsize=8)
def _arguments(*flags: str) -> Any:  # noqa: ANN401 - argparse's namespace
    parser = _CLI.make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(
        ["--model", served_model(), "--served-model-name", MODEL, "--disable-log-stats", *flags]
    )
    _CLI.validate_parsed_serve_args(args)
    args.enable_scale_out = True  # token-level requests are served only then, on 0.33.0
    return args
