"""40364, K01, K08: a P that cannot be reached, or goes away, costs no more than its own requests.

While each failure happens, other requests run on D. None of them may notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

import httpx
import pytest

from tests.pd.client import body, gone_p, lying_p, prefill, tokens_of
from tests.pd.deployment import TOKENS, Deployment, Note, Plain, Start, ask, served
from tests.pd.server import Server

RUNNING = 4
LONG = 300


@contextmanager
def undisturbed(d: Server, prompts: Iterator[str], plain: Plain) -> Iterator[None]:
    """Run requests without P on `d` meanwhile; each must end as on a plain server."""
    with ThreadPoolExecutor(RUNNING) as pool:
        running: dict[str, Future[httpx.Response]] = {
            prompt: pool.submit(d.post, "/v1/completions", body(prompt, LONG))
            for prompt in islice(prompts, RUNNING)
        }
        yield
        for prompt, future in running.items():
            answer = future.result()
            assert answer.status_code == 200, f"another request was disturbed: {answer.text}"
            tokens = tokens_of(answer.json())[0]
            assert len(tokens) == LONG
            assert tokens[:TOKENS] == plain[prompt]


FAILURES = {"dead port": gone_p, "wrong engine id": lying_p}


@pytest.mark.shows("40364")
@pytest.mark.parametrize("failure", FAILURES)
def test_recompute_after_a_failed_handshake(
    failure: str, pd: Deployment, plain: Plain, prompts: Iterator[str]
) -> None:
    with undisturbed(pd.d, prompts, plain):
        params = FAILURES[failure](pd.stale(), "recompute")
        for prompt in islice(prompts, 2):  # the second one meets what the first has left
            assert served(pd.d, prompt, params) == [plain[prompt]]
    prompt = next(prompts)
    assert served(pd.d, prompt, prefill(pd.p, prompt)) == [plain[prompt]]


@pytest.mark.shows("40364", "40986")
def test_fail_after_a_failed_handshake(
    pd: Deployment, start: Start, plain: Plain, prompts: Iterator[str], note: Note
) -> None:
    """Under the policy `fail` each of these requests gets an error, and only these."""
    policy = {"kv_load_failure_policy": "fail"}
    with start("D-fail", transfer=policy, core=1).wait_ready() as d:
        answers = {}
        stale = pd.stale()
        with undisturbed(d, prompts, plain):
            for failure, change in FAILURES.items():
                prompt = next(prompts)
                answer = ask(d, prompt, change(stale, "fail"))
                answers[failure] = answer.status_code
                assert d.healthy, f"D is gone after {failure}: {answer.status_code}"
                assert answer.status_code >= 400, f"{failure} was answered: {answer.text}"
            lost = gone_p(stale, "stream")
            asked = body(next(prompts), TOKENS, kv_transfer_params=lost, stream=True)
            stream = d.post("/v1/completions", asked).text
            assert '"error"' in stream, f"a stream says nothing of its failure: {stream}"
        prompt = next(prompts)
        assert served(d, prompt, prefill(pd.p, prompt)) == [plain[prompt]]
        note(answers=answers)


@pytest.mark.shows("40364")
def test_another_dtype_is_refused_and_recomputed(
    pd: Deployment, start: Start, prompts: Iterator[str]
) -> None:
    """Such a P is of no use to D. D says so in its log, and works."""
    prompt = next(prompts)
    words = ("--dtype", "bfloat16", "--no-enable-prefix-caching")
    with start("D-bfloat16", transfer={}, core=1, arguments=words).wait_ready() as d:
        own = tokens_of(d.post("/v1/completions", body(prompt, TOKENS)).json())
        answer = ask(d, prompt, pd.stale())
        assert d.healthy, f"D is gone: {answer.status_code}"
        assert answer.status_code == 200, answer.text
        assert tokens_of(answer.json()) == own
        assert "compatibility hash mismatch" in d.text()


@pytest.mark.parametrize(
    "acquainted",
    [
        pytest.param(True, id="D has met the old P"),  # the read fails, which stock survives
        pytest.param(False, id="D has not", marks=pytest.mark.shows("40364")),
    ],
)
def test_a_request_of_a_p_that_was_started_anew(
    acquainted: bool, pd: Deployment, plain: Plain, prompts: Iterator[str], note: Note
) -> None:
    """The same address, another engine: old requests are computed by D, new ones fetched."""
    if not acquainted:
        pd.restart("D", 1)  # it comes up while P does
    known, old, new = islice(prompts, 3)
    if acquainted:
        assert served(pd.d, known, prefill(pd.p, known)) == [plain[known]]
    params = prefill(pd.p, old)
    pd.restart_p_in_place()
    pd.d.wait_ready()
    assert served(pd.d, old, params) == [plain[old]]
    moved = pd.d.metric("nixl_bytes_transferred_sum")
    assert served(pd.d, new, prefill(pd.p, new)) == [plain[new]]
    moved = pd.d.metric("nixl_bytes_transferred_sum") - moved
    note(bytes_moved_from_the_new_p=moved)
    assert moved > 0


def test_p_is_killed_during_a_transfer(
    pd: Deployment, plain: Plain, prompts: Iterator[str], note: Note
) -> None:
    """P hangs while D reads from it, and is then killed: no orderly end of anything."""
    known, lost = islice(prompts, 2)
    assert served(pd.d, known, prefill(pd.p, known)) == [plain[known]]  # they have shaken hands
    params = prefill(pd.p, lost)
    with undisturbed(pd.d, prompts, plain):
        pd.p.freeze()
        answers: list[Any] = []
        reader = threading.Thread(target=lambda: answers.append(ask(pd.d, lost, params)))
        reader.start()
        time.sleep(2.0)
        assert not answers, "nobody was there to answer the read"
        pd.p.kill()
        killed = time.monotonic()
        reader.join()
        note(answered_after_s=round(time.monotonic() - killed, 2))
        assert answers and answers[0].status_code == 200, answers
        assert tokens_of(answers[0].json()) == [plain[lost]]
    assert pd.d.healthy
