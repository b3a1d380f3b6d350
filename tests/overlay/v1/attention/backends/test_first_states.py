"""Which states are zeroed before a step, and that all others are left as they were."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import gdn_attn

from tests.regressions.test_51565 import BEFORE, CASES, begins_with, told_of
from tests.support.decode_engine import DecodeEngine
from tests.support.harness import building
from tests.support.hybrid_engine import engine_of, speculate, states_of
from tests.support.release import since
from tests.support.step_rows import step, without_kernels

first_states = pytest.importorskip(
    "vllm_overlay.v1.attention.backends.first_states", reason="0.19.0 to 0.30.0"
)

FIRST = [(40, 1), (0, 1)]


def zeroed(*rows: tuple[int, int], **changes: Any) -> list[int]:  # noqa: ANN401
    """The blocks of states that are zero after a step of these rows has been told."""
    _, parts = told_of(rows, **changes)
    [found] = {
        tuple(block for block in range(len(part)) if not part[block].any()) for part in parts
    }
    for part in parts:
        assert set(part.unique().tolist()) <= {0, BEFORE}
    return list(found)


@building("what a gated delta net is told of a step with guesses")
def zeroed_with_guesses(
    guesses: int, rows: list[tuple[int, int, bool]], places: torch.Tensor
) -> list[torch.Tensor]:
    """The parts of the layer's states after such a step has been told."""
    engine = engine_of(DecodeEngine, mode="none")
    config = engine.worker.vllm_config
    speculate(config, guesses)
    group = states_of(engine)
    parts = [torch.full((64, 3, 4), BEFORE), torch.full((64, 2, 2, 2), BEFORE)]
    layers = {name: SimpleNamespace(kv_cache=parts) for name in group.layer_names}
    config.compilation_config.static_forward_context.update(layers)
    builder = gdn_attn.GDNAttentionMetadataBuilder(
        group.kv_cache_spec, group.layer_names, config, torch.device("cpu")
    )
    accepted = torch.ones(len(rows), dtype=torch.int32)
    with without_kernels(builder):
        builder.build(
            0,
            step(*rows, columns=1 + guesses),
            num_accepted_tokens=accepted,
            num_decode_draft_tokens_cpu=places,
        )
    return parts


def test_the_block_of_a_first_token_and_no_other() -> None:
    assert zeroed(*FIRST) == [2]
    assert zeroed((0, 1), (40, 1), (0, 1)) == [1, 3]


@pytest.mark.parametrize("row", [(40, 1), (1, 1), (16, 1), (0, 2), (0, 12), (4, 12), (0, 0)])
def test_no_other_row_is_a_first_token(row: tuple[int, int]) -> None:
    assert zeroed((40, 1), row) == []


@pytest.mark.parametrize("guesses", [1, 3])
def test_places_for_guesses_do_not_hide_a_first_token(guesses: int) -> None:
    """From 0.25.0 on a request that joins has as many as those that run."""
    row = 1 + guesses
    rows = [(40, row, False), (0, row, True), (0, row, True), (8, row, True), (0, 12, True)]
    places = torch.tensor([guesses, guesses, -1, guesses, 0], dtype=torch.int32)
    parts = zeroed_with_guesses(guesses, rows, places)
    first = {1 + row}  # the second row's first block; the third is a prompt of as many tokens
    for part in parts:
        assert {block for block in range(len(part)) if not part[block].any()} == first


def test_a_builder_is_made_and_told_as_on_stock() -> None:
    class Builder:
        def __init__(self, *args: object, **named: object) -> None:
            self.made: object = (args, named)
            self.vllm_config: object = None

        def build(self, *args: object, **named: object) -> object:
            return args, named

    builder = first_states.begins_from_nothing(Builder)("spec", ["a layer"], "config", device="cpu")
    assert builder.made == (("spec", ["a layer"], "config"), {"device": "cpu"})
    common = step((40, 1, False))
    told = builder.build(7, common, "accepted", None, True, more=1)
    assert told == ((7, common, "accepted", None, True), {"more": 1})
    states = torch.ones(3, 2)
    layers = {"a layer": SimpleNamespace(kv_cache=[states])}
    compiled = SimpleNamespace(static_forward_context=layers)
    parallel = SimpleNamespace(worker_cls="plugin.worker.Worker")
    builder.vllm_config = SimpleNamespace(compilation_config=compiled, parallel_config=parallel)
    builder.build(7, step((40, 1, False), (0, 1, True)))
    assert states.min() == 1  # it may be a dummy step of the plugin's
    parallel.worker_cls = "auto"
    builder.build(7, step((40, 1, False), (0, 1, True)))
    assert states.tolist() == [[1, 1], [1, 1], [0, 0]]


def test_rows_of_a_capture_or_a_dummy_step_are_none() -> None:
    assert zeroed((0, 1), (0, 1), is_prefilling=torch.tensor([False, False])) == []
    assert zeroed((0, 1), (0, 1), is_prefilling=torch.tensor([True, False])) == [1]


def test_a_part_of_a_step_that_does_not_say_who_is_a_prompt_is_as_on_stock() -> None:
    assert zeroed(*FIRST, is_prefilling=None) == []


def test_without_lengths_on_the_host_all_is_as_on_stock() -> None:
    assert zeroed(*FIRST, _seq_lens_cpu=None, seq_lens_cpu_upper_bound=None) == []


def test_with_asynchronous_guesses_the_bound_is_enough() -> None:
    if not since("0.20.0"):
        pytest.skip("nothing bounds them there")
    assert zeroed(*FIRST, _seq_lens_cpu=None, _num_computed_tokens_cpu=None) == [2]


def test_what_the_step_is_told_is_what_stock_tells() -> None:
    """It stays a decode's row."""
    told, _ = told_of(FIRST)
    assert (told.num_decodes, told.num_prefills) == (2, 0)


@pytest.mark.parametrize("rows", CASES, ids=" ".join)
def test_kimi_k3_keeps_its_own_metadata(
    rows: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not since("0.27.0"):
        pytest.skip("from 0.27.0 on")
    module = importlib.import_module("vllm.models.kimi_k3.nvidia.kda_metadata")
    # As in the other builder's module: only kernels want to know it, and it needs a device.
    monkeypatch.setattr(module, "compute_causal_conv1d_metadata", lambda *_, **__: [None] * 3)
    told, parts = told_of(list(rows.values()), module.KimiK3KDAMetadataBuilder)
    for number, (computed, _) in enumerate(rows.values()):
        assert begins_with(told, parts, number) == (BEFORE if computed else 0)
