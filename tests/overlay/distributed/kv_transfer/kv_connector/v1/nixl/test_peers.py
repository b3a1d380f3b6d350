"""Which peers a list of them allows, and that without one everything is as on stock."""

from __future__ import annotations

import ipaddress
import socket
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.regressions.test_k17 import engine_with, stranger
from tests.support.lying_params import GOOD
from tests.support.nixl_release import NixlConnectorScheduler
from tests.support.nixl_worker import make_kv_cache_config, make_vllm_config
from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.peers import (
    Peers,
    allowed_peers,
    peer_not_allowed,
)

assert stranger  # a fixture


@pytest.mark.parametrize(
    ("entry", "allowed", "refused"),
    [
        ("10.8.0.0/16", ["10.8.255.255:1"], ["10.9.0.0:1", "a10.8.0.1:1", "localhost:1"]),
        ("10.8.0.1", ["10.8.0.1:65535", "::ffff:10.8.0.1:1"], ["10.8.0.2:1", "10.8.1:1"]),
        ("10.8.0.1:5600", ["10.8.0.1:5600"], ["10.8.0.1:5601", "10.8.0.2:5600"]),
        ("10.8.0.0/16:5600-5602", ["10.8.1.1:5602"], ["10.8.1.1:5603", "10.8.1.1:5599"]),
        ("fd00::/8", ["fd00::1:5600"], ["fe80::1:5600", "10.8.0.1:5600"]),
        ("[fd00::1]:5600", ["fd00::1:5600", "[fd00::1]:5600"], ["fd00::1:5601", "[fd00::2]:5600"]),
        ("prefill-0", ["prefill-0:65535", "PREFILL-0.:1"], ["prefill-0.svc:1", "xprefill-0:1"]),
        ("Prefill-0.svc.", ["prefill-0.svc:1"], ["svc:1", "prefill-1.svc:1"]),
        ("*.p.svc:5600", ["p-0.p.svc:5600", "a.b.p.svc:5600"], ["p.svc:5600", "xp.svc:5600"]),
        # As a P may announce itself, and vLLM connects to it.
        ("fd00::/8", ["[fd00::1]:1"], ["[fe80::1]:1", "[fd00::1:1", "[[fd00::1]]:1", "[]:1"]),
        # A form of an address that only those who connect understand, and ZMQ's own syntax.
        ("127.0.0.0/8", ["127.0.0.1:1"], ["127.1:1", "2130706433:1", "0x7f.1:1", " 127.0.0.1:1"]),
        ("*.p.svc", ["a.p.svc:1"], ["evil:1;a.p.svc:1", "evil/a.p.svc:1", "*.p.svc:1", ".p.svc:1"]),
        ("0.0.0.0/0", ["1.2.3.4:1"], ["::1:1", "host:1"]),
    ],
)
def test_an_entry(entry: str, allowed: list[str], refused: list[str]) -> None:
    peers = Peers("nobody.example", entry)
    for peer in [*allowed, *refused]:
        host, _, port = peer.rpartition(":")
        assert peers.allow(host, int(port)) == (peer in allowed), peer


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "*",
        "*.",
        "*.1",
        "a.*.b",
        "a b",
        "x/24",
        "127.1",
        "10.8.0.1/16",
        "10.8.0.0/33",
        "host:",
        "host:0",
        "host:65536",
        "host:0-9",
        "host:9-65536",
        "host:9-8",
        "host:x",
        "http://host",
        "[host]:1",
        "[fd00::1",
    ],
)
def test_what_is_no_entry_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match="allowed_peers has") as error:
        Peers("10.8.0.1", entry)
    assert repr(entry) in str(error.value)


@given(st.ip_addresses(), st.integers(1, 65535), st.data())
def test_a_network_allows_its_own_addresses(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int, data: st.DataObject
) -> None:
    known = data.draw(st.integers(0, address.max_prefixlen))
    network = ipaddress.ip_network((address, known), strict=False)
    other = data.draw(st.ip_addresses(v=address.version))
    mapped = isinstance(other, ipaddress.IPv6Address) and other.ipv4_mapped is not None
    if not mapped:
        assert Peers(str(network)).allow(str(other), port) == (other in network)


@given(st.text(max_size=30), st.integers(1, 65535))
def test_nothing_that_a_client_says_ends_the_check(host: str, port: int) -> None:
    assert Peers("10.8.0.1", "*.svc").allow(host, port) in (True, False)
    assert not Peers().allow(host, port)


def scheduler_with(**extra: object) -> NixlConnectorScheduler:
    config = make_vllm_config(extra_config=extra)
    return NixlConnectorScheduler(config, "D", make_kv_cache_config())


def test_without_a_list_everybody_is_allowed_and_a_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = scheduler_with()
    assert peer_not_allowed(side, GOOD) is None
    assert len([r for r in caplog.records if "allowed_peers" in r.getMessage()]) == 1


@pytest.mark.parametrize("bad", ["10.8.0.1", {"10.8.0.1": 5600}, [5600], True, ["x/24"]], ids=repr)
def test_an_engine_with_a_bad_list_does_not_start(bad: object) -> None:
    with pytest.raises(ValueError, match=r"kv_connector_extra_config\.allowed_peers"):
        scheduler_with(allowed_peers=bad)


def test_a_bad_option_of_the_workers_is_found_out_before_they_are() -> None:
    with pytest.raises(ValueError, match=r"kv_connector_extra_config\.max_handshake_wait"):
        scheduler_with(allowed_peers=[], max_handshake_wait="soon")


@pytest.mark.parametrize("nobody", [[], ()])
def test_an_empty_list_allows_nobody(nobody: list[str] | tuple[str, ...]) -> None:
    config = make_vllm_config(extra_config={"allowed_peers": nobody}).kv_transfer_config
    assert allowed_peers(config)
    side = scheduler_with(allowed_peers=[])
    problem = peer_not_allowed(side, GOOD)
    assert problem is not None and problem.field == "remote_host"
    assert peer_not_allowed(side, {"do_remote_decode": True, "remote_host": None}) is None


def test_a_scheduler_without_its_constructor_allows_everybody() -> None:
    assert peer_not_allowed(SimpleNamespace(), GOOD) is None


def test_who_is_named_is_connected_to(stranger: socket.socket) -> None:
    engine = engine_with("127.0.0.0/8", remote_port=stranger.getsockname()[1])
    engine.step()
    stranger.accept()[0].close()
    assert engine.run(20.0)


@pytest.mark.parametrize(("entry", "tokens"), [("127.0.0.0/8", 40), ("10.8.0.0/16", 0)])
def test_who_has_prefill_servers_push_registers_with_those_that_are_named(
    entry: str, tokens: int
) -> None:
    push = pytest.importorskip(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler",
        reason="from 0.24.0 on",
    )
    config = make_vllm_config(
        connector="NixlPushConnector", extra_config={"allowed_peers": [entry]}
    )
    side = push.NixlPushConnectorScheduler(config, "D", make_kv_cache_config())
    request = Request("request", list(range(40)), SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = {**GOOD, "remote_host": "127.0.0.1"}
    assert side.get_num_new_matched_tokens(request, 0)[0] == tokens
    assert taken() == ({} if tokens else {"PEER_NOT_ALLOWED": 1})


def test_who_is_not_named_is_counted_as_such() -> None:
    engine = engine_with("10.8.0.0/16", remote_port=1)
    engine.step()
    assert taken() == {"PEER_NOT_ALLOWED": 1}
