"""40364: a failed handshake or read follows kv_load_failure_policy; the engine lives.

The scheduler applies the policy to what the worker says about a receive: that it has ended, and
which blocks are invalid. So the worker has to say both, however the receive failed, and must not
touch the blocks as if they had arrived.
"""

from __future__ import annotations

from unittest import mock

import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    ScriptedNixl,
    attempt,
    await_handshakes,
    connect,
    make_worker,
    nixl_of,
    raising,
    receive,
    received,
    script_handshake,
    step,
)
from tests.support.receive_machine import broken_claim

PROCESSING = (
    "sync_recved_kv_to_device",
    "post_process_device_kv_on_receive",
    "post_process_device_kv_on_receive_heterogeneous_attn",  # from 0.20.0 on
)
"""What is done to blocks that have arrived."""


def refuse_handshake(worker: NixlConnectorWorker) -> None:
    def refuse(engine_id: str, tp_size: int) -> dict[int, str]:
        raise RuntimeError("NIXL compatibility hash mismatch")

    script_handshake(worker, refuse)


def break_reads(nixl: ScriptedNixl, how: str) -> None:
    """Let every read from now on fail in one of the ways in which NIXL reports it."""
    if how == "cannot be made":
        nixl.on["make_prepped_xfer"] = raising(RuntimeError("no such descriptor"))
    elif how == "cannot be posted":
        nixl.on["transfer"] = raising(RuntimeError("no route"))
    elif how == "ends in an error":
        nixl.on["check_xfer_state"] = lambda handle: "ERR"
    else:
        nixl.on["check_xfer_state"] = raising(RuntimeError("remote disconnected"))


def test_a_failed_handshake_is_reported_with_the_blocks_it_spoils() -> None:
    worker = make_worker()
    refuse_handshake(worker)
    receive(worker, "req-d", local_blocks=[[1, 2]])
    await_handshakes(worker)
    assert received(worker) == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == {1, 2}
    assert attempt(step, worker) == (set(), set())


def test_a_failed_handshake_leaves_other_requests_alone() -> None:
    worker = make_worker()
    connect(worker, "P")
    refuse_handshake(worker)
    receive(worker, "lost", local_blocks=[[1]], remote_blocks=[[5]], engine_id="Q")
    receive(worker, "good", local_blocks=[[2]], remote_blocks=[[6]], engine_id="P")
    await_handshakes(worker)
    nixl_of(worker).finish(*nixl_of(worker).reads)
    assert received(worker) == {"lost", "good"}
    assert worker.get_block_ids_with_load_errors() == {1}


def test_the_next_request_tries_the_handshake_again() -> None:
    worker = make_worker()
    refuse_handshake(worker)
    receive(worker, "first")
    await_handshakes(worker)
    assert received(worker) == {"first"}
    connect(worker, "P")
    receive(worker, "second", local_blocks=[[3]], remote_blocks=[[6]])
    nixl_of(worker).finish(*nixl_of(worker).reads)
    assert received(worker) == {"second"}


@pytest.mark.parametrize("blocks", ["host buffer", "permuted layout", "different attention"])
@pytest.mark.parametrize(
    "how", ["cannot be made", "cannot be posted", "ends in an error", "cannot be polled"]
)
def test_what_failed_to_arrive_is_not_processed_as_if_it_had(how: str, blocks: str) -> None:
    worker = make_worker()
    connect(worker, "P")
    worker.use_host_buffer = blocks == "host buffer"
    worker.enable_permute_local_kv = blocks == "permuted layout"
    worker.enable_heterogeneous_attn_post_process = blocks == "different attention"
    break_reads(nixl_of(worker), how)
    known = {name: mock.DEFAULT for name in PROCESSING if hasattr(worker, name)}
    with mock.patch.multiple(worker, **known) as processing:
        assert attempt(receive, worker, "req-d", local_blocks=[[1, 2]]) is None
        assert received(worker) == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == {1, 2}
    assert [name for name, process in processing.items() if process.called] == []


@pytest.mark.parametrize("how", ["ERR", "raises"])
def test_a_read_that_fails_is_reported_when_the_other_has_ended(how: str) -> None:
    worker = make_worker()
    connect(worker, "P", tp_size=2)
    receive(worker, "req-d", local_blocks=[[1, 2]], tp_size=2)
    nixl = nixl_of(worker)
    bad, good = nixl.reads
    if how == "raises":
        nixl.on["check_xfer_state"] = raising(RuntimeError("lost"), lambda h: h == bad.handle)
    else:
        nixl.fail(bad)
    assert attempt(step, worker) == (set(), set())  # the other one still writes
    nixl.finish(good)
    assert received(worker) == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == {1, 2}


def test_blocks_that_do_not_match_fail_only_the_request_that_brought_them() -> None:
    worker = make_worker()
    connect(worker, "P")
    assert attempt(receive, worker, "short", local_blocks=[[1, 2, 3]], remote_blocks=[[5]]) is None
    receive(worker, "good", local_blocks=[[4]], remote_blocks=[[6]])
    nixl_of(worker).finish(*nixl_of(worker).reads)
    assert received(worker) == {"short", "good"}
    assert worker.get_block_ids_with_load_errors() == {1, 2, 3}


def test_a_read_that_can_be_neither_posted_nor_released_is_reported() -> None:
    worker = make_worker()
    connect(worker, "P")
    broken = raising(RuntimeError("no route"))
    nixl_of(worker).on |= {"transfer": broken, "release_xfer_handle": broken}
    assert attempt(receive, worker, "req-d", local_blocks=[[1, 2]]) is None
    nixl_of(worker).on["check_xfer_state"] = lambda handle: "ERR"
    # At once, or when its handle has been released, which this fix alone does not wait for.
    reported = received(worker)
    del nixl_of(worker).on["release_xfer_handle"]
    assert (reported, received(worker)) in [({"req-d"}, set()), (set(), {"req-d"})]
    assert worker.get_block_ids_with_load_errors() == {1, 2}


def test_in_any_order_of_handshakes_the_engine_lives() -> None:
    # The handshake thread must not touch what the main thread is working with either.
    broken = broken_claim(1_000, faults={"handshake"}, claims={"lives", "once", "thread"})
    assert not broken, broken
