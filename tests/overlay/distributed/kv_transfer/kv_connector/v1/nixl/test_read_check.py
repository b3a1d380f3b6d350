"""Which reads are good, from what P says and when."""

from __future__ import annotations

import pytest

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease_book import Answer, Standing
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.read_check import (
    AGAIN,
    MARGIN,
    PATIENCE,
    ReadCheck,
    Verdict,
)


def held(seconds: float = 0.0) -> Answer:
    return Answer(Standing.HELD, seconds)


READ, GONE = Answer(Standing.READ, 0.0), Answer(Standing.GONE, 0.0)


def test_a_read_that_is_under_way_is_waited_for() -> None:
    check = ReadCheck(0.0)
    check.hears(0.0, held(100.0))
    assert check.verdict(50.0) is Verdict.WAIT


@pytest.mark.parametrize(
    ("ended", "verdict"), [(10.0 - MARGIN, Verdict.USE), (10.1 - MARGIN, Verdict.ASK)]
)
def test_a_read_within_the_lease_is_used(ended: float, verdict: Verdict) -> None:
    check = ReadCheck(0.0)
    check.hears(0.0, held(10.0))
    check.ends(ended)
    assert check.verdict(100.0) is verdict


def test_the_lease_counts_from_the_question_not_from_the_answer() -> None:
    check = ReadCheck(0.0)
    check.ends(12.0)
    check.hears(0.0, held(10.0))  # it may have been said at 0, and be late
    assert check.verdict(13.0) is Verdict.ASK


@pytest.mark.parametrize(
    ("answer", "verdict"), [(held(), Verdict.USE), (READ, Verdict.USE), (GONE, Verdict.REFUSE)]
)
def test_an_answer_to_a_question_after_the_read_decides(answer: Answer, verdict: Verdict) -> None:
    check = ReadCheck(0.0)
    check.hears(0.0, held())
    check.ends(5.0)
    assert check.verdict(5.1) is Verdict.ASK
    check.asks(5.1)
    assert check.verdict(5.2) is Verdict.WAIT
    check.hears(5.1, answer)
    assert check.verdict(5.3) is verdict


def test_what_is_gone_stays_gone() -> None:
    check = ReadCheck(0.0)
    check.hears(0.0, GONE)
    check.hears(0.0, held(100.0))  # said before, and overtaken
    check.ends(1.0)
    assert check.verdict(2.0) is Verdict.REFUSE


def test_a_silent_p_is_asked_again_for_so_long_and_no_longer() -> None:
    check = ReadCheck(0.0)
    check.ends(3.0)
    asked = 0
    for tenth in range(round(10 * PATIENCE)):
        time = 3.0 + tenth / 10
        verdict = check.verdict(time)
        if verdict is Verdict.ASK:
            check.asks(time)
            asked += 1
        else:
            assert verdict is Verdict.WAIT
    assert asked == round(PATIENCE / AGAIN)
    assert check.verdict(3.0 + PATIENCE) is Verdict.REFUSE


def test_while_d_does_not_look_nobody_is_silent() -> None:
    check = ReadCheck(0.0)
    check.ends(1.0)
    check.resumes(100.0)
    assert check.verdict(100.0 + PATIENCE - 0.1) is Verdict.ASK
    assert check.verdict(100.0 + PATIENCE) is Verdict.REFUSE


def test_what_p_says_is_gone_was_so_when_it_was_first_asked() -> None:
    check = ReadCheck(0.0)
    assert not check.was_gone(1e9)
    for asked in (7.0, 5.0, 6.0):
        check.hears(asked, GONE)
    assert not check.was_gone(4.9)
    assert check.was_gone(5.0)


def test_what_is_asked_after_an_answer_has_the_same_time_to_find_one() -> None:
    check = ReadCheck(0.0)
    check.ends(3.0)
    check.hears(0.0, held())
    check.asks(3.0 + PATIENCE)
    assert check.verdict(3.0 + 2 * PATIENCE - 0.1) is Verdict.ASK
    assert check.verdict(3.0 + 2 * PATIENCE) is Verdict.REFUSE


def test_an_answer_to_any_of_the_questions_counts() -> None:
    check = ReadCheck(0.0)
    check.ends(1.0)
    check.asks(1.0 + AGAIN)
    check.asks(1.0 + 2 * AGAIN)
    check.hears(1.0 + AGAIN, held())
    assert check.verdict(1.1 + 2 * AGAIN) is Verdict.USE


def test_that_p_has_heard_of_the_read_decides_whenever_it_was_asked() -> None:
    check = ReadCheck(0.0)
    check.ends(5.0)
    check.hears(0.0, READ)
    assert check.verdict(5.1) is Verdict.USE


def test_the_first_report_of_the_end_counts() -> None:
    check = ReadCheck(0.0)
    check.hears(0.0, held(10.0))
    check.ends(1.0)
    check.ends(20.0)
    assert check.verdict(30.0) is Verdict.USE


def test_of_two_events_of_the_same_time_nobody_knows_which_was_first() -> None:
    check = ReadCheck(5.0)
    check.ends(5.0)
    assert check.verdict(5.0) is Verdict.WAIT  # an answer to what is asked now proves nothing
    check.hears(5.0, held())
    assert check.verdict(5.0) is Verdict.WAIT
    assert check.verdict(5.1) is Verdict.ASK


def test_a_question_is_asked_again_when_it_is_time_whatever_is_said_to_earlier_ones() -> None:
    check = ReadCheck(0.0)
    check.ends(AGAIN / 2)
    assert check.verdict(AGAIN) is Verdict.ASK
    check.asks(AGAIN)
    check.hears(0.0, held())
    assert check.verdict(AGAIN * 1.5) is Verdict.WAIT
    assert check.verdict(AGAIN * 2) is Verdict.ASK
