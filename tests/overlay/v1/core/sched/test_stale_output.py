"""Hand-offs that are preempted; and that everything else is preempted as on stock."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched import scheduler as scheduler_module

from tests.support.decode_engine import TOKEN
from tests.support.prefill_engine import PrefillEngine

stale_output = pytest.importorskip("vllm_overlay.v1.core.sched.stale_output", reason="up to 0.26.0")

HOOKS = ("awaits_output", "is_preempted", "drop_stale")
HAND_OFF = {"do_remote_decode": True}


class Other:
    """A connector that is not NIXL's, and does what NIXL's does."""

    def __init__(self, nixl: object) -> None:
        self._nixl = nixl

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any of it
        return getattr(self._nixl, name)


class Busy:
    """An engine under pressure, stepped at random until all its requests have been answered.

    Attributes:
        asked: request id -> its prompt, and how many tokens it generates.
        history: what was scheduled and sent to clients, step by step.
        preempted: how often a request lost its blocks.
    """

    def __init__(
        self,
        seed: int,
        params: dict[str, Any],
        connector: Callable[[Any], Any] = lambda nixl: nixl,
        requests: int = 12,
    ) -> None:
        rng = random.Random(seed)  # noqa: S311
        self.engine = engine = PrefillEngine(
            num_blocks=rng.randint(7, 9),
            async_scheduling=rng.random() < 0.7,
            step_tokens=rng.choice([20, 40, 200]),
        )
        engine.scheduler.connector = connector(engine.scheduler.connector)
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.history: list[object] = []
        stages = rng.choice([2, 2, 3, 4])
        made = []
        while len(engine.answers) < requests:
            if len(self.asked) < requests and rng.random() < 0.4:
                req_id, start = f"{len(self.asked)}", 100 * len(self.asked)
                prompt, more = (
                    list(range(start, start + rng.randint(1, 60))),
                    rng.choice([1, 2, 18]),
                )
                made.append(engine.prefill(req_id, prompt, max_tokens=more, params=dict(params)))
                self.asked[req_id] = prompt, more
            if engine.under_way < stages:
                self.history.append(engine.schedule())
            if engine.under_way == stages or rng.random() < 0.2:
                engine.read = {name for name in engine.answers if name in engine.scheduler.requests}
                engine.update()
                self.history.append({name: len(tokens) for name, tokens in engine.tokens.items()})
        while engine.under_way:
            engine.update()
        self.preempted = sum(request.num_preemptions for request in made)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_handed_out_holds_all_that_was_computed(seed: int) -> None:
    busy = Busy(seed, HAND_OFF)
    for req_id, (prompt, more) in busy.asked.items():
        computed = [*prompt, *(more - 1) * [TOKEN]]
        assert busy.engine.handed_out[req_id][: len(computed)] == computed
        assert busy.engine.tokens[req_id] == more * [TOKEN]
    assert stale_output._preempted_since(busy.engine.scheduler) == {}


@pytest.mark.parametrize(
    ("params", "connector"),
    [
        ({}, lambda _: None),
        (HAND_OFF, lambda _: None),
        (HAND_OFF, Other),
        ({}, lambda nixl: nixl),
        ({"do_remote_decode": False, "unknown": 1}, lambda nixl: nixl),
    ],
    ids=["no connector", "params of nobody", "another connector", "no params", "no hand-off"],
)
def test_all_else_is_as_on_stock(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], connector: Callable[[Any], Any]
) -> None:
    seeds = range(8)
    ours = [Busy(seed, params, connector) for seed in seeds]
    for hook in HOOKS:
        monkeypatch.setattr(scheduler_module, hook, lambda *_: None)
    stock = [Busy(seed, params, connector) for seed in seeds]
    assert sum(busy.preempted for busy in ours) > len(seeds)
    for one, other in zip(ours, stock, strict=True):
        assert one.history == other.history
        # They end alike; what each names of its own engine differs.
        assert list(one.engine.answers) == list(other.engine.answers)
        assert one.engine.handed_out == other.engine.handed_out


@pytest.mark.parametrize(
    ("method", "hook"), [("schedule", "awaits_output"), ("update_from_output", "drop_stale")]
)
def test_a_copy_of_the_schedulers_own_methods_has_tokens_counted_as_on_stock(
    monkeypatch: pytest.MonkeyPatch, method: str, hook: str
) -> None:
    """A plugin's, which calls no hook of ours. Stock asserts that no count is negative."""
    monkeypatch.setattr(scheduler_module, hook, lambda *_: None)
    engine = PrefillEngine(num_blocks=4)
    own = type(engine.scheduler)
    copied = {method: lambda self, *given: getattr(own, method)(self, *given)}
    engine.scheduler.__class__ = type("Plugins", (own,), copied)
    engine.prefill("first", range(100, 116), max_tokens=3, params={})
    preempted = engine.prefill("asked", range(32))
    engine.run(8)
    assert preempted.num_preemptions == 1
    assert engine.tokens["asked"] == [TOKEN]


def test_a_schedulers_methods_that_call_vllms_are_as_good() -> None:
    """Dynamo has such ones. That they do shows when the first step has ended."""
    engine = PrefillEngine(num_blocks=4)
    own: Any = type(engine.scheduler)

    class Looking(own):  # type: ignore[misc, unused-ignore]
        def schedule(self, *given: Any) -> Any:  # noqa: ANN401
            return super().schedule(*given)

        def update_from_output(self, *given: Any) -> Any:  # noqa: ANN401
            return super().update_from_output(*given)

    engine.scheduler.__class__ = Looking
    engine.prefill("before", range(8), params={})
    engine.run(1)
    engine.prefill("first", range(100, 116), max_tokens=3, params={})
    preempted = engine.prefill("asked", range(32))
    engine.run(8)
    assert preempted.num_preemptions == 1
    assert engine.handed_out["asked"] == [*range(32)]


def test_hand_offs_are_those_that_nixl_makes() -> None:
    nixl = PrefillEngine().scheduler.connector
    several = SimpleNamespace(_connectors=[Other(nixl), nixl])
    others = SimpleNamespace(_connectors=[Other(nixl)])
    asks, asks_not = (
        SimpleNamespace(kv_transfer_params=params) for params in (HAND_OFF, {"x": True})
    )
    assert stale_output.is_handed_off(nixl, asks)
    assert stale_output.is_handed_off(several, asks)
    assert not stale_output.is_handed_off(others, asks)
    assert not stale_output.is_handed_off(nixl, asks_not)
    assert not stale_output.is_handed_off(nixl, SimpleNamespace(kv_transfer_params=None))
    assert not stale_output.is_handed_off(nixl, SimpleNamespace(kv_transfer_params="what"))


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_reset_of_the_prefix_cache_drops_one_token_once(async_scheduling: bool) -> None:
    engine = PrefillEngine(async_scheduling=async_scheduling)
    engine.prefill("asked", range(32), max_tokens=3)
    engine.schedule()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.schedule()
    engine.update()
    assert engine.tokens["asked"] == []
    engine.update()
    assert engine.tokens["asked"] == [TOKEN]
    engine.run(8)
    assert engine.tokens["asked"] == 3 * [TOKEN]
    assert engine.handed_out["asked"][:34] == [*range(32), TOKEN, TOKEN]


def test_a_hand_off_that_is_aborted_meanwhile_is_gone() -> None:
    engine = PrefillEngine(num_blocks=4)
    engine.prefill("first", range(100, 116), max_tokens=3, params={})
    engine.prefill("asked", range(32))
    engine.schedule()
    engine.schedule()
    engine.leave("asked")
    engine.run(4)
    assert "asked" not in engine.answers
    assert engine.scheduler.requests == {}


def test_prompt_logprobs_of_what_is_dropped_are_dropped() -> None:
    """A step that samples nothing for a request must not have any, as vLLM asserts."""
    engine = PrefillEngine()
    scheduler = engine.scheduler
    request = engine.prefill("asked", range(32))
    decided = scheduler.schedule()
    stale_output.is_preempted(scheduler, request)
    output = SimpleNamespace(
        req_id_to_index={"other": 0, "asked": 1},
        sampled_token_ids=[[5], [6]],
        prompt_logprobs_dict={"other": "theirs", "asked": "its"},
    )
    stale_output.drop_stale(scheduler, decided, output)
    assert output.sampled_token_ids == [[5], []]
    assert output.prompt_logprobs_dict == {"other": "theirs"}
    assert request.num_output_placeholders == 0


def test_a_step_that_samples_nothing_at_all_is_left_alone() -> None:
    engine = PrefillEngine()
    request = engine.prefill("asked", range(32))
    decided = engine.scheduler.schedule()
    stale_output.is_preempted(engine.scheduler, request)
    output = SimpleNamespace(
        req_id_to_index={"asked": 0}, sampled_token_ids=[], prompt_logprobs_dict={}
    )
    stale_output.drop_stale(engine.scheduler, decided, output)
    assert output.sampled_token_ids == []


def preempted_in_its_last_step() -> tuple[PrefillEngine, list[object]]:
    """An engine after that, and what of the prompt's logprobs has come with its outputs.

    Its worker makes them with the last part of the prompt, once.
    """
    engine = PrefillEngine(num_blocks=4)
    update = engine.scheduler.update_from_output
    sent: list[object] = []
    made: dict[str, Any] = {"asked": object()}

    def of_worker(decided: Any, output: Any) -> Any:  # noqa: ANN401
        index = output.req_id_to_index.get("asked")
        if index is not None and output.sampled_token_ids[index] and made:
            output.prompt_logprobs_dict.update(made)
            made.clear()
        outputs = update(decided, output)
        sent.extend(
            one.new_prompt_logprobs_tensors
            for client in outputs.values()
            for one in client.outputs
            if one.request_id == "asked"
        )
        return outputs

    engine.scheduler.update_from_output = of_worker
    engine.prefill("first", range(100, 116), max_tokens=3, params={})
    request = engine.prefill("asked", range(32))
    engine.run(8)
    assert engine.tokens["asked"] == [TOKEN]
    return engine, [request.num_preemptions, *sent]


def test_the_prompts_logprobs_come_with_the_token_that_is_sent() -> None:
    engine, (preemptions, *sent) = preempted_in_its_last_step()
    assert preemptions == 1
    assert [one is not None for one in sent] == [True]
    assert vars(engine.scheduler)["_kept_logprobs"] == {}


def test_those_of_a_request_that_is_gone_are_not_kept() -> None:
    scheduler: Any = SimpleNamespace(requests={}, _kept_logprobs={"gone": object()})
    output: Any = SimpleNamespace(req_id_to_index={}, sampled_token_ids=[], prompt_logprobs_dict={})
    stale_output._give_back(scheduler, output)
    assert scheduler._kept_logprobs == output.prompt_logprobs_dict == {}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("overlapped", [False, True])
def test_with_stages_nothing_is_dropped_of_an_asynchronous_step(
    overlapped: bool, stages: int
) -> None:
    """A stage notes such a token as one that comes, and would wait for it with the others."""
    engine = PrefillEngine(num_blocks=4)
    engine.scheduler.parallel_config.pipeline_parallel_size = stages
    engine.scheduler.scheduler_config.async_scheduling = overlapped
    request = engine.prefill("asked", range(32))
    engine.schedule()
    stale_output.is_preempted(engine.scheduler, request)
    [preempted] = stale_output._preempted_since(engine.scheduler).values()
    assert preempted == (set() if overlapped and stages > 1 else {"asked"})
