"""NIXL as far as a worker sees it, on real memory, with a network that the history controls.

An `Agent` has the methods of NIXL's agent that workers call. A read copies the bytes of its
descriptors one after the other, when the history says, so what it reads may change in between; the
owner of the memory takes no part in that, as with RDMA. What NIXL promises, `Wire` keeps:

- a read's notification reaches the peer after the last byte was copied, and only then;
- notifications from one agent to another arrive in the order in which they were sent, once. Those
  of different pairs overtake each other. They are lost where the connection breaks, not otherwise;
- a read whose connection or peer is gone ends in an error; what it has written stays written;
- a released read writes nothing more.

What NIXL forbids is noted in `Wire.misuse`: the use of a handle that was released or never was,
and memory that nobody has registered.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from tests.simulation.clock import Place

State = Literal["PROC", "DONE", "ERR"]

Descriptor = tuple[int, int]
"""Address and bytes."""


class WireError(RuntimeError):
    """NIXL refuses a call."""


@dataclass(eq=False)
class Read:
    """A read that was made, perhaps posted.

    Attributes:
        reader, owner: the agents.
        local, remote: indices of the blocks' descriptors in each side's list.
        pairs: from where to where, and how many bytes.
        copied: how many of them were copied so far.
        tag: for whoever watches.
    """

    handle: int
    reader: Agent
    owner: Agent
    local: list[int]
    remote: list[int]
    pairs: list[tuple[Descriptor, Descriptor]]
    notification: bytes
    state: State = "PROC"
    posted: bool = False
    released: bool = False
    copied: int = 0
    tag: dict[str, Any] = field(default_factory=dict)

    @property
    def in_flight(self) -> bool:
        return self.posted and not self.released and self.state == "PROC"


class Wire:
    """All agents, and what is under way between them.

    Attributes:
        agents: by name, also those that are gone.
        reads: those in flight, in the order in which they were posted.
        channels: sender and receiver -> notifications under way, oldest first.
        cut: pairs of engines between which nothing passes.
        refuse: (engine, call) -> how many of its next such calls NIXL refuses.
        misuse: what no NIXL allows.
        on_post, on_copy: called with a read when it is posted, and before some of it is copied.
        on_lost: called with receiver and payload of a notification that will never arrive.
    """

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.reads: list[Read] = []
        self.channels: dict[tuple[str, str], deque[bytes]] = {}
        self.cut: set[frozenset[str]] = set()
        self.refuse: dict[tuple[str, str], int] = {}
        self.misuse: list[str] = []
        self.on_post: Callable[[Read], None] = lambda read: None
        self.on_copy: Callable[[Read, int], None] = lambda read, count: None
        self.on_sent: Callable[[Agent, Agent, bytes], None] = lambda sender, receiver, payload: None
        self.on_delivered: Callable[[str, str, bytes], None] = lambda sender, receiver, payload: (
            None
        )
        self.on_lost: Callable[[Agent, Agent, bytes], None] = lambda sender, receiver, payload: None
        self._names = itertools.count()
        self._handles = itertools.count(1)

    def agent(self, place: Place) -> Agent:
        """A new agent of a process; the name is never one that was there before."""
        agent = Agent(self, f"{place.engine}.{place.rank}#{next(self._names)}", place)
        self.agents[agent.name] = agent
        return agent

    def connected(self, one: Agent, other: Agent) -> bool:
        pair = frozenset((one.place.engine, other.place.engine))
        return one.alive and other.alive and pair not in self.cut

    # What the history does.

    def move(self, read: Read, count: int) -> None:
        """Copy the next `count` descriptors of a read in flight; end it where that is due."""
        if not read.in_flight:
            return
        if not self.connected(read.reader, read.owner):
            self.fail(read)
            return
        count = min(count, len(read.pairs) - read.copied)
        self.on_copy(read, count)
        for (source, size), (target, room) in read.pairs[read.copied : read.copied + count]:
            if size != room:
                raise WireError(f"descriptors of {size} and {room} bytes")
            if not read.owner.has(source, size) or not read.reader.has(target, size):
                self.misuse.append("a read of memory that is not registered")
                self.fail(read)
                return
            ctypes.memmove(target, source, size)
        read.copied += count
        if read.copied == len(read.pairs):
            read.state = "DONE"
            self.reads.remove(read)
            self.send(read.reader, read.owner, read.notification)

    def fail(self, read: Read) -> None:
        """Let a read in flight end in an error; its peer hears nothing."""
        if read in self.reads:
            self.reads.remove(read)
            read.state = "ERR"

    def send(self, sender: Agent, receiver: Agent, payload: bytes) -> None:
        if not self.connected(sender, receiver):
            self.on_lost(sender, receiver, payload)
            return
        self.on_sent(sender, receiver, payload)
        self.channels.setdefault((sender.name, receiver.name), deque()).append(payload)

    def deliver(self, channel: tuple[str, str]) -> None:
        """Let the oldest notification of a channel arrive."""
        waiting = self.channels.get(channel)
        if not waiting:
            return
        payload = waiting.popleft()
        if not waiting:
            del self.channels[channel]
        sender, receiver = channel
        self.on_delivered(sender, receiver, payload)
        self.agents[receiver].inbox.setdefault(sender, []).append(payload)

    def break_off(self, one: str, other: str) -> None:
        """Cut the connection of two engines; what is under way between them is lost."""
        self.cut.add(frozenset((one, other)))
        self._lose()

    def mend(self, one: str, other: str) -> None:
        self.cut.discard(frozenset((one, other)))

    def kill(self, engine: str) -> None:
        """Take the agents of an engine's processes away, as when these end."""
        for agent in self.agents.values():
            if agent.place.engine == engine:
                agent.alive = False
        self._lose()

    def forget(self) -> None:
        """Let go of what agents had whose processes have ended, and of reads that NIXL keeps."""
        for agent in self.agents.values():
            agent.forget()

    def _lose(self) -> None:
        for read in list(self.reads):
            if not self.connected(read.reader, read.owner):
                self.fail(read)
        for channel in list(self.channels):
            sender, receiver = (self.agents[name] for name in channel)
            if not self.connected(sender, receiver):
                for payload in self.channels.pop(channel):
                    self.on_lost(sender, receiver, payload)


class Agent:
    """NIXL's agent of one process, as workers use it."""

    def __init__(self, wire: Wire, name: str, place: Place) -> None:
        self.wire, self.name, self.place = wire, name, place
        self.alive = True
        self.inbox: dict[str, list[bytes]] = {}
        self.known: set[str] = set()
        self._memory: list[Descriptor] = []
        self._lists: dict[int, tuple[str, list[Descriptor]]] = {}
        self._reads: dict[int, Read] = {}

    # For whoever watches.

    def has(self, address: int, size: int) -> bool:
        """Whether memory is registered."""
        return any(a <= address and address + size <= a + s for a, s in self._memory)

    def unreleased(self) -> list[Read]:
        """The reads that are over, and whose handles nobody tried to release."""
        reads = self._reads.values()
        return [r for r in reads if not r.released and "refused" not in r.tag]

    def forget(self) -> None:
        """See `Wire.forget`."""
        refused = [r.handle for r in self._reads.values() if "refused" in r.tag]
        for handle in refused if self.alive else [*self._reads]:
            del self._reads[handle]
        if not self.alive:
            self._lists.clear()

    # For the worker.

    def _may(self, call: str) -> None:
        key = (self.place.engine, call)
        if self.wire.refuse.get(key, 0):
            self.wire.refuse[key] -= 1
            raise WireError(f"{call} is refused")

    def get_reg_descs(self, caches: Any, memory_type: str = "") -> list[Any]:  # noqa: ANN401
        return list(caches)

    def register_memory(self, descs: Any, backends: Any = None) -> None:  # noqa: ANN401
        self._memory += [(int(each[0]), int(each[1])) for each in descs]

    def deregister_memory(self, descs: Any) -> None:  # noqa: ANN401
        for each in descs:
            self._memory.remove((int(each[0]), int(each[1])))

    def get_xfer_descs(self, blocks: Any, memory_type: str = "") -> list[Any]:  # noqa: ANN401
        return list(blocks)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def check_remote_metadata(self, agent: str) -> bool:
        return agent in self.known

    def add_remote_agent(self, metadata: bytes) -> str:
        self._may("add_remote_agent")
        self.known.add(metadata.decode())
        return metadata.decode()

    def remove_remote_agent(self, agent: str) -> None:
        self.known.discard(agent)

    def prep_xfer_dlist(self, agent: str, descs: Any, mem_type: str = "") -> int:  # noqa: ANN401
        handle = next(self.wire._handles)
        self._lists[handle] = agent, descriptors(descs)
        return handle

    def release_dlist_handle(self, handle: int) -> None:
        if self.alive and self._lists.pop(handle, None) is None:
            self._misused(f"release of the unknown list {handle}")

    def make_prepped_xfer(
        self,
        operation: str,
        local_side: int,
        local_ids: Any,  # noqa: ANN401 - any integer sequence
        remote_side: int,
        remote_ids: Any,  # noqa: ANN401
        notif_msg: bytes = b"",
    ) -> int:
        self._may("make_prepped_xfer")
        if local_side not in self._lists or remote_side not in self._lists:
            self._misused("a read between lists that were released")
        (_, ours), (owner, theirs) = self._lists[local_side], self._lists[remote_side]
        local, remote = [int(i) for i in local_ids], [int(i) for i in remote_ids]
        pairs = [(theirs[r], ours[o]) for o, r in zip(local, remote, strict=True)]
        handle = next(self.wire._handles)
        agent = self.wire.agents[owner]
        self._reads[handle] = Read(handle, self, agent, local, remote, pairs, notif_msg)
        return handle

    def transfer(self, handle: int) -> str:
        read = self._read(handle, "transfer")
        self._may("transfer")
        read.posted = True
        self.wire.on_post(read)
        if not self.wire.connected(self, read.owner) or read.owner.name not in self.known:
            read.state = "ERR"
        else:
            self.wire.reads.append(read)
        return read.state

    def check_xfer_state(self, handle: int) -> str:
        read = self._read(handle, "check_xfer_state")
        if not read.posted:
            raise WireError("NIXL_ERR_NOT_POSTED")  # as NIXL 1.5.1 says
        return read.state

    def get_xfer_telemetry(self, handle: int) -> object:
        self._read(handle, "get_xfer_telemetry")
        return SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=1, descCount=1)

    def release_xfer_handle(self, handle: int) -> None:
        if not self.alive:  # its process has ended; what Python tidies up is no part of the history
            return
        read = self._read(handle, "release_xfer_handle")
        read.tag["refused"] = True  # then it is NIXL that keeps it
        self._may("release_xfer_handle")
        read.released = True
        if read in self.wire.reads:
            self.wire.reads.remove(read)
        del self._reads[handle]

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        receiver = self.wire.agents[agent]
        try:
            self._may("send_notif")
            if not self.wire.connected(self, receiver):
                raise WireError("the peer is disconnected")
        except WireError:
            self.wire.on_lost(self, receiver, notif_msg)
            raise
        self.wire.send(self, receiver, notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self._may("get_new_notifs")
        inbox, self.inbox = self.inbox, {}
        return inbox

    def _read(self, handle: int, use: str) -> Read:
        if handle not in self._reads:
            self._misused(f"{use} of a handle that was released or never was")
        return self._reads[handle]

    def _misused(self, what: str) -> None:
        self.wire.misuse.append(what)
        raise WireError(what)


def descriptors(descs: Sequence[Sequence[int]]) -> list[Descriptor]:
    """Address and bytes of each block, where rows may add a stride and a count to that."""
    if len(descs) == 0 or len(descs[0]) == 3:
        return [(int(each[0]), int(each[1])) for each in descs]
    return [
        (int(address) + i * int(stride), int(size))
        for address, size, _, stride, count in descs
        for i in range(int(count))
    ]
