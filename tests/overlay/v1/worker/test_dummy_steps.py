"""Which block tables and buffers a dummy step nulls, and that all else is as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

from tests.support.decode_graphs import GDN, MAMBA2
from tests.support.dummy_steps import NOBODYS, IdleRank
from vllm_overlay.v1.worker.dummy_steps import are_of_vllm, is_nobodys, keep_off_states

ATTENTION, STATES = 0, 1


def busy() -> IdleRank:
    """One whose layers have been told of three requests, and their graph of blocks 9."""
    rank = IdleRank(MAMBA2)
    rank.step(first=(45, 40, 5), second=(45, 40, 6), third=(45, 40, 7))
    rank.told(9)
    return rank


def seen(rank: IdleRank) -> tuple[list[int], list[int], list[int]]:
    """The first blocks of three rows on the device, of attention and of states, and the graph's."""
    tables = [rank.input_batch.block_table[group] for group in (ATTENTION, STATES)]
    attention, states = (table.get_device_tensor(3)[:, 0].tolist() for table in tables)
    return attention, states, rank.builder.state_indices_tensor_d[:3, 0].tolist()


BEFORE = ([5, 6, 7], [5, 6, 7], [9, 9, 9])


class Worker:
    """A plugin's, given as a class."""


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        ("auto", True),
        ("vllm.v1.worker.gpu_worker.Worker", True),
        ("vllm_ascend.worker.worker.NPUWorker", False),
        (Worker, False),
    ],
)
def test_whose_dummy_steps_they_are(worker: object, expected: bool) -> None:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=worker))
    assert are_of_vllm(config) is expected


def test_the_rows_of_the_step_and_all_of_the_graph() -> None:
    rank = busy()
    keep_off_states(rank, 2, CUDAGraphMode.FULL, False)
    assert seen(rank) == ([5, 6, 7], [0, 0, 7], [0, 0, 0])
    assert not rank.builder.state_indices_tensor_d.any()


@pytest.mark.parametrize(
    ("mode", "capturing"),
    [
        (CUDAGraphMode.FULL, True),
        (CUDAGraphMode.PIECEWISE, False),
        (CUDAGraphMode.NONE, False),
    ],
)
def test_elsewhere_all_is_as_it_was(mode: CUDAGraphMode, capturing: bool) -> None:
    rank = busy()
    keep_off_states(rank, 3, mode, capturing)
    assert seen(rank) == BEFORE


def test_the_next_step_is_told_of_its_requests() -> None:
    rank = busy()
    keep_off_states(rank, 3, CUDAGraphMode.FULL, False)
    rank.step(first=(46, 40, 5), second=(46, 40, 6), third=(46, 40, 7))
    assert seen(rank)[:2] == BEFORE[:2]


def test_layers_without_states_are_left_alone() -> None:
    rank = busy()
    kept = SimpleNamespace(state_indices_tensor=torch.ones(3))
    [layers] = rank.attn_groups[STATES]
    spec = rank.kv_cache_config.kv_cache_groups[ATTENTION].kv_cache_spec
    rank.attn_groups[STATES] = []
    rank.attn_groups[ATTENTION] = [
        SimpleNamespace(**vars(layers) | {"kv_cache_spec": spec, "metadata_builders": [kept]})
    ]
    keep_off_states(rank, 3, CUDAGraphMode.FULL, False)
    assert seen(rank) == BEFORE
    assert kept.state_indices_tensor.all()


def test_layers_beside_them_in_their_group_are_passed_over() -> None:
    rank = busy()
    spec = rank.kv_cache_config.kv_cache_groups[ATTENTION].kv_cache_spec
    rank.attn_groups[STATES].insert(0, SimpleNamespace(kv_cache_spec=spec))
    keep_off_states(rank, 3, CUDAGraphMode.FULL, False)
    assert seen(rank) == ([5, 6, 7], [0, 0, 0], [0, 0, 0])


def test_each_part_of_a_step_has_a_builder_and_that_more_buffers() -> None:
    rank = busy()
    blocks, lengths = torch.ones(3), torch.ones(3)
    second = SimpleNamespace(
        state_indices_tensor_d=blocks, state_indices=None, decode_num_accepted_tokens=lengths
    )
    rank.attn_groups[STATES][0].metadata_builders.append(second)
    keep_off_states(rank, 3, CUDAGraphMode.FULL, False)
    assert not blocks.any()
    assert lengths.all()


@pytest.mark.parametrize("layers", [MAMBA2, GDN])
@pytest.mark.parametrize("guesses", [0, 2])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_also_where_a_request_left_within_its_prompt(
    layers: type[Any], guesses: int, rows: int
) -> None:
    """Mamba takes its row for a prompt's then, and tells the graph nothing."""
    rank = IdleRank(layers, guesses=guesses)
    rank.step(first=(45, 40, 5), second=(39, 40, 6))
    rank.step(second=(40, 40, 6), third=(39, 40, 7))
    rank.told(9)
    rank.step()
    assert rank.writes(rows) <= NOBODYS


@pytest.mark.parametrize("guesses", [0, 2])
def test_no_state_is_zeroed_for_a_request_that_left_within_its_first_token(guesses: int) -> None:
    """All ranks would wait for that in each step; one that is real is told of as ever (51565)."""
    pytest.importorskip(
        "vllm_overlay.v1.attention.backends.first_states", reason="0.19.0 to 0.30.0"
    )
    rank = IdleRank(GDN, guesses=guesses)
    layers = rank.compilation_config.static_forward_context.values()
    parts = [part.fill_(1) for layer in layers for part in layer.kv_cache]
    rank.step(first=(0, 40, 5))
    rank.step()
    rank.writes(4)
    assert all(part.all() for part in parts)
    assert not is_nobodys(rank.builder)
