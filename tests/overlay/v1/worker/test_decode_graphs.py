"""Which steps run as those of decodes, and that those that are do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from tests.regressions.test_47123 import GUESSED, GUESSES, LAYERS, PARTS
from tests.support.decode_engine import DecodeEngine
from tests.support.decode_graphs import Row, graph_reads
from tests.support.hybrid_engine import engine_of
from vllm_overlay.v1.worker.decode_graphs import decodes_alone


def decided(*rows: Row, states: bool = True, together: bool = False) -> bool | None:
    """What the shape of a step may say."""
    engine = engine_of(DecodeEngine, mode="none") if states else DecodeEngine()
    for group in engine.worker.kv_cache_config.kv_cache_groups if together else ():
        spec = group.kv_cache_spec
        group.kv_cache_spec = UniformTypeKVCacheSpecs(spec.block_size, {"layer": spec})
    runner: Any = SimpleNamespace(
        kv_cache_config=engine.worker.kv_cache_config,
        input_batch=SimpleNamespace(
            num_reqs=len(rows),
            # There is room for more requests than the batch has.
            num_computed_tokens_cpu=np.array([*(row.computed for row in rows), 0, 0]),
        ),
    )
    step = SchedulerOutput.make_empty()
    step.num_scheduled_tokens = {str(n): row.tokens for n, row in enumerate(rows)}
    step.total_num_scheduled_tokens = sum(row.tokens for row in rows)
    step.scheduled_spec_decode_tokens = {
        str(n): [0] * row.guesses for n, row in enumerate(rows) if row.guesses
    }
    return decodes_alone(runner, step)


@pytest.mark.parametrize(
    "rows",
    [
        [GUESSED],
        [GUESSED, GUESSED],
        [Row(39, 40), Row(45, 40)],
        [Row(1, 2)],
        [GUESSED, Row(39, 40, 1 + GUESSES, GUESSES)],  # a tail with places for guesses
        [Row(45, 40), GUESSED],  # whose shape is none of decodes
    ],
)
def test_of_decodes_the_shape_says(rows: list[Row]) -> None:
    assert decided(*rows) is None


def test_layers_that_have_one_specification_together_are_looked_into() -> None:
    """As those of a group whose pages lie in a row."""
    part = next(iter(PARTS.values()))
    assert decided(*part, together=True) is False


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_prompt_makes_it_none_of_decodes(part: str) -> None:
    assert decided(*PARTS[part]) is False
    assert decided(GUESSED, *PARTS[part]) is False


def test_a_request_without_a_state_does_so_too() -> None:
    assert decided(Row(0, 2)) is False
    assert decided(Row(45, 40), Row(0, 2)) is False
    assert decided(GUESSED, Row(0, 1, 1 + GUESSES, GUESSES)) is False


@pytest.mark.parametrize("part", PARTS)
def test_without_states_all_is_as_on_stock(part: str) -> None:
    assert decided(*PARTS[part], states=False) is None


@pytest.mark.parametrize("layers", LAYERS)
def test_decodes_keep_their_graph(layers: type) -> None:
    assert graph_reads(layers, GUESSED, GUESSED, guesses=GUESSES) == [1, 2]
    assert graph_reads(layers, Row(45, 40), Row(46, 40)) == [1, 2]


@pytest.mark.parametrize("layers", LAYERS)
def test_a_received_prompt_keeps_it(layers: type) -> None:
    """Where D does not guess: its last token is computed beside others that decode."""
    assert graph_reads(layers, Row(45, 40), Row(39, 40)) == [1, 2]


@pytest.mark.parametrize("layers", LAYERS)
def test_a_part_of_a_prompt_does_not(layers: type) -> None:
    for rows in PARTS.values():
        assert graph_reads(layers, *rows, guesses=GUESSES) is None
    assert graph_reads(layers, Row(0, 2)) is None
