"""What P says of a lease, to whom, and when its blocks may go."""

from __future__ import annotations

import pytest

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import lease_book
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease_book import (
    PROMISE,
    Answer,
    LeaseBook,
    Standing,
)

D, OTHER = frozenset({"d/0", "d/1"}), frozenset({"other/0"})
GONE, READ = Answer(Standing.GONE, 0.0), Answer(Standing.READ, 0.0)


class Held:
    """A book with one lease of 30 seconds, at time 100."""

    def __init__(self) -> None:
        self.time = 100.0
        self.book = LeaseBook(lambda: self.time)
        self.token = self.book.hold("r", 130.0)

    def ask(self, reader: str = "d", agents: frozenset[str] = D) -> Answer:
        return self.book.answer(self.token, reader, agents)

    def end(self, *agents: str) -> bool:
        """The workers are done, having heard of these; whether the blocks may go."""
        if agents:
            self.book.hear({"r": agents})
        return self.book.free(["r"]) == {"r"}


@pytest.fixture
def held() -> Held:
    return Held()


def test_the_first_is_promised_the_blocks_for_a_while(held: Held) -> None:
    assert held.ask() == Answer(Standing.HELD, PROMISE)
    held.time += 4
    assert held.ask() == Answer(Standing.HELD, PROMISE)


def test_nothing_is_promised_beyond_the_lease(held: Held) -> None:
    held.time = 127.0
    assert held.ask() == Answer(Standing.HELD, 3.0)
    held.time = 140.0  # a heartbeat has prolonged it, of which the scheduler does not hear
    assert held.ask() == Answer(Standing.HELD, 0.0)


def test_who_asks_later_is_promised_nothing(held: Held) -> None:
    held.ask()
    assert held.ask("other", OTHER) == Answer(Standing.HELD, 0.0)
    assert held.ask() == Answer(Standing.HELD, PROMISE)


@pytest.mark.parametrize("asked", [True, False])
def test_blocks_go_when_their_reader_has_read_them(held: Held, asked: bool) -> None:
    if asked:
        held.ask()
    assert held.end(*D)
    assert held.ask() == READ
    assert held.ask("other", OTHER) == GONE


def test_blocks_that_nobody_asks_for_go_as_on_stock(held: Held) -> None:
    assert held.end("stock/0")
    assert held.ask() == GONE


def test_blocks_go_as_on_stock_if_workers_do_not_say_whom_they_have_heard(held: Held) -> None:
    """K20 without what notes it; or a plugin's, which makes some of the reports itself. There its
    readers do as on stock, too."""
    held.ask()
    assert held.end()
    assert held.ask() == GONE
    held.book.hear({"another": ["d/0"]})
    assert held.ask() == held.ask("other", OTHER) == READ


def test_of_ranks_of_two_engines_neither_has_read_them(held: Held) -> None:
    assert held.end("d/0", "other/0")
    assert held.ask() == GONE
    assert held.ask("other", OTHER) == GONE


def test_what_another_has_read_stays_while_it_is_promised(held: Held) -> None:
    held.ask()
    assert not held.end("other/0")
    assert held.ask("other", OTHER) == READ
    assert held.ask("third", frozenset()) == GONE
    held.time += PROMISE / 2
    assert held.ask() == Answer(Standing.HELD, PROMISE / 2)  # and no longer
    assert held.book.due() == set()
    held.time += PROMISE / 2
    assert held.book.due() == {"r"}
    assert held.book.free(["r"]) == {"r"}
    assert held.book.due() == set()
    assert held.ask() == GONE


def test_it_goes_as_soon_as_its_reader_is_heard_too(held: Held) -> None:
    held.ask(agents=frozenset())
    assert not held.end("d/0")
    held.ask()  # now it is known whose agent that is
    assert held.book.due() == {"r"}


@pytest.mark.parametrize("heard", [(), ("d/0",), ("other/0",)])
def test_a_lease_that_has_ended_is_gone(held: Held, heard: tuple[str, ...]) -> None:
    """Whoever has read the blocks. As long as one worker has them, nobody else gets them."""
    held.ask()
    held.book.expire(["r", "unknown"])
    assert held.ask() == Answer(Standing.HELD, 0.0)
    assert held.end(*heard)
    assert held.ask() == GONE


def test_the_next_of_that_id_is_another_lease(held: Held) -> None:
    second = held.book.hold("r", 200.0)
    assert second != held.token
    assert held.ask() == GONE
    assert held.book.answer(second, "d", D).standing is Standing.HELD


def test_what_the_book_does_not_hold_may_go(held: Held) -> None:
    held.book.hear({"unknown": ["d/0"]})
    assert held.book.free(["unknown"]) == {"unknown"}
    assert LeaseBook().answer("of another", "d", D) == GONE


def test_of_more_than_one_it_is_remembered_who_has_read_them(held: Held) -> None:
    held.end(*D)
    second = held.book.hold("r", 130.0)
    held.end(*D)
    assert held.ask() == held.book.answer(second, "d", D) == READ


def test_only_so_many_are_remembered(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_book, "MAX_READ", 2)
    tokens = [held.token]
    for n in range(3):
        tokens.append(held.book.hold("r", 130.0 + n))
        held.end(*D)
    assert [held.book.answer(token, "d", D) for token in tokens] == [GONE, GONE, READ, READ]
