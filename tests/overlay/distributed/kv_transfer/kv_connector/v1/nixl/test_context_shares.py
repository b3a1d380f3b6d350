"""Whom a rank that holds a share of the tokens reads, and what it says of itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from vllm.config import ModelConfig

from tests.support.kv_landing import Deployment, Engines
from tests.support.nixl_release import NixlAgentMetadata
from tests.support.nixl_worker import context_rank, make_worker, peer_metadata

shares = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.context_shares",
    reason="up to 0.28.0",
)


def said(worker: Any) -> dict[str, Any]:  # noqa: ANN401 - a worker
    """What a worker's handshake says, as a stock peer hears it."""
    fields: dict[str, Any] = msgspec.msgpack.decode(
        worker.xfer_handshake_metadata.agent_metadata_bytes
    )
    return fields


@pytest.mark.parametrize(
    ("rank", "context", "share"),
    [
        (1, (1, 1), [0, 1, 1]),
        (1, (1, 4), [0, 1, 1]),
        (1, (2, 4), [1, 2, 4]),
        (3, (2, 1), [1, 2, 1]),
    ],
)
def test_what_a_rank_says(rank: int, context: tuple[int, int], share: list[int]) -> None:
    worker = make_worker(mla=True, tp_size=4, tp_rank=rank, context=context)
    assert said(worker)["context_share"] == share


def test_a_stock_peer_passes_over_it() -> None:
    worker = make_worker(mla=True, tp_size=2, context=(2, 1))
    stock = dataclasses.make_dataclass(
        "Stock",
        [
            (one.name, one.type)
            if one.default is dataclasses.MISSING
            else (one.name, one.type, one)
            for one in dataclasses.fields(NixlAgentMetadata)
            if one.name != "context_share"
        ],
        namespace={"__module__": NixlAgentMetadata.__module__},
    )
    data = worker.xfer_handshake_metadata.agent_metadata_bytes
    heard = msgspec.msgpack.decode(data, type=stock)
    assert not hasattr(heard, "context_share")
    assert vars(msgspec.msgpack.decode(data, type=NixlAgentMetadata)) == {
        **vars(heard),
        "context_share": (0, 2, 1),
    }


def test_of_who_does_not_say_it_nothing_is_known() -> None:
    fields = said(make_worker(mla=True, tp_size=2, context=(2, 1)))
    del fields["context_share"]
    assert msgspec.convert(fields, NixlAgentMetadata).context_share is None


@pytest.mark.parametrize(
    ("ranks", "prefill", "decode"),
    [
        ((2, 2), (2, 1), (2, 1)),
        ((4, 4), (4, 4), (4, 4)),
        ((4, 4), (2, 2), (2, 2)),
        ((2, 4), (1, 1), (1, 1)),
        ((4, 2), (1, 1), (1, 4)),  # of no account without sharers
        ((6, 2), (2, 1), (2, 1)),  # D's rank 1 reads P's rank 3, which holds the same
    ],
)
@pytest.mark.parametrize("split", [1, 2])
def test_equal_shares_are_read_rightly(
    ranks: tuple[int, int], prefill: tuple[int, int], decode: tuple[int, int], split: int
) -> None:
    deployment = Deployment(
        1, 1, mla=True, ranks=ranks, context=(prefill, decode), split=split, kernel=4
    )
    for rank in range(ranks[1]):
        for hit in (0, 1):
            engines = Engines(deployment, decode_rank=rank)
            engines.connect()
            assert engines.faults_of_a_prompt(61, hit if split == 1 else 0) == []


def test_also_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "get_total_num_kv_heads", lambda _: 4)
    for rank in range(8):
        engines = Engines(
            Deployment(1, 1, ranks=(8, 8), context=((2, 1), (2, 1))), decode_rank=rank
        )
        engines.connect()
        assert engines.faults_of_a_prompt(61, 1) == []


OURS: dict[str, Any] = {"mla": True, "tp_size": 2, "tp_rank": 1, "context": (2, 4)}


def refusal(worker: Any, share: Any, rank: int = 1, ranks: int = 2) -> str:  # noqa: ANN401
    """How a peer's rank is refused; empty if it is not."""
    peer = peer_metadata(worker, "P", rank, ranks, context_share=share)
    with context_rank(
        worker.tp_rank, worker.vllm_config.parallel_config.decode_context_parallel_size
    ):
        try:
            shares.refuse_other_share(worker, peer, rank, ranks)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("share", [(0, 2, 4), (1, 3, 4), (1, 2, 2), (0, 1, 1)])
def test_one_number_makes_another_share(share: tuple[int, int, int]) -> None:
    worker = make_worker(**OURS)
    assert refusal(worker, (1, 2, 4)) == ""
    assert refusal(worker, None) == ""
    assert "Start prefill and decode with the same" in refusal(worker, share)


def test_only_the_rank_that_is_read_is_refused() -> None:
    worker = make_worker(**OURS)
    assert [rank for rank in range(6) if refusal(worker, (0, 2, 4), rank, 6)] == [3]
    assert [rank for rank in range(1) if refusal(worker, (0, 2, 4), rank, 1)] == [0]


def test_the_refusal_says_who_holds_what() -> None:
    worker = make_worker(**OURS)
    assert refusal(worker, (0, 1, 1)).startswith(
        "NIXL handshake: rank 1 of engine P holds all tokens, and rank 1 of this engine, which "
        "would read it, share 1 of 2 (in a row: 4). "
    )


def test_who_pushes_is_as_on_stock() -> None:
    worker = make_worker(**OURS)
    worker._TRANSFER_MODE = "push"
    assert refusal(worker, (0, 1, 1)) == ""


def test_who_is_refused_leaves_nothing_behind() -> None:
    engines = Engines(Deployment(1, 1, mla=True, ranks=(2, 2), context=((2, 1), (1, 1))))
    before = {name: repr(value) for name, value in vars(engines.decode).items()}
    with pytest.raises(RuntimeError, match="the same --tensor-parallel-size"):
        engines.connect()
    after = {name: repr(value) for name, value in vars(engines.decode).items()}
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed <= {"_engines_in_handshake", "_handshake_line"}
