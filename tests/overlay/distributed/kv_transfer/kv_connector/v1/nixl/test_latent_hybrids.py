"""Which ranks of a P with more of them are read, and that each of them hears of it once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.kv_landing import Deployment, Engines
from tests.support.nixl_worker import GroupKind, nixl_of, receive

latent_hybrids = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.latent_hybrids",
    reason="from 0.23.0 to 0.26.0",
)


class NixlPushStandIn(SimpleNamespace):
    """What a worker that pushes goes by: its name."""


@pytest.mark.parametrize(
    ("kind", "use_mla", "states", "one"),
    [
        (SimpleNamespace, True, False, True),
        (SimpleNamespace, True, True, False),
        (SimpleNamespace, False, False, False),
        (SimpleNamespace, False, True, False),
        (NixlPushStandIn, True, True, True),
        (NixlPushStandIn, True, False, True),
        (NixlPushStandIn, False, True, False),
    ],
)
def test_states_are_what_one_rank_does_not_hold(
    kind: Any,  # noqa: ANN401 - a class of stand-ins
    use_mla: bool,
    states: bool,
    one: bool,
) -> None:
    worker = kind(use_mla=use_mla, _has_mamba=states)
    assert latent_hybrids.reads_one_rank(worker) is one


HYBRID: tuple[GroupKind, ...] = ("kda", "full")


@pytest.mark.parametrize("ranks", [(2, 1), (4, 2), (1, 2), (2, 2)])
@pytest.mark.parametrize("groups", [("full",), HYBRID])
def test_as_many_ranks_are_read_as_hold_a_part(
    groups: tuple[GroupKind, ...], ranks: tuple[int, int]
) -> None:
    engines = Engines(Deployment(4, 4, groups=groups, mla=True, ranks=ranks))
    engines.connect()
    assert engines.faults_of_a_prompt(29) == []
    nixl = nixl_of(engines.decode)
    sources = max(1, ranks[0] // ranks[1])
    assert len(nixl.reads) == (sources if groups == HYBRID else 1)
    assert list(nixl.heard.values()) == [[f"req-p:{ranks[1]}".encode()]] * sources


@pytest.mark.parametrize("groups", [("full",), HYBRID])
def test_who_is_not_read_is_told_as_often(groups: tuple[GroupKind, ...]) -> None:
    engines = Engines(Deployment(4, 4, groups=groups, mla=True, ranks=(2, 1)))
    engines.connect()
    receive(engines.decode, local_blocks=[], remote_blocks=[[1]] * len(groups), tp_size=2)
    nixl = nixl_of(engines.decode)
    assert nixl.reads == []
    assert list(nixl.heard.values()) == [[b"req-p:1"]] * 2
