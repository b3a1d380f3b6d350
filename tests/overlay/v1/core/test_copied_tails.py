"""Who finds a part of a block waits for the step that computes it, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager

from tests.support.hybrid_engine import engine_of
from tests.support.release import since
from tests.support.state_engine import StateEngine

copied_tails = pytest.importorskip("vllm_overlay.v1.core.copied_tails", reason="0.26.0 to 0.32.0")

BLOCK = 16
PROMPT = range(1000, 1100)


def make(**config: Any) -> StateEngine:  # noqa: ANN401 - of `engine_of`
    return engine_of(
        StateEngine,
        mode="align",
        guesses=1,
        drafts=True,
        unit=4,
        prefix_caching=True,
        connected=False,
        depth=1,
        **config,
    )


def answered(engine: StateEngine, prompt: Sequence[int]) -> None:
    engine.ask(f"answered {len(prompt)}", prompt, max_tokens=1)
    assert engine.run()


def steps(engine: StateEngine, *budgets: int) -> list[dict[str, int]]:
    """How many tokens of whom are computed in steps of at most so many."""
    decided = []
    for tokens in budgets:
        engine.scheduler.max_num_scheduled_tokens = tokens
        step = engine.advance()
        decided.append(dict(step.num_scheduled_tokens) if step else {})
    return decided


def ask(engine: StateEngine, prompts: dict[str, Iterable[int]]) -> None:
    for req_id, prompt in prompts.items():
        engine.ask(req_id, prompt, max_tokens=1)


def test_who_finds_a_part_waits_for_the_step_that_computes_it() -> None:
    engine = make()
    answered(engine, PROMPT[:29])
    ask(engine, {"computes": PROMPT[:40], "finds": [*PROMPT[:40], 5], "behind": range(8)})
    if since("0.30.0"):  # hits are longer
        assert steps(engine, 64, 64) == [
            {"computes": 8},
            {"computes": 4, "finds": 8, "behind": 4},
        ]
    else:
        assert steps(engine, 64, 64, 64) == [
            {"computes": 16},
            {"computes": 24},
            {"finds": 4, "behind": 8},
        ]
    assert engine.run()
    assert engine.wrong == []


def test_what_was_computed_before_the_step_is_copied_in_it() -> None:
    engine = make()
    answered(engine, PROMPT[:29])
    ask(engine, {"computes": PROMPT[:40]})
    steps(engine, 16, 12)
    ask(engine, {"finds": [*PROMPT[:32], *range(30)]})
    assert steps(engine, 64) == [{"computes": 4, "finds": 8 if since("0.30.0") else 4}]
    assert engine.run()
    assert engine.wrong == []


def test_nobody_waits_for_an_answer_behind_the_part() -> None:
    engine = make()
    answered(engine, PROMPT[:21])
    engine.ask("answers", PROMPT[:25], max_tokens=4)
    steps(engine, 64, 64, 64)
    ask(engine, {"finds": [*PROMPT[:24], *range(30)]})
    [step] = steps(engine, 64)
    assert set(step) == {"answers", "finds"}


class Stock:
    """A coordinator of a group of states and one of attention, which says what it is asked."""

    enable_partial_hash_hits = True

    def __init__(self) -> None:
        self.block_pool = SimpleNamespace(num_gpu_blocks=100)
        self.calls: list[Any] = []
        self.single_type_managers: list[Any] = []
        for kind in (MambaManager, FullAttentionManager):
            manager = kind.__new__(kind)
            manager.kv_cache_group_id = len(self.single_type_managers)
            manager.block_size = BLOCK
            manager.num_cached_block = {"writes": 2}
            first = 10 * manager.kv_cache_group_id
            blocks = [SimpleNamespace(block_id=first + number) for number in range(6)]
            manager.req_to_blocks = {"writes": blocks}
            self.single_type_managers.append(manager)

    def cache_blocks(self, *args: Any) -> None:  # noqa: ANN401 - whatever it is told
        self.calls.append(args)

    def get_num_blocks_to_allocate(self, *args: Any, **named: Any) -> Any:  # noqa: ANN401 - likewise
        return args, named

    def new_step_starts(self) -> None:
        self.calls.append("new step")


def asked(coordinator: Any, local: int, *, states: int = 0, attention: int = 0) -> Any:  # noqa: ANN401 - of a stand-in
    """What a request is told that finds so many blocks of the one that writes; None: to wait."""
    found = tuple(
        manager.req_to_blocks["writes"][:count]
        for manager, count in zip(
            coordinator.single_type_managers, (states, attention), strict=True
        )
    )
    args = "finds", 90, found, 0, local + 1, local, 90
    said = coordinator.get_num_blocks_to_allocate(*args, apply_admission_cap=True)
    assert said in ((args, {"apply_admission_cap": True}), 101)
    return None if said == 101 else found


@pytest.mark.parametrize("computed", [0, 40])
def test_who_waits(computed: int) -> None:
    """One writes from its third block on, or from the ninth token of it."""
    coordinator = copied_tails.copies_what_is_there(Stock)()
    writes = SimpleNamespace(request_id="writes", num_computed_tokens=computed)
    coordinator.cache_blocks(writes, 75)
    assert coordinator.calls == [(writes, 75)]
    for local in range(4, 96, 4):
        blocks = -(-local // BLOCK)
        begins_inside = local % BLOCK and max(32, computed) < local < 80
        assert (asked(coordinator, local, attention=blocks) is None) is bool(begins_inside)
        assert (asked(coordinator, local, states=1, attention=blocks) is None) is bool(
            begins_inside
        )
        assert asked(coordinator, local, states=blocks) is not None
        assert asked(coordinator, local) is not None
    coordinator.new_step_starts()
    assert coordinator.calls[1:] == ["new step"]
    assert asked(coordinator, 44, attention=3) is not None


def test_who_writes_for_the_first_time_begins_with_its_first_token() -> None:
    coordinator = copied_tails.copies_what_is_there(Stock)()
    for manager in coordinator.single_type_managers:
        manager.num_cached_block.clear()
    coordinator.cache_blocks(SimpleNamespace(request_id="writes", num_computed_tokens=0), 12)
    assert asked(coordinator, 4, attention=1) is None
    assert asked(coordinator, 20, attention=2) is not None


class OfAPlugin(Stock):
    """One that has none of what later releases' have, and no use for it."""

    @property
    def enable_partial_hash_hits(self) -> bool:  # type: ignore[override]
        raise AttributeError


class OfWholeBlocks(Stock):
    enable_partial_hash_hits = False


@pytest.mark.parametrize("stock", [OfWholeBlocks, OfAPlugin])
def test_nobody_waits_where_prefixes_end_with_a_block(stock: type[Stock]) -> None:
    coordinator = copied_tails.copies_what_is_there(stock)()
    coordinator.cache_blocks(SimpleNamespace(request_id="writes", num_computed_tokens=0), 75)
    assert asked(coordinator, 44, attention=3) is not None


def test_the_class_goes_by_its_name() -> None:
    made = copied_tails.copies_what_is_there(Stock)
    assert issubclass(made, Stock)
    assert [made.__name__, made.__module__, made.__doc__] == [
        Stock.__name__,
        Stock.__module__,
        Stock.__doc__,
    ]
