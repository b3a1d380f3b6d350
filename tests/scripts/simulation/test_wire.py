"""NIXL's stand-in keeps what NIXL promises, and notices what NIXL forbids."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.simulation.clock import Place
from tests.simulation.wire import Agent, Read, Wire, WireError, descriptors

SIZE = 4


class Side:
    """An agent with four blocks of memory."""

    def __init__(self, wire: Wire, engine: str, content: bytes) -> None:
        self.agent = wire.agent(Place(engine, 0))
        self.memory = ctypes.create_string_buffer(content, len(content))
        self.start = ctypes.addressof(self.memory)
        self.agent.register_memory([(self.start, len(content), 0, "")])

    def blocks(self) -> list[tuple[int, int, int]]:
        return [(self.start + i * SIZE, SIZE, 0) for i in range(len(self.memory) // SIZE)]

    @property
    def content(self) -> bytes:
        return self.memory.raw


class Pair:
    def __init__(self) -> None:
        self.wire = Wire()
        self.p = Side(self.wire, "P", b"aaaabbbbccccdddd")
        self.d = Side(self.wire, "D", b"................")
        reader = self.reader
        name = reader.add_remote_agent(self.p.agent.get_agent_metadata())
        self.lists = (
            reader.prep_xfer_dlist("", self.d.blocks()),
            reader.prep_xfer_dlist(name, self.p.blocks()),
        )

    @property
    def reader(self) -> Agent:
        return self.d.agent

    def post(self, local: list[int], remote: list[int], word: bytes = b"r:1") -> int:
        ours, theirs = self.lists
        handle = self.reader.make_prepped_xfer("READ", ours, local, theirs, remote, word)
        self.reader.transfer(handle)
        return handle

    def read(self) -> Read:
        (read,) = self.wire.reads
        return read

    def heard(self) -> dict[str, list[bytes]]:
        for channel in list(self.wire.channels):
            while channel in self.wire.channels:
                self.wire.deliver(channel)
        return self.p.agent.get_new_notifs()


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield Pair()


def test_a_read_sees_what_is_there_when_it_gets_there(pair: Pair) -> None:
    handle = pair.post([0, 1], [2, 3])
    pair.wire.move(pair.read(), 1)
    ctypes.memmove(pair.p.start + 8, b"XXXXYYYY", 8)
    assert pair.reader.check_xfer_state(handle) == "PROC"
    pair.wire.move(pair.read(), 1)
    assert pair.d.content == b"ccccYYYY........"
    assert pair.reader.check_xfer_state(handle) == "DONE"


def test_the_owner_hears_of_it_after_the_last_byte(pair: Pair) -> None:
    pair.post([0, 1], [0, 1])
    pair.wire.move(pair.read(), 1)
    assert pair.heard() == {}
    pair.wire.move(pair.read(), 1)
    assert pair.heard() == {pair.reader.name: [b"r:1"]}
    assert pair.heard() == {}


def test_notifications_of_a_pair_keep_their_order(pair: Pair) -> None:
    for word in (b"1", b"2", b"3"):
        pair.reader.send_notif(pair.p.agent.name, word)
    assert pair.heard() == {pair.reader.name: [b"1", b"2", b"3"]}


def test_those_of_two_pairs_overtake_each_other(pair: Pair) -> None:
    other = pair.wire.agent(Place("Q", 0))
    pair.reader.send_notif(pair.p.agent.name, b"1")
    other.send_notif(pair.p.agent.name, b"2")
    pair.wire.deliver((other.name, pair.p.agent.name))
    assert pair.p.agent.get_new_notifs() == {other.name: [b"2"]}


def test_a_cut_ends_reads_and_loses_notifications(pair: Pair) -> None:
    lost: list[bytes] = []
    pair.wire.on_lost = lambda sender, receiver, payload: lost.append(payload)
    pair.reader.send_notif(pair.p.agent.name, b"under way")
    handle = pair.post([0, 1], [0, 1])
    pair.wire.move(pair.read(), 1)
    pair.wire.break_off("P", "D")
    assert pair.reader.check_xfer_state(handle) == "ERR"
    assert pair.d.content == b"aaaa............", "what was written stays"
    with pytest.raises(WireError):
        pair.reader.send_notif(pair.p.agent.name, b"too late")
    pair.wire.mend("P", "D")
    assert pair.heard() == {}
    assert lost == [b"under way", b"too late"]


def test_a_peer_that_is_gone_cannot_be_read(pair: Pair) -> None:
    pair.wire.kill("P")
    handle = pair.post([0], [0])
    assert pair.reader.check_xfer_state(handle) == "ERR"
    assert pair.d.content == b"." * 16


def test_a_released_read_writes_nothing_more(pair: Pair) -> None:
    handle = pair.post([0, 1], [0, 1])
    read = pair.read()
    pair.wire.move(read, 1)
    assert pair.reader.unreleased() == [read]
    pair.reader.release_xfer_handle(handle)
    pair.wire.move(read, 1)
    assert pair.d.content == b"aaaa............"
    assert pair.reader.unreleased() == []
    assert pair.wire.reads == []


@pytest.mark.parametrize("call", ["release_xfer_handle", "check_xfer_state", "transfer"])
def test_the_use_of_a_released_handle_is_noted(pair: Pair, call: str) -> None:
    handle = pair.post([0], [0])
    pair.reader.release_xfer_handle(handle)
    with pytest.raises((WireError, KeyError)):
        getattr(pair.reader, call)(handle)
    assert len(pair.wire.misuse) == 1


def test_memory_that_is_not_registered_is_noted(pair: Pair) -> None:
    pair.post([0], [0])
    pair.p.agent.deregister_memory([(pair.p.start, 16, 0, "")])
    pair.wire.move(pair.read(), 1)
    assert len(pair.wire.misuse) == 1
    assert pair.d.content == b"." * 16


def test_a_refused_call_is_refused_once(pair: Pair) -> None:
    pair.wire.refuse["D", "send_notif"] = 1
    with pytest.raises(WireError):
        pair.reader.send_notif(pair.p.agent.name, b"1")
    pair.reader.send_notif(pair.p.agent.name, b"2")
    assert pair.heard() == {pair.reader.name: [b"2"]}


def test_descriptors_with_a_stride() -> None:
    assert descriptors([[100, 8, 0, 32, 3]]) == [(100, 8), (132, 8), (164, 8)]
    assert descriptors([[100, 8, 0]]) == [(100, 8)]
    assert descriptors([]) == []
