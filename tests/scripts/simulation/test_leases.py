"""Every order in which P's leases and the reads of D can go, with the modules that judge them.

P holds the blocks of one request. Readers, on engines of their own, ask about the lease, read, and
NIXL tells P when they have. A message may come at any time, after any other, twice or never; an
engine may stop between any two of its steps; the lease may end at any time after its deadline; P
may start again, and so may a reader, which then asks and reads anew as somebody else. All of that
is searched, with small whole numbers for seconds. No reader may use what it read while the blocks
were, at any time, somebody else's; and each comes to an end.

The book and the checks are the real ones. What is assumed of the rest stands in `Rules`, and where
a rule is needed a test below takes it away and finds what goes wrong without it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import sys
from collections import deque
from collections.abc import Iterator
from enum import Enum, IntEnum
from typing import Any, NamedTuple
from unittest import mock

import pytest

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import lease_book, read_check
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease_book import (
    LeaseBook,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.read_check import ReadCheck, Verdict

# The largest of these searches take 15 s of a core that has nothing else to do.
pytestmark = pytest.mark.timeout(900)

REQUEST = "r"


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """Look for no garbage: a search keeps all that it makes, a million tuples."""
    gc.disable()
    yield
    gc.enable()


class Rules(NamedTuple):
    """What is assumed of readers, P and what lies between.

    Attributes:
        readers: how many of them ask and check what they read.
        others: how many there are beside them that tell P without having asked, as on stock.
        ranks: how many workers each of them has, which read and tell P for themselves; P frees when
            it has heard of so many ends.
        anew: how often one of them may start again, in all. What its old process has sent still
            arrives.
        failing: a read that is under way when P starts again fails.
        restarts: P may start again.
        keeps: P keeps what it has promised.
        notes: it notes that it frees what was promised, when that is over.
        smooth: no message is lost or late, and nothing ends the lease.
        twice: how often a question may arrive.
        follow: what becomes of a reader that has read rightly. Without it such a one only asks once
            more, if and when it likes to: all that matters to others, and fewer states.
        drift: by how much D's clock may fall behind P's; less than the margin.
        lease, promise, margin: seconds; the last two in the place of the modules' own.
        patience, again: for how many seconds questions may find no answer, and after how many one
            is asked again.
        end: when time stops.
    """

    readers: int = 1
    others: int = 0
    ranks: int = 1
    anew: int = 0
    failing: bool = True
    restarts: bool = True
    keeps: bool = True
    notes: bool = True
    smooth: bool = False
    twice: int = 1
    follow: bool = True
    drift: int = 0
    lease: int = 3
    promise: int = 3
    margin: int = 2
    patience: int = 1
    again: int = 2
    end: int = 5


class Phase(IntEnum):
    """Where a reader is."""

    AWAY = 0
    READING = 1
    READ = 2
    """The read is over, which the reader has not seen yet."""
    CHECKING = 3
    GOOD = 4
    """It has read what it wanted, and is not followed any further; see `Rules.follow`."""
    USED = 5
    REFUSED = 6


class Blocks(IntEnum):
    """Where the request's blocks are."""

    HELD = 0
    EXPIRED = 1
    """A worker of P has reported that the lease is over."""
    PROMISED = 2
    """Its workers are done with them, and P holds them for who was promised them."""
    FREE = 3
    GIVEN = 4


class Reader(NamedTuple):
    """A reader; `life` is how often it has started again, `read` are the ranks that are done."""

    phase: Phase = Phase.AWAY
    check: int = -1
    spoilt: bool = False
    questions: int = 0
    life: int = 0
    read: frozenset[int] = frozenset()


class Who(NamedTuple):
    """A reader between two of its starts: to P, and to the network, another one each time."""

    number: int
    life: int


class State(NamedTuple):
    """Everything there is, at one moment.

    `sent` are the messages that have ever been sent and can still arrive: ("question", who, asked,
    times), ("answer", who, asked, answer), ("word", who, rank). `heard` is how many words P has.
    """

    now: int
    lags: tuple[int, ...]
    book: int
    blocks: Blocks
    restarted: bool
    readers: tuple[Reader, ...]
    sent: frozenset[tuple[Any, ...]]
    heard: int = 0


Event = tuple[object, ...]
"""What happens, in words that nobody reads but of a history that must not be."""


class Clock:
    """P's, which shows what it is set to."""

    now = 0

    def __call__(self) -> int:
        return self.now


class Kept:
    """Objects that are never changed: what is done to one is done to a copy, which is kept too.

    Equal ones have the same number.
    """

    def __init__(self, clock: Clock, *shared: object) -> None:
        self._clock = clock
        self._shared = {id(each): each for each in (clock, *shared)}
        self._objects: list[Any] = []
        self._numbers: dict[object, int] = {}
        self._done: dict[tuple[object, ...], tuple[int, Any]] = {}

    def keep(self, thing: object) -> int:
        number = self._numbers.setdefault(_frozen(thing), len(self._objects))
        if number == len(self._objects):
            self._objects.append(thing)
        return number

    def do(self, number: int, name: str, *arguments: Any) -> tuple[int, Any]:  # noqa: ANN401
        """Call a method; return the number of what the object has become, and what it said."""
        key = (self._clock.now, number, name, *arguments)
        if key not in self._done:
            thing = copy.deepcopy(self._objects[number], dict(self._shared))
            said = getattr(thing, name)(*arguments)
            self._done[key] = self.keep(thing), said
        return self._done[key]


def _frozen(thing: Any) -> Any:  # noqa: ANN401
    """What tells an object from others of its class: all values in it that are not machinery."""
    if isinstance(thing, set | frozenset):
        return frozenset(thing)
    if isinstance(thing, dict):
        return tuple((_frozen(k), _frozen(v)) for k, v in thing.items())
    if hasattr(thing, "__dict__") and not isinstance(thing, Enum):
        names = vars(thing).items()
        return tuple((name, _frozen(v)) for name, v in names if name not in ("_lock", "_clock"))
    return thing


class FoundError(Exception):
    """A history that must not be: one event a line."""


class Search:
    """All states that can be reached.

    Attributes:
        states: how many there are.
        ends: the phases in which readers ended, in those where nothing can happen any more.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.ends: set[tuple[Phase, ...]] = set()
        self._clock = Clock()
        first = LeaseBook(self._clock)
        self._books = Kept(self._clock, first._lock)
        self._checks = Kept(self._clock)
        self._token = first.hold(REQUEST, rules.lease)
        number = self._books.keep(first)
        empty = LeaseBook(self._clock)
        empty._lock = first._lock
        self._empty = self._books.keep(empty)
        count = rules.readers + rules.others
        begin = State(
            0, (0,) * rules.readers, number, Blocks.HELD, False, (Reader(),) * count, frozenset()
        )
        self._from: dict[State, tuple[State, Event] | None] = {begin: None}
        self.states = 0
        with (
            mock.patch.object(lease_book, "PROMISE", rules.promise),
            mock.patch.multiple(
                read_check, MARGIN=rules.margin, AGAIN=rules.again, PATIENCE=rules.patience
            ),
        ):
            self._search(begin)

    def _search(self, begin: State) -> None:
        known = self._from
        waiting = deque([begin])
        while waiting:
            state = waiting.popleft()
            self.states += 1
            last = True
            for event, after in self._events(state):
                here = state, event
                if known.setdefault(after, here) is here:  # a state is large: looked up once
                    waiting.append(after)
                last = last and after == state
            if last:
                self.ends.add(tuple(each.phase for each in state.readers))

    # What happens.

    def _events(self, state: State) -> Iterator[tuple[Event, State]]:
        if all(reader.phase >= Phase.GOOD for reader in state.readers):
            return
        yield from self._time(state)
        yield from self._prefill(state)
        for number, reader in enumerate(state.readers):
            yield from self._read(state, number, reader)
        for message in state.sent:
            yield from self._arrive(state, message)

    def _time(self, state: State) -> Iterator[tuple[Event, State]]:
        if state.now == self.rules.end or (self.rules.smooth and _under_way(state)):
            return
        ways = (
            (lag, lag + 1)
            if lag < self.rules.drift and Phase.AWAY < reader.phase < Phase.GOOD
            else (lag,)
            for lag, reader in zip(state.lags, state.readers, strict=False)
        )
        for lags in itertools.product(*ways):
            now = state.now + 1
            yield ("it is", now, "and D is behind by", lags), state._replace(now=now, lags=lags)

    def _prefill(self, state: State) -> Iterator[tuple[Event, State]]:
        rules = self.rules
        if state.blocks is Blocks.HELD and state.now >= rules.lease and not rules.smooth:
            book = self._book(state, "expire", (REQUEST,))[0]
            yield ("P's worker ends the lease",), _deaf(state, Blocks.EXPIRED, book)
        if state.blocks is Blocks.EXPIRED:
            yield ("P frees the blocks, for the lease is over",), self._free(state)
        if state.blocks is Blocks.PROMISED and self._book(state, "due")[1]:
            noted, unnoted = self._free(state), _deaf(state, Blocks.FREE, state.book)
            after = noted if self.rules.notes else unnoted
            yield ("P frees the blocks, for the promise is over",), after
        if state.blocks is Blocks.FREE:
            yield ("P gives the blocks away",), state._replace(blocks=Blocks.GIVEN)
        if rules.restarts and not state.restarted and not rules.smooth:
            readers = tuple(
                Reader(Phase.REFUSED) if rules.failing and reader.phase is Phase.READING else reader
                for reader in state.readers
            )
            yield (
                ("P starts again",),
                _deaf(state, Blocks.GIVEN, self._empty)._replace(restarted=True, readers=readers),
            )

    def _free(self, state: State) -> State:
        # What is free holds its KV as long as nobody else has it.
        book, freed = self._book(state, "free", (REQUEST,))
        keeps = self.rules.keeps and not freed
        return _deaf(state, Blocks.PROMISED if keeps else Blocks.FREE, book)

    def _read(self, state: State, number: int, reader: Reader) -> Iterator[tuple[Event, State]]:
        checks = number < self.rules.readers
        begun = Phase.AWAY < reader.phase < Phase.GOOD
        if begun and self.rules.anew > sum(each.life for each in state.readers):
            after = _with(_unanswered(state, number), number, Reader(life=reader.life + 1))
            yield ("reader", number, "starts again"), after
        if reader.phase is Phase.AWAY and not checks:
            reading = reader._replace(phase=Phase.READING)
            yield ("reader", number, "reads"), _with(state, number, reading)
        elif reader.phase is Phase.AWAY:
            if number > 0 and state.readers[number - 1] == Reader():
                return  # those that check are alike, so the first of them begins first
            now = self._now(state, number)
            check = self._checks.keep(ReadCheck(now))
            reader = reader._replace(phase=Phase.READING, check=check, questions=1)
            yield ("reader", number, "asks and reads"), self._ask(state, number, reader, now)
        elif reader.phase is Phase.READING:
            yield from self._end(state, number, reader)
        elif reader.phase is Phase.READ:
            check = self._checks.do(reader.check, "ends", self._now(state, number))[0]
            checking = reader._replace(phase=Phase.CHECKING, check=check)
            yield ("reader", number, "sees the end"), _with(state, number, checking)
        elif reader.phase is Phase.CHECKING:
            yield from self._judge(state, number, reader)
        elif reader.phase is Phase.GOOD and not reader.questions:
            asking = reader._replace(questions=1)
            after = self._ask(state, number, asking, self.rules.end)
            yield ("reader", number, "asks again"), after

    def _end(self, state: State, number: int, reader: Reader) -> Iterator[tuple[Event, State]]:
        spoilt = state.blocks is Blocks.GIVEN
        for rank in range(self.rules.ranks):
            if rank in reader.read or (rank > 0 and rank - 1 not in reader.read):
                continue  # ranks are alike, too
            ended = reader._replace(read=reader.read | {rank}, spoilt=reader.spoilt or spoilt)
            if len(ended.read) == self.rules.ranks:
                checks = number < self.rules.readers
                ended = ended._replace(phase=Phase.READ if checks else Phase.REFUSED)
            after = _tell(_with(state, number, ended), Who(number, reader.life), rank)
            if ended.phase is Phase.READ and not ended.spoilt and not self.rules.follow:
                good = Reader(Phase.GOOD, life=reader.life)
                after = _with(_unanswered(after, number), number, good)
            how = "spoilt" if spoilt else "well"
            yield ("reader", number, "has read rank", rank, how), after

    def _judge(self, state: State, number: int, reader: Reader) -> Iterator[tuple[Event, State]]:
        now = self._now(state, number)
        verdict = self._checks.do(reader.check, "verdict", now)[1]
        later = now + self.rules.patience
        if self._checks.do(reader.check, "verdict", later)[1] is Verdict.WAIT:
            self._found(state, f"reader {number} waits for ever")
        if verdict is Verdict.USE:
            if reader.spoilt:
                self._found(state, f"reader {number} uses what is somebody else's")
            yield ("reader", number, "uses it"), _over(state, number, Phase.USED)
        elif verdict is Verdict.REFUSE:
            yield ("reader", number, "refuses it"), _over(state, number, Phase.REFUSED)
        elif verdict is Verdict.ASK:
            # One with the read and one after it, and each again.
            if reader.questions == 2 + 2 * (self.rules.patience // self.rules.again):
                self._found(state, f"reader {number} asks for ever")
            check = self._checks.do(reader.check, "asks", now)[0]
            asking = reader._replace(check=check, questions=reader.questions + 1)
            yield ("reader", number, "asks again"), self._ask(state, number, asking, now)

    def _ask(self, state: State, number: int, reader: Reader, now: int) -> State:
        question = ("question", Who(number, reader.life), now, self.rules.twice)
        return _with(state, number, reader, state.sent | {question})

    def _arrive(self, state: State, message: tuple[Any, ...]) -> Iterator[tuple[Event, State]]:
        kind, who, *rest = message
        number = who.number
        reader = state.readers[number]
        if kind == "question":
            asked, times = rest
            left = state.sent - {message}
            if times > 1:
                left |= {("question", who, asked, times - 1)}
            agents = frozenset().union(*(_agents(who, rank) for rank in range(self.rules.ranks)))
            book, answer = self._book(state, "answer", self._token, str(who), agents)
            if reader.phase < Phase.GOOD and reader.life == who.life:
                left |= {("answer", who, asked, answer)}
            yield ("P answers reader", number, answer), state._replace(book=book, sent=left)
        elif kind == "answer":
            asked, answer = rest
            check = self._checks.do(reader.check, "hears", asked, answer)[0]
            left = state.sent - {message} if self.rules.smooth else state.sent
            if check != reader.check or left is not state.sent:
                after = _with(state, number, reader._replace(check=check), left)
                yield ("reader", number, "hears", answer), after
        elif state.blocks is Blocks.HELD:
            [rank] = rest
            book = self._book(state, "hear", _Told(who, rank))[0]
            left = state.sent - {message}
            after = state._replace(book=book, sent=left, heard=state.heard + 1)
            if after.heard == self.rules.ranks:
                after = self._free(after)
            yield ("P hears that reader", number, "has read rank", rank), after

    # What is known.

    def _now(self, state: State, number: int) -> int:
        return state.now - state.lags[number]

    def _book(self, state: State, name: str, *arguments: Any) -> tuple[int, Any]:  # noqa: ANN401
        self._clock.now = state.now
        return self._books.do(state.book, name, *arguments)

    def _found(self, state: State, what: str) -> None:
        events = [what]
        back = self._from[state]
        while back is not None:
            before, event = back
            events.append(" ".join(map(str, event)))
            back = self._from[before]
        raise FoundError("\n".join(reversed(events)))


class _Told(dict[str, frozenset[str]]):
    """What P's workers report of a reader's rank; one that can be looked up."""

    def __init__(self, who: Who, rank: int) -> None:
        super().__init__({REQUEST: _agents(who, rank)})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _agents(who: Who, rank: int) -> frozenset[str]:
    return frozenset({f"agent {rank} of {who.number}, {who.life}"})


def _with(
    state: State, number: int, reader: Reader, sent: frozenset[tuple[Any, ...]] | None = None
) -> State:
    now, lags, book, blocks, restarted, readers, before, heard = state
    readers = (*readers[:number], reader, *readers[number + 1 :])
    # Said in full: `_replace` takes three times as long, and this is done millions of times.
    return State(
        now, lags, book, blocks, restarted, readers, before if sent is None else sent, heard
    )


def _over(state: State, number: int, phase: Phase) -> State:
    return _with(_unanswered(state, number), number, Reader(phase))


def _unanswered(state: State, number: int) -> State:
    """Answers do not matter to a reader any more. Its questions do to others, but not when it
    asked; those that P has not seen stay apart."""
    mine = [m for m in state.sent if m[0] in ("question", "answer") and m[1].number == number]
    asked = sorted(m for m in mine if m[0] == "question")
    left = {(kind, who, nth, times) for nth, (kind, who, _, times) in enumerate(asked)}
    return state._replace(sent=state.sent.difference(mine) | left)


def _tell(state: State, who: Who, rank: int) -> State:
    if state.blocks is not Blocks.HELD:  # nobody heeds it
        return state
    return state._replace(sent=state.sent | {("word", who, rank)})


def _deaf(state: State, blocks: Blocks, book: int) -> State:
    """P's blocks are not held any more: no word about them changes that."""
    sent = frozenset(message for message in state.sent if message[0] != "word")
    return state._replace(book=book, blocks=blocks, sent=sent, heard=0)


def _under_way(state: State) -> bool:
    return any(kind in ("question", "answer") for kind, *_ in state.sent)


ONE = Rules()
TWO = Rules(readers=2, restarts=False, lease=2, promise=2, margin=1, end=3)
UNFOLLOWED = TWO._replace(follow=False)


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(ONE, id="a reader"),
        pytest.param(ONE._replace(others=1), id="and one that does not ask"),
        pytest.param(ONE._replace(ranks=2), id="two ranks"),
        pytest.param(ONE._replace(patience=2, again=1), id="one that asks again"),
        pytest.param(TWO, id="two readers"),
        pytest.param(
            UNFOLLOWED._replace(restarts=True, anew=1), id="two readers, one starts again, and P"
        ),
        pytest.param(UNFOLLOWED._replace(twice=2), id="two readers, and echoes"),
        pytest.param(
            UNFOLLOWED._replace(restarts=True, ranks=2),
            id="two readers with two ranks, P starts again",
        ),
        pytest.param(
            Rules(twice=2, drift=1, lease=2, promise=2, end=4), id="a clock that drifts, and echoes"
        ),
    ],
)
def test_whatever_happens_nobody_uses_what_is_somebody_elses(rules: Rules) -> None:
    search = Search(rules)
    assert search.states > 10_000
    used = Phase.USED if rules.follow else Phase.GOOD
    for reader in range(rules.readers):
        assert {used, Phase.REFUSED} <= {phases[reader] for phases in search.ends}


def test_a_read_in_time_is_used() -> None:
    """No message is lost, and nothing ends the lease; at the end of time some are not judged."""
    ends = Search(Rules(smooth=True, restarts=False)).ends
    assert ends == {(Phase.USED,), (Phase.CHECKING,)}


def use_all(check: ReadCheck, now: float) -> Verdict:
    return Verdict.WAIT if check._ended is None else Verdict.USE


@pytest.mark.parametrize(
    ("rules", "broken"),
    [
        pytest.param(ONE._replace(restarts=False), (ReadCheck, "verdict", use_all), id="unchecked"),
        pytest.param(ONE._replace(margin=0, drift=1, restarts=False), None, id="without a margin"),
        pytest.param(ONE._replace(others=1, keeps=False), None, id="a promise that is broken"),
        pytest.param(
            UNFOLLOWED,
            (lease_book, "_all_are_of", lambda heard, _: bool(heard)),
            id="read by anybody",
        ),
        pytest.param(UNFOLLOWED._replace(notes=False), None, id="freed, and not noted"),
        pytest.param(
            ONE._replace(anew=1, restarts=False),
            (sys.modules[__name__], "_agents", lambda who, _: frozenset({f"D{who.number}"})),
            id="an agent's name that comes again",
        ),
        pytest.param(
            ONE._replace(failing=False), None, id="a read that outlives the process it reads from"
        ),
    ],
)
def test_each_rule_is_needed(rules: Rules, broken: tuple[Any, str, Any] | None) -> None:
    change = mock.patch.object(*broken) if broken else contextlib.nullcontext()
    with change, pytest.raises(FoundError, match="uses what is somebody else's"):
        Search(rules)
