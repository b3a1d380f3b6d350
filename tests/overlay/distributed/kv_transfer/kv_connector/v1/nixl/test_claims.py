"""Who may use the blocks of a peer's request: the ledger, and the scheduler's door."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import claims as module
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.claims import (
    Claim,
    Claims,
    ClaimsBlocks,
    Source,
    claim_offered,
    may_release,
    source_of,
)

SOURCE = Source("P", "at-p")
OFFER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": SOURCE.engine_id,
    "remote_request_id": SOURCE.request_id,
    "remote_host": "h",
    "remote_port": 1,
    "remote_num_tokens": 20,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "transfer_mode": "pull",
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time; a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


class Nixl(ClaimsBlocks):
    """The scheduler's side of a connector that has claims."""

    __module__ = "vllm.nixl"

    def __init__(self, **scheduler: float) -> None:
        self.connector_scheduler: Any = SimpleNamespace(**scheduler)


def scheduler(connector: object, **params: Any) -> Any:  # noqa: ANN401 - a stand-in
    """A scheduler that has these requests, id -> parameters."""
    requests = {name: SimpleNamespace(kv_transfer_params=value) for name, value in params.items()}
    return SimpleNamespace(connector=connector, requests=requests)


def request(name: str, params: object, *, abort: bool = False) -> Any:  # noqa: ANN401
    return SimpleNamespace(request_id=name, kv_transfer_params=params, abort_immediately=abort)


def test_the_first_keeps_them() -> None:
    claims = Claims(480)
    assert claims.claim(SOURCE, "a") is Claim.GRANTED
    assert claims.claim(SOURCE, "b") is Claim.TAKEN
    assert claims.claim(SOURCE, "a") is Claim.HELD
    assert claims.claim(Source("P", "other"), "b") is Claim.GRANTED
    assert claims.claim(Source("Pat-p", ""), "b") is Claim.GRANTED  # not the same two ids
    assert len(claims) == 3


def test_ids_cost_the_same_whatever_they_are() -> None:
    claims = Claims(480)
    assert claims.claim(Source("P" * 5_000_000, "\udcff"), "x" * 5_000_000) is Claim.GRANTED
    ((key, (name, _)),) = claims._claims.items()
    assert len(key) == len(name) == 16


def test_what_is_younger_than_the_lease_is_never_forgotten(clock: list[float]) -> None:
    claims = Claims(lease=100, capacity=3)
    for name in "abc":
        assert claims.claim(Source("P", name), name) is Claim.GRANTED
        clock[0] += 10
    assert claims.complete
    assert claims.claim(Source("P", "d"), "d") is Claim.UNRECORDED
    assert not claims.complete
    assert [claims.claim(Source("P", name), "again") for name in "abc"] == [Claim.TAKEN] * 3
    clock[0] += 75  # 105 s after a, 95 s after b
    assert claims.claim(Source("P", "d"), "d") is Claim.GRANTED
    assert claims.claim(Source("P", "e"), "e") is Claim.UNRECORDED
    assert [claims.claim(Source("P", name), "again") for name in "bcd"] == [Claim.TAKEN] * 3
    assert len(claims) == 3


@pytest.mark.parametrize(
    "params",
    [
        None,
        7,
        {},
        {"do_remote_decode": True},
        {**OFFER, "do_remote_prefill": False},
        {**OFFER, "remote_engine_id": 7},
        {**OFFER, "remote_request_id": None},
    ],
)
def test_who_asks_for_nothing_claims_nothing(params: object) -> None:
    assert source_of(params) is None
    nixl, asking = Nixl(), request("a", params)
    claim_offered(scheduler(nixl), asking)
    assert asking.kv_transfer_params is params
    assert len(nixl.claims) == 0


def test_who_comes_second_is_offered_nothing() -> None:
    door = scheduler(Nixl())
    first, second = request("a", dict(OFFER)), request("b", {**OFFER, "lmcache.tag": "x"})
    claim_offered(door, first)
    claim_offered(door, second)
    assert first.kv_transfer_params == OFFER
    assert second.kv_transfer_params == {"lmcache.tag": "x"}  # another connector's
    third = request("c", dict(OFFER))
    claim_offered(door, third)
    assert third.kv_transfer_params is None
    assert taken() == {"USED_TWICE": 2}


@pytest.mark.parametrize("open_session", [True, False])
def test_the_same_id_again(open_session: bool) -> None:
    """Further input to a session, or, with the ids of clients as they are, a request sent again."""
    door = scheduler(Nixl())
    first, second = request("a", dict(OFFER)), request("a", dict(OFFER))
    claim_offered(door, first)
    if open_session:
        door.requests["a"] = first
    claim_offered(door, second)
    assert second.kv_transfer_params == (OFFER if open_session else None)


def test_a_prefill_stays_one() -> None:
    """It was offered blocks from an earlier turn; without them it prefills all."""
    offer = {**OFFER, "do_remote_prefill": False, "do_remote_decode": True}
    door = scheduler(Nixl(is_bidirectional_kv_xfer_enabled=True))
    first, second = request("a", offer), request("b", dict(offer))
    claim_offered(door, first)
    claim_offered(door, second)
    assert first.kv_transfer_params is offer
    assert second.kv_transfer_params["do_remote_decode"] is True
    assert source_of(second.kv_transfer_params) is None


@pytest.mark.parametrize("side", [{}, {"is_bidirectional_kv_xfer_enabled": False}])
def test_a_prefill_that_reads_nothing_claims_nothing(side: dict[str, bool]) -> None:
    offer = {**OFFER, "do_remote_prefill": False, "do_remote_decode": True}
    door = scheduler(Nixl(**side))
    for name in "ab":
        claim_offered(door, asked := request(name, offer))
        assert asked.kv_transfer_params is offer
    assert taken() == {}


def test_a_release_and_a_reader_exclude_each_other() -> None:
    for reads_first in (True, False):
        door = scheduler(Nixl())
        reader = request("r", dict(OFFER))
        if reads_first:
            claim_offered(door, reader)
        assert may_release(door, SOURCE, "s") is not reads_first
        if not reads_first:
            claim_offered(door, reader)
        assert (reader.kv_transfer_params == OFFER) is reads_first
        stand_in = request("s", dict(OFFER), abort=True)
        claim_offered(door, stand_in)
        assert (stand_in.kv_transfer_params == OFFER) is not reads_first


def test_a_reader_whose_claim_is_not_on_record_keeps_its_blocks(clock: list[float]) -> None:
    nixl = Nixl()
    nixl.claims = Claims(lease=10, capacity=1)
    reading = {**OFFER, "do_remote_prefill": False}  # as NIXL leaves it while the read goes on
    door = scheduler(nixl, r=reading)
    nixl.claims.claim(SOURCE, "r")
    clock[0] += 11
    nixl.claims.claim(Source("P", "other"), "o")  # r's claim is forgotten
    clock[0] += 11
    assert not may_release(door, SOURCE, "s")
    clock[0] += 11
    door.requests.clear()  # it has ended, and has told P
    assert may_release(door, Source("P", "third"), "t")


def test_no_room_no_release(clock: list[float]) -> None:
    nixl = Nixl()
    nixl.claims = Claims(lease=10, capacity=1)
    door = scheduler(nixl)
    nixl.claims.claim(Source("P", "other"), "o")
    reader, stand_in = request("r", dict(OFFER)), request("s", dict(OFFER), abort=True)
    claim_offered(door, stand_in)
    assert stand_in.kv_transfer_params is None
    claim_offered(door, reader)
    assert reader.kv_transfer_params == OFFER  # served, as by stock


class Offloading:
    """Another of vLLM's own."""

    __module__ = "vllm.offloading"


@pytest.mark.parametrize(
    "connector",
    [None, object(), Offloading(), SimpleNamespace(_connectors=[object(), Offloading()])],
)
def test_other_connectors_have_no_claims(connector: object) -> None:
    door = scheduler(connector)
    for name in "ab":
        asking = request(name, dict(OFFER))
        claim_offered(door, asking)
        assert asking.kv_transfer_params == OFFER
    assert not may_release(door, SOURCE, "s")


class OfAPlugin(Nixl):
    """Derived by somebody else: its requests may share what they read."""

    __module__ = "plugin.nixl"


def test_a_plugins_connector_has_no_claims() -> None:
    door = scheduler(OfAPlugin())
    for name in "ab":
        claim_offered(door, asking := request(name, dict(OFFER)))
        assert asking.kv_transfer_params == OFFER
    assert not may_release(door, SOURCE, "s")


def test_one_of_several_connectors_has_claims() -> None:
    nixl = Nixl()
    door = scheduler(SimpleNamespace(_connectors=[Offloading(), OfAPlugin(), nixl]))
    assert may_release(door, SOURCE, "s")
    assert len(nixl.claims) == 1


def test_the_longest_lease_counts(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    monkeypatch.setattr(module, "envs", SimpleNamespace(VLLM_NIXL_ABORT_REQUEST_TIMEOUT=7))
    for fields, lease in (
        ({}, 7),
        ({"_kv_lease_duration": 30}, 30),
        ({"_kv_lease_duration": 30, "decoder_kv_blocks_ttl": 480}, 480),
        # Of a template, say; stock does not look at it where D keeps no blocks.
        ({"_kv_lease_duration": 30, "decoder_kv_blocks_ttl": "480"}, 30),
        ({"_kv_lease_duration": 30, "decoder_kv_blocks_ttl": None}, 30),
    ):
        assert Nixl(**fields).claims._lease == lease


def test_the_ledger_is_bounded() -> None:
    claims = Claims(480)
    for number in range(module.MAX_CLAIMS + 10):
        claims.claim(Source("P", f"cmpl-{number}"), f"d-{number}")
    assert len(claims) == module.MAX_CLAIMS


@pytest.mark.parametrize(("age", "answer"), [(99.5, Claim.UNRECORDED), (100, Claim.GRANTED)])
def test_a_claim_is_kept_until_the_lease_is_over(
    clock: list[float], age: float, answer: Claim
) -> None:
    claims = Claims(lease=100, capacity=1)
    claims.claim(SOURCE, "a")
    clock[0] += age
    assert claims.claim(Source("P", "other"), "b") is answer


def test_what_a_release_does_not_have_makes_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "envs", SimpleNamespace())
    assert Nixl().claims._lease == 0


def test_a_request_of_a_release_without_stand_ins_is_a_reader(clock: list[float]) -> None:
    """Where there is no room for its claim it reads, as on stock."""
    nixl = Nixl()
    nixl.claims = Claims(lease=10, capacity=1)
    nixl.claims.claim(Source("P", "other"), "o")
    reader: Any = SimpleNamespace(request_id="r", kv_transfer_params=dict(OFFER))
    claim_offered(scheduler(nixl), reader)
    assert reader.kv_transfer_params == OFFER


def test_who_holds_them_may_give_them_up() -> None:
    reader = request("r", dict(OFFER))
    door = scheduler(Nixl(), r=reader.kv_transfer_params)
    claim_offered(door, reader)
    assert may_release(door, SOURCE, "r")


@pytest.mark.parametrize(
    ("params", "free"),
    [
        (None, True),
        ({}, True),
        ({**OFFER, "remote_engine_id": "Q"}, True),
        ({**OFFER, "remote_request_id": "another"}, True),
        (dict(OFFER), False),
    ],
)
def test_who_else_reads_is_asked_himself_once_a_claim_may_be_missing(
    params: dict[str, Any] | None, free: bool
) -> None:
    nixl = Nixl()
    nixl.claims = Claims(lease=0, capacity=1)
    nixl.claims.complete = False
    assert may_release(scheduler(nixl, r=params), SOURCE, "s") is free


def test_a_prefill_that_is_offered_nothing_keeps_the_rest() -> None:
    door = scheduler(Nixl())
    offer = {**OFFER, "do_remote_decode": True, "lmcache.tag": "x"}
    first, second = request("a", dict(offer)), request("b", dict(offer))
    claim_offered(door, first)
    claim_offered(door, second)
    assert first.kv_transfer_params == offer
    assert second.kv_transfer_params == {
        **offer,
        "do_remote_prefill": False,
        "remote_block_ids": None,
    }
