"""Counts that travel: none lost, none twice, and no names but those that are known."""

from __future__ import annotations

import gc
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

from vllm_overlay.distributed.kv_transfer import fix_counts
from vllm_overlay.distributed.kv_transfer.fix_counts import (
    Acted,
    add,
    count,
    known,
    send_to,
    taken,
)


class Sink:
    def __init__(self) -> None:
        self.got: list[tuple[Acted, int]] = []

    def count(self, acted: Acted, times: int) -> None:
        self.got.append((acted, times))


def test_what_was_counted_is_taken_once() -> None:
    count(Acted.READ_REFUSED)
    count(Acted.READ_REFUSED)
    count(Acted.USED_TWICE)
    assert taken() == {"READ_REFUSED": 2, "USED_TWICE": 1}
    assert taken() == {}


def test_a_name_of_another_build_is_passed_over() -> None:
    add({"SOMETHING_LATER": 3, "USED_TWICE": 2})
    assert taken() == {"USED_TWICE": 2}
    assert list(known({"SOMETHING_LATER": 3, "USED_TWICE": 2})) == [(Acted.USED_TWICE, 2)]


def test_no_thread_loses_a_count() -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: count(Acted.USED_TWICE), range(10_000)))
    assert taken() == {"USED_TWICE": 10_000}


def test_a_sink_gets_what_was_counted_before_and_all_after() -> None:
    add({"USED_TWICE": 1, "LEASE_ENDED": 2})
    sink = Sink()
    send_to(sink.count)
    count(Acted.READ_REFUSED)
    before = [(Acted.USED_TWICE, 1), (Acted.LEASE_ENDED, 2)]
    assert sink.got == [*before, (Acted.READ_REFUSED, 1)]
    assert taken() == {}


def test_after_its_sink_has_gone_a_process_keeps_its_counts() -> None:
    sink = Sink()
    send_to(sink.count)
    del sink
    gc.collect()
    count(Acted.READ_REFUSED)
    assert taken() == {"READ_REFUSED": 1}


def _forked(answer: multiprocessing.SimpleQueue[dict[str, int]]) -> None:
    count(Acted.USED_TWICE)
    answer.put(taken())


def test_a_forked_process_has_counts_of_its_own() -> None:
    sink = Sink()
    send_to(sink.count)
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=_forked, args=(answer,))
    child.start()
    assert answer.get() == {"USED_TWICE": 1}
    child.join()
    assert sink.got == []


def test_labels_are_bounded_and_tell_members_apart() -> None:
    labels = [acted.value for acted in Acted]
    assert len(set(labels)) == len(labels) == len(fix_counts.Acted.__members__)
