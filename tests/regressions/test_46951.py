"""46951: D does not read into blocks whose KV is still being stored for another request.

NIXL and the offloading connector under `MultiConnector`: what was computed is copied to the host
in the background, also when its request has ended. Whoever gets such a block waits for the copy.
A copy that comes after NIXL's read holds the KV of another prompt, under the hashes of the first.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from tests.support.decode_engine import DecodeEngine, sent
from tests.support.nixl_worker import connect

CONNECTORS = [
    {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
    },
]
STORED = 48
"""Tokens: three blocks of the six that there are."""


def blocks_of(store: Any) -> set[int]:  # noqa: ANN401 - of the release
    """The blocks that are copied: where from and where to is a pair up to 0.25.1."""
    pair = getattr(store, "transfer_spec", store)
    source = pair[0] if isinstance(pair, tuple) else pair.src_spec
    return set(source.block_ids.tolist())


class StoringEngine(DecodeEngine):
    """A decode engine whose copies to the host never end by themselves.

    Attributes:
        stores: blocks of each copy that is under way.
        overwritten: blocks of such copies that NIXL was to read into.
    """

    def __init__(self) -> None:
        several = {"connectors": CONNECTORS}
        super().__init__(num_blocks=7, connector="MultiConnector", extra_config=several)
        connect(self.worker, "P")
        self.stores: dict[object, set[int]] = {}
        self.overwritten: set[int] = set()

    def _start(self, decided: SchedulerOutput) -> None:
        both: Any = decided.kv_connector_metadata
        nixl, offloading = both.metadata
        older = getattr(offloading, "reqs_to_store", {})  # by request: up to 0.20.2
        stores = getattr(offloading, "store_jobs", older)
        self.stores |= {job: blocks_of(store) for job, store in stores.items()}
        for job in getattr(offloading, "jobs_to_flush", None) or ():
            self.stores.pop(job, None)  # the worker waits for it before anything is read
        for read in nixl.reqs_to_recv.values():
            into = {block for group in read.local_block_ids for block in group}
            for blocks in self.stores.values():
                self.overwritten |= blocks & into
        self.worker.start_load_kv(sent(nixl))


def test_a_read_waits_for_what_is_stored_of_its_blocks() -> None:
    engine = StoringEngine()
    engine.ask("stored", range(STORED), max_tokens=1)
    engine.step()
    engine.ask("read", range(1000, 1000 + 2 * STORED), [list(range(1, 7))])
    for _ in range(3):
        engine.step()
    assert engine.overwritten == set()


def test_so_does_one_that_comes_in_the_step_of_the_last_store() -> None:
    """The last block is full, and stored, when its request has generated into it."""
    engine = StoringEngine()
    engine.ask("stored", range(STORED - 2), max_tokens=4)
    engine.ask("read", range(1000, 1000 + 2 * STORED), [list(range(1, 7))])
    for _ in range(8):
        engine.step()
    assert engine.overwritten == set()
