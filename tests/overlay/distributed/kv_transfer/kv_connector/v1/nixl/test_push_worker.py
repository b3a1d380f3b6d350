"""Our fixes where P writes into D's blocks (`NixlPushConnector`): what acts there, and rightly.

Two real workers, as in `tests.support.kv_landing`: D says which blocks it has, P writes.
"""

from __future__ import annotations

import ctypes
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from tests.support.nixl_release import NixlAgentMetadata, NixlConnectorMetadata
from tests.support.nixl_worker import lives, make_worker, nixl_of, raising, stamp
from tests.support.release import since
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.handshake import (
    forgets_whom_it_loses,
)

push = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker")

KERNEL = 4
CONNECTS_FOR_WORDS = hasattr(push.NixlPushConnectorWorker, "_add_notif_only_remote_agent")
"""Whether D connects to P for words alone: from 0.26.0 on.

Up to 0.25.1 P is to D as one that it reads from, and its ranks go by a number."""
RANK: Any = (0, 0) if CONNECTS_FOR_WORDS else 0
PAIRS_HITS = since("0.28")
"""Whether P pairs blocks rightly after a prefix hit on D: docs/push.md."""
REFUSES = pytest.mark.skipif(
    not PAIRS_HITS, reason="up to 0.27.1 D refuses nobody, as on stock: docs/push.md"
)
AWAITING = "awaiting_kvs" in inspect.signature(NixlConnectorMetadata.add_new_req_to_recv).parameters


def make(
    name: str,
    ratio: int = 1,
    kernel: int = KERNEL,
    prefix_caching: bool = True,
    groups: Any = ("full",),  # noqa: ANN401
) -> Any:  # noqa: ANN401 - the worker
    return make_worker(
        engine_id=name,
        worker_class=push.NixlPushConnectorWorker,
        groups=groups,
        block_size=kernel * ratio,
        kernel_block_size=kernel,
        num_blocks=64 // (kernel * ratio) + 1,
        prefix_caching=prefix_caching,
    )


@pytest.fixture
def workers() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def start(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        made.append(make(*args, **kwargs))
        return made[-1]

    yield start
    for worker in made:
        nixl_of(worker).on.clear()
        worker.shutdown()


def said_by(worker: Any) -> NixlAgentMetadata:  # noqa: ANN401
    said = msgspec.msgpack.decode(worker.xfer_handshake_metadata.agent_metadata_bytes)
    return msgspec.convert(said, NixlAgentMetadata)


def hear_of(decode: Any, prefill: Any) -> None:  # noqa: ANN401
    """D's handshake with P: it will only send words. Around it stays what is around it."""

    def handshake(self: Any, *args: Any) -> Any:  # noqa: ANN401
        if not CONNECTS_FOR_WORDS:
            return {RANK: self.add_remote_agent(said_by(prefill))}
        return {RANK: self._add_notif_only_remote_agent(said_by(prefill), 1)}, 0.0

    vars(decode)["_nixl_handshake"] = forgets_whom_it_loses(handshake).__get__(decode)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def ended(decode: Any) -> set[str]:  # noqa: ANN401
    """Which receives D reports, received or failed; from 0.30.0 on it says which failed."""
    if not AWAITING:
        return set(lives(decode.get_finished)[1])
    return set(lives(decode.get_transfer_results).finished_recving)


def ask(decode: Any, blocks: list[int]) -> None:  # noqa: ANN401
    """The scheduler of D awaits a prompt, and has these blocks for it."""
    metadata = NixlConnectorMetadata()
    metadata.add_new_req_to_recv(
        request_id="req",
        local_block_ids=[blocks],
        kv_transfer_params={
            "remote_block_ids": (),
            "remote_engine_id": "P",
            "remote_request_id": "req",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "tp_size": 1,
        },
        **({"awaiting_kvs": True} if AWAITING else {}),
    )
    metadata.push_registrations = {"req": registration(blocks)}
    decode.start_load_kv(stamp(metadata))


def registration(blocks: list[int]) -> dict[str, Any]:
    return {
        "request_id": "req",
        "decode_engine_id": "D",
        "decode_host": "127.0.0.1",
        "decode_port": 1,
        "decode_tp_size": 1,
        "local_block_ids": [blocks],
        "remote_engine_id": "P",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_tp_size": 1,
        "remote_pp_size": 1,
    }


def by_token(worker: Any) -> torch.Tensor:  # noqa: ANN401
    """A layer's cache as kernel blocks, tokens, and what there is of each; written through."""
    cache = next(iter(worker.device_kv_caches.values()))
    if cache.dim() == 5:  # keys and values, blocks, tokens, heads, elements
        return cache.permute(1, 2, 0, 3, 4)
    return cache.transpose(1, 2)  # blocks, heads, tokens, keys and values of each


def kernel_blocks(worker: Any, blocks: list[int]) -> list[int]:  # noqa: ANN401
    ratio = worker._physical_blocks_per_logical_kv_block
    return [b * ratio + i for b in blocks for i in range(ratio)]


def slots(worker: Any, blocks: list[int]) -> torch.Tensor:  # noqa: ANN401
    """The tokens in these logical blocks, in order: one row for each, of a layer."""
    return by_token(worker)[kernel_blocks(worker, blocks)].flatten(0, 1).flatten(1)


def enter(prefill: Any, decode: Any) -> None:  # noqa: ANN401
    """P has shaken hands with D."""
    prefill._remote_agents["D"] = {RANK: prefill.add_remote_agent(said_by(decode))}
    prefill._engine_last_active["D"] = time.perf_counter()


def pushed(prefill: Any, decode: Any, tokens: int, hit: int) -> bool:  # noqa: ANN401
    """P pushes a prompt whose first `hit` logical blocks D has; is each token where it belongs?"""
    enter(prefill, decode)
    sizes = [w.block_size * w._physical_blocks_per_logical_kv_block for w in (prefill, decode)]
    theirs, ours = (list(range(1, 1 + -(-tokens // size))) for size in sizes)
    cache, kernel = by_token(prefill), kernel_blocks(prefill, theirs)
    values = torch.arange(1, len(kernel) * cache.shape[1] + 1, dtype=cache.dtype)
    for slot, value in enumerate(values):
        cache[kernel[slot // cache.shape[1]], slot % cache.shape[1]] = value
    prefill._do_start_push_kv("req", [theirs], registration(ours[hit:]))
    nixl = nixl_of(prefill)
    for write in nixl.reads:
        mine, yours = (nixl._descs[side] for side in write.sides)
        for source_id, target_id in zip(write.local, write.remote, strict=True):
            (origin, size, _), (target, offered, _) = mine[source_id], yours[target_id]
            assert size == offered
            ctypes.memmove(int(target), int(origin), int(size))
    first = hit * sizes[1]
    arrived = slots(decode, ours)[first:tokens]
    wanted = values[first:tokens].unsqueeze(1).expand_as(arrived)
    return bool((arrived == wanted).all())


RIGHT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"ratio": 2}, {"ratio": 2}),
    ({"ratio": 2}, {"ratio": 2, "prefix_caching": False}),
]
WRONG: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"ratio": 4}, {"ratio": 2}),
    ({"ratio": 2}, {"ratio": 4}),
    ({"ratio": 4}, {"ratio": 2, "prefix_caching": False}),
    ({"kernel": 8}, {"kernel": 4}),
    ({"kernel": 8}, {"kernel": 4, "prefix_caching": False}),
    ({"kernel": 4}, {"kernel": 8}),
]


def outcomes(
    workers: Callable[..., Any], p: dict[str, Any], d: dict[str, Any], hits: Iterable[int] = (0, 1)
) -> set[Any]:
    found: set[Any] = set()
    for tokens in (1, 6, 9, 16, 19):
        for hit in hits if d.get("prefix_caching", True) else (0,):
            if hit * d.get("kernel", KERNEL) * d.get("ratio", 1) >= tokens:
                continue
            try:
                found.add(pushed(workers("P", **p), workers("D", **d), tokens, hit))
            except Exception as error:
                found.add(type(error).__name__)
    return found


@pytest.mark.parametrize(("p", "d"), RIGHT)
def test_what_p_pairs_rightly_is_not_refused(
    workers: Callable[..., Any], p: dict[str, Any], d: dict[str, Any]
) -> None:
    assert outcomes(workers, p, d, (0, 1) if PAIRS_HITS else (0,)) == {True}
    decode = workers("D", **d)
    hear_of(decode, workers("P", **p))
    ask(decode, [1])
    until(lambda: nixl_of(decode).called("send_notif"))


@pytest.mark.skipif(PAIRS_HITS, reason="from 0.28.0 on D refuses who would pair wrongly")
@pytest.mark.parametrize(("p", "d"), WRONG)
def test_whoever_pairs_is_taken_as_on_stock(
    workers: Callable[..., Any], p: dict[str, Any], d: dict[str, Any]
) -> None:
    """What is wrong with a prefix hit is right without one."""
    if not CONNECTS_FOR_WORDS and p.get("kernel", KERNEL) > d.get("kernel", KERNEL):
        pytest.skip("up to 0.25.1 D connects as for reading, for which vLLM's own assert is")
    decode = workers("D", **d)
    hear_of(decode, workers("P", **p))
    ask(decode, [1])
    until(lambda: nixl_of(decode).called("send_notif"))


@REFUSES
@pytest.mark.parametrize(("p", "d"), WRONG)
def test_what_p_pairs_wrongly_is_refused_by_d_and_the_request_fails(
    workers: Callable[..., Any], p: dict[str, Any], d: dict[str, Any]
) -> None:
    assert outcomes(workers, p, d) != {True}
    decode = workers("D", **d)
    hear_of(decode, workers("P", **p))
    ask(decode, [1])
    until(lambda: not decode._failed_recv_reqs.empty())
    if AWAITING:
        results = lives(decode.get_transfer_results)
        assert results.finished_recving == {"req"} == results.failed_recving
    else:
        assert ended(decode) == {"req"}
    assert decode.get_block_ids_with_load_errors() == {1}
    assert not nixl_of(decode).called("send_notif")
    loaded = nixl_of(decode).called("add_remote_agent")
    assert len(nixl_of(decode).called("remove_remote_agent")) == len(loaded)
    # As the refusal says.
    hear_of(decode, workers("P", **{**d, "prefix_caching": True}))
    ask(decode, [1])
    until(lambda: nixl_of(decode).called("send_notif"))


@REFUSES
def test_a_hybrid_with_prefix_hits_is_refused_where_the_ratios_differ(
    workers: Callable[..., Any],
) -> None:
    hybrid = ("full", "mamba")
    prefill = workers("P", ratio=4, groups=hybrid)
    with pytest.raises(RuntimeError, match="--no-enable-prefix-caching"):
        workers("D", ratio=2, groups=hybrid)._add_notif_only_remote_agent(said_by(prefill), 1)
    alone = workers("D", ratio=2, groups=hybrid, prefix_caching=False)
    assert alone._add_notif_only_remote_agent(said_by(prefill), 1)


@pytest.mark.parametrize("payload", [b"", b"\xff:1", b"req", b"req:", b"req:one"])
def test_a_word_that_makes_no_sense_does_not_end_d(
    workers: Callable[..., Any], payload: bytes
) -> None:
    decode = workers("D")
    hear_of(decode, workers("P"))
    ask(decode, [1])
    until(lambda: nixl_of(decode).called("send_notif"))
    nixl_of(decode).inbox = {"P": [payload, b"req:1"]}
    ended(decode)  # wakes the thread that looks
    until(lambda: not decode._pending_completion_notifs.empty())
    received: set[str] = set()

    def arrived() -> bool:
        received.update(ended(decode))
        return bool(received)

    until(arrived)
    assert received == {"req"}


@pytest.mark.parametrize("senseless", [{}, {"decode_tp_size": "two"}, {"local_block_ids": 7}])
def test_a_registration_that_makes_no_sense_does_not_take_the_others_along(
    workers: Callable[..., Any], senseless: dict[str, Any]
) -> None:
    prefill, decode = workers("P"), workers("D")
    enter(prefill, decode)
    whole = registration([1]) if senseless else {}
    bad = {**whole, "request_id": "bad", **senseless}
    metadata = NixlConnectorMetadata()
    metadata.push_finished_blocks = {"bad": ([1],), "req": ([1],)}
    prefill.start_load_kv(stamp(metadata))
    until(lambda: len(prefill._push_finished_blocks) == 2)
    prefix, good = push.PUSH_REG_NOTIF_PREFIX, registration([2])
    nixl_of(prefill).inbox = {"D": [prefix + msgspec.msgpack.encode(reg) for reg in (bad, good)]}
    until(lambda: [r for r in nixl_of(prefill).reads if r.notif == b"req:1"])


def test_what_is_dropped_is_counted_and_shown_in_short(workers: Callable[..., Any]) -> None:
    from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import (
        drops_what_it_cannot_use,
    )

    prefill = workers("P")
    with mock.patch.object(prefill, "_log_failure") as log:
        drops_what_it_cannot_use(raising(KeyError()))(prefill, b"x" * 10_000)
    assert 0 < len(log.call_args.kwargs["payload"]) < 200
    assert prefill.xfer_stats.data["num_failed_notifications"] == [1]


def test_a_push_that_is_done_has_not_failed(workers: Callable[..., Any]) -> None:
    prefill, decode = workers("P"), workers("D")
    assert pushed(prefill, decode, 4, 0)
    nixl_of(prefill).finish(*nixl_of(prefill).reads)
    ended(prefill)
    assert all(write.released for write in nixl_of(prefill).reads)
    assert not prefill.get_kv_connector_stats().data["num_failed_transfers"]


def test_a_worker_that_pushes_shuts_down_behind_a_handle_that_cannot_be_released(
    workers: Callable[..., Any],
) -> None:
    prefill, decode = workers("P"), workers("D")
    assert pushed(prefill, decode, 4, 0)
    nixl_of(prefill).on["release_xfer_handle"] = raising(RuntimeError("broken"))
    lives(prefill.shutdown)
    assert nixl_of(prefill).called("deregister_memory")
