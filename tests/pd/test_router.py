"""41269 as an operator meets it: through the router, with clients that ask for too many tokens.

The router asks P for one token and D for what the client wants. So whoever asks for more than the
model has room for is refused by D alone, after P has prefilled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.pd.client import body, tokens_of
from tests.pd.deployment import LEASE_S, TOKENS, Deployment, Note, Plain
from tests.pd.model import CONTEXT
from tests.pd.router import Router
from tests.pd.server import BLOCKS, Server

COMPLETIONS = "/v1/completions"
REFUSED = 50


@pytest.fixture
def router(pd: Deployment, logs: Callable[[str], Path]) -> Iterator[Router]:
    with Router(pd.p, pd.d, logs("router")) as router:
        yield router


def test_the_router_serves(
    router: Router, pd: Deployment, plain: Plain, prompts: Iterator[str]
) -> None:
    moved = pd.d.metric("nixl_bytes_transferred_sum")
    for prompt in islice(prompts, 8):
        answer = router.post(COMPLETIONS, body(prompt, TOKENS))
        assert answer.status_code == 200, answer.text
        assert tokens_of(answer.json()) == [plain[prompt]]
    assert pd.d.metric("nixl_bytes_transferred_sum") > moved
    assert pd.released() is not None


@pytest.mark.shows("41269")
def test_clients_that_ask_for_too_many_tokens(
    router: Router, pd: Deployment, prompts: Iterator[str], note: Note
) -> None:
    """The README's picture is drawn from the usage that is watched here."""
    refused = lost = 0
    with Watch(pd.p) as watch:
        while refused < REFUSED:
            answer = router.post(COMPLETIONS, body(next(prompts), CONTEXT + 1))
            if answer.status_code == 500 and "error sending request" in answer.text:
                lost += 1  # on the way to P, see tests/pd/router.py
                if lost == 4 * REFUSED:
                    raise RuntimeError("the router loses nearly all that it is sent")
            else:
                assert answer.status_code == 400, answer.text
                refused += 1
            time.sleep(0.02)  # or the router takes up a connection that P is closing
        last = watch.now()
        released = pd.released()
        held_for = released or pd.released(patience=2.0 * LEASE_S)
        time.sleep(max(0.0, last + 1.5 - watch.now()))
    note(
        refused=refused,
        lost_by_the_router=lost,
        lease_s=LEASE_S,
        last_refusal_s=last,
        peak_usage=max(usage for _, usage in watch.seen),
        usage_after_1_s=next(usage for t, usage in watch.seen if t > last + 1.0),
        released_s=held_for and round(held_for, 2),
        usage=watch.seen,
    )
    assert released is not None, "P still holds blocks of requests that D refused"


class Watch:
    """Looks at the KV-cache usage of a server five times a second.

    Attributes:
        seen: (seconds since the beginning, usage from 0 to 1).
    """

    def __init__(self, server: Server) -> None:
        self.seen: list[tuple[float, float]] = []
        self._server = server
        self._begin = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def now(self) -> float:
        """Return the seconds since the beginning."""
        return round(time.monotonic() - self._begin, 2)

    def _look(self) -> None:
        while not self._done.wait(0.2):
            held = self._server.blocks_held()
            self.seen.append((self.now(), round(held / (BLOCKS - 1), 3)))
