"""A rejected request reaches an engine core only with a connector and engine cores that know it."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from tests.support.serving_app import REMOTE, body, serving
from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.v1.engine import async_llm
from vllm_overlay.v1.engine.admission import open_exchange
from vllm_overlay.v1.engine.stand_in import takes_stand_ins

STOCK_TELLS = hasattr(AsyncLLM.notify_kv_transfer_request_rejected, "__wrapped__")
"""Stock sends any connector a stand-in: from 0.21.0 on."""


class Cores:
    """The client of some engine cores; `answers` are what each says to a claim, None nothing."""

    def __init__(self, *answers: bool | Exception | None) -> None:
        self.core_engines = [bytes([i]) for i in range(len(answers))]
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []
        self.sent: list[EngineCoreRequest] = []

    async def _call_utility_async(self, *call: str, engine: bytes) -> bool:
        assert not self.sent, "asked after the fact"
        self.asked.append((engine, *call))
        await asyncio.sleep(0)
        answer = self.answers[engine[0]]
        if isinstance(answer, Exception):
            raise answer
        return await asyncio.Future() if answer is None else answer

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.sent.append(request)


def config(connector: str = "NixlConnector", module: str | None = None, **extra: object) -> Any:  # noqa: ANN401
    return SimpleNamespace(
        kv_connector=connector, kv_connector_module_path=module, kv_connector_extra_config=extra
    )


class Engine:
    """What of `AsyncLLM` tells an engine core; the methods are its own."""

    notify_kv_transfer_request_rejected = AsyncLLM.notify_kv_transfer_request_rejected

    def __init__(self, *answers: bool | Exception | None, kv: object = None) -> None:
        self.engine_core = Cores(*answers)
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=kv or config(),
            parallel_config=SimpleNamespace(
                data_parallel_size=len(answers),
                data_parallel_size_local=len(answers),
                local_engines_only=False,
            ),
        )

    def reject(
        self, name: str = "r", params: dict[str, Any] = REMOTE, rank: int | None = None
    ) -> Cores:
        tell = self.notify_kv_transfer_request_rejected

        async def refuse() -> None:
            with open_exchange() as exchange:
                await exchange.end(params, lambda: tell(name, params, data_parallel_rank=rank))

        asyncio.run(refuse())
        return self.engine_core


def test_one_engine_core_is_not_asked() -> None:
    """It decides when the stand-in arrives; nobody else could read."""
    core = Engine(True).reject()
    assert core.asked == []
    (stand_in,) = core.sent
    assert stand_in.abort_immediately
    assert stand_in.sampling_params is not None
    assert stand_in.sampling_params.extra_args == {"kv_transfer_params": REMOTE}
    assert taken() == {"REJECTION_PASSED_ON": 1}


@pytest.mark.skipif(not STOCK_TELLS, reason="stock has no stand-in")
def test_what_is_sent_is_stocks_but_for_its_name() -> None:
    """On 0.33.0, for instance, one says that it wants no watermark."""
    engine = Engine(True)
    stock = AsyncLLM.notify_kv_transfer_request_rejected.__wrapped__
    asyncio.run(stock(engine, "r", REMOTE, data_parallel_rank=0))
    ours, theirs = (
        msgspec.structs.replace(sent, request_id="r", arrival_time=0.0)
        for sent in reversed(engine.reject().sent)
    )
    assert ours == theirs


def test_an_engine_client_that_is_none_of_ours_does_what_stock_does() -> None:
    """One of vLLM's own tests makes one without its constructor."""
    engine = Engine(True)
    del engine.vllm_config
    if STOCK_TELLS:
        [sent] = engine.reject(rank=3).sent
        assert (sent.request_id, sent.data_parallel_rank) == ("r", 3)


def test_a_stranger_who_finds_the_method() -> None:
    """It calls it after a fault, too, where a retry is the rule. Stock has it from 0.21.0 on."""
    engine = Engine(True)
    asyncio.run(engine.notify_kv_transfer_request_rejected("r", REMOTE))
    assert len(engine.engine_core.sent) == STOCK_TELLS


def test_all_engine_cores_are_asked_first() -> None:
    core = Engine(True, True, True).reject(rank=1)
    (stand_in,) = core.sent
    assert stand_in.data_parallel_rank == 1
    claim = (REMOTE["remote_engine_id"], REMOTE["remote_request_id"], stand_in.request_id)
    assert core.asked == [(bytes([i]), "claim_kv_transfer", *claim) for i in range(3)]


@pytest.mark.parametrize(
    ("rank", "local", "taken_by"),
    [(None, 0, 0), (0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 0, 0), (-1, 0, 0), (1, 2, 1), (2, 2, 0)],
)
def test_a_rank_that_does_not_exist_is_none(rank: int | None, local: int, taken_by: int) -> None:
    engine = Engine(True, True, True)
    if local:  # the others are another server's
        parallel = engine.vllm_config.parallel_config
        parallel.local_engines_only, parallel.data_parallel_size_local = True, local
    else:
        engine.vllm_config.parallel_config.data_parallel_size_local = 1
    [stand_in] = engine.reject(rank=rank).sent
    assert stand_in.data_parallel_rank == taken_by


class WithoutStocks(Engine):
    """As before 0.21.0, where stock has no such method."""

    notify_kv_transfer_request_rejected: Any = (
        async_llm.AsyncKVTransferNotifier.notify_kv_transfer_request_rejected
    )


def test_where_stock_has_no_stand_in_ours_is_sent() -> None:
    engine = WithoutStocks(True, True)
    asyncio.run(engine.notify_kv_transfer_request_rejected("r", REMOTE))
    assert engine.engine_core.sent == [], "nobody has given up"
    core = engine.reject(rank=1)
    [stand_in] = core.sent
    assert len(core.asked) == 2
    assert re.fullmatch("r-rejected-.{32}", stand_in.request_id)
    assert stand_in.data_parallel_rank == 1
    assert stand_in.sampling_params is not None
    assert stand_in.sampling_params.extra_args == {"kv_transfer_params": REMOTE}
    assert WithoutStocks(True, kv=config("MooncakeConnector")).reject().sent == []


@pytest.mark.parametrize("answers", [(False, True), (True, False)])
def test_one_that_has_a_reader_is_enough_to_tell_nobody(answers: tuple[bool, ...]) -> None:
    assert Engine(*answers).reject().sent == []
    assert taken() == {}


def test_an_engine_core_of_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], []
    monkeypatch.setattr(async_llm, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine = Engine(True, Exception("Call to claim_kv_transfer method failed: no attribute"))
    for now[0] in (0.5, 0.6, 60.4, 60.5):
        assert engine.reject().sent == []
        asked.append(len(engine.engine_core.asked))
    assert asked == [2, 2, 2, 4]  # once in a minute is enough


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (EngineDeadError(), EngineDeadError),
        (asyncio.TimeoutError(), asyncio.TimeoutError),
        (None, asyncio.TimeoutError),
    ],
)
def test_engine_cores_that_do_not_answer_are_not_taken_to_agree(
    answer: Exception | None, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_llm, "ANSWER_TIMEOUT", 0.05)
    engine = Engine(True, answer)
    for asked in (2, 4):  # the next time, too
        with pytest.raises(error):
            engine.reject()
        assert (len(engine.engine_core.asked), engine.engine_core.sent) == (asked, [])


@pytest.mark.parametrize(
    "lie", [{"remote_host": None}, {"remote_port": "x"}, {"remote_request_id": 7}, {"tp_size": 0}]
)
def test_who_cannot_be_told_is_nobody(lie: dict[str, Any]) -> None:
    for answers in ((True,), (True, True)):
        core = Engine(*answers).reject(params=REMOTE | lie)
        assert core.sent == core.asked == []


MULTI = [{"kv_connector": "LMCacheConnectorV1"}, {"kv_connector": "NixlConnector"}]


@pytest.mark.parametrize(
    ("kv", "takes"),
    [
        (config(), True),
        (config("NixlPullConnector"), True),
        (config("MultiConnector", connectors=MULTI), True),
        (config("MultiConnector", connectors=MULTI[:1]), False),
        (config("MultiConnector"), False),
        (config("NixlPushConnector"), False),
        (config("MooncakeConnector"), False),
        (config("NixlConnector", module="in.house"), False),
    ],
)
def test_which_connectors_take_a_stand_in(kv: Any, takes: bool) -> None:  # noqa: ANN401
    assert takes_stand_ins(kv) is takes
    core = Engine(True, True, kv=kv).reject()
    assert len(core.asked) == (2 if takes else 0)
    if takes:
        assert len(core.sent) == 1
    else:  # as stock
        assert len(core.sent) == STOCK_TELLS


@pytest.mark.parametrize(
    "connector", ["MooncakeConnector", "LMCacheConnectorV1", "MoRIIOConnector"]
)
def test_one_404_with_another_connector(connector: str) -> None:
    """Up to 0.20.2 stock's engine core hears nothing of it; Mooncake's would end."""

    async def test() -> None:
        async with serving(connector=connector) as server:
            path = "/v1/completions"
            assert (await server.post(path, body(path, model="no-such-model"))).status == 404
            assert server.core.admitted == []
            assert server.core.told == ([REMOTE] if STOCK_TELLS else [])

    asyncio.run(test())
