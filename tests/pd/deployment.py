"""One P, one D, and the prompts that go through them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.pd.client import Params, body, prefill, tokens_of
from tests.pd.server import BLOCK, Server, Side
from tests.support.harness import HarnessError

LEASE_S = 20
"""After this many seconds stock P frees what nobody fetched.

Up to 0.21 that is VLLM_NIXL_ABORT_REQUEST_TIMEOUT, later kv_lease_duration; each knows one only.
Longer than any test of refusals takes, or the end of an old lease would look like a release."""

SHORT_LEASE_S = 6
"""The lease where a test waits for its end. From 0.22.0 on D renews a lease six times while it
lasts, in whole seconds: a shorter one would be renewed in each step."""

TOKENS = 12
"""Length of each answer that `plain` knows."""


_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "it")


def _prompt(number: int) -> str:
    words = random.Random(number).choices(_WORDS, k=50)  # noqa: S311 - the same ones each time
    return f"{number:03d} {' '.join(words)}"[:106]


PROMPTS = tuple(map(_prompt, range(320)))
"""Prompts of 106 tokens that differ from their first block on. A plain server's greedy tokens are
others for each, so that of another prompt's KV some of them come out wrong."""
PROMPT_BLOCKS = -(-len(PROMPTS[0]) // BLOCK)
"""Blocks of a prompt, whose bytes are its tokens."""

Plain = dict[str, list[int]]
"""The greedy tokens of a plain server by prompt."""
Note = Callable[..., None]
"""Puts measured figures into the report, by name."""
Start = Callable[..., Server]
"""Starts a server that ends with the test; takes what `Server` takes."""


def leases_of(seconds: int) -> dict[str, object]:
    """Return what a server is started with whose leases last so long, on any release."""
    return {
        "transfer": {"kv_connector_extra_config": {"kv_lease_duration": seconds}},
        "environment": {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": str(seconds)},
    }


def wait_for_the_end_of_leases(p: Server, lease_s: int) -> None:
    """Wait until `p` holds no blocks.

    Raises:
        HarnessError: It does half a minute after the end of a lease.
    """
    deadline = time.monotonic() + lease_s + 30
    while held := p.blocks_held():
        if time.monotonic() > deadline:
            raise HarnessError(f"P holds {held} blocks half a minute after a lease", "none")
        time.sleep(0.2)


class Deployment:
    """One P and one D; `ready` brings back whichever a test has broken.

    D has no prefix cache, so whatever it does not compute has come from P.
    """

    def __init__(self, side: Side, model: Path, logs: Callable[[str], Path]) -> None:
        self._side, self._model, self._logs = side, model, logs
        self._servers: dict[str, Server] = {}

    @property
    def p(self) -> Server:
        """The server that prefills."""
        return self._servers["P"]

    @property
    def d(self) -> Server:
        """The server that decodes."""
        return self._servers["D"]

    def ready(self) -> Deployment:
        """Return with P and D up and no block of P held, starting anew what is not so."""
        for core, name in enumerate(("P", "D")):
            if name not in self._servers or not self._servers[name].healthy:
                self.restart(name, core)
        self.p.wait_ready()
        self.d.wait_ready()
        deadline = time.monotonic() + LEASE_S + 30
        while self.p.blocks_held():
            if time.monotonic() > deadline:
                self.restart("P", 0)
                self.p.wait_ready()
            time.sleep(0.5)
        return self

    def restart(self, name: str, core: int, port: int = 0, side_port: int = 0) -> None:
        """Start one of the two anew; does not wait for it."""
        if name in self._servers:
            self._servers.pop(name).stop()
        self._servers[name] = Server(
            self._side,
            name,
            self._model,
            self._logs(name),
            arguments=("--no-enable-prefix-caching",) if name == "D" else (),
            core=core,
            port=port,
            side_port=side_port,
            **leases_of(LEASE_S),  # type: ignore[arg-type]
        )

    def restart_p_in_place(self) -> None:
        """Start P anew where the old one was, as a supervisor does, and wait for it."""
        self.restart("P", 0, port=self.p.port, side_port=self.p.side_port)
        self.p.wait_ready()

    def stale(self) -> Params:
        """Return what P once answered for a prompt like those of `PROMPTS`; D has fetched it."""
        prompt = PROMPTS[0].replace("000", "old")
        params = prefill(self.p, prompt)
        self.d.post("/v1/completions", body(prompt, 1, kv_transfer_params=params))
        return params

    def released(self, patience: float = 1.0, *, down_to: int = 0) -> float | None:
        """Return after how many seconds P held its blocks no more; None if it still does.

        Args:
            down_to: How many blocks it may hold.
            patience: Seconds to go on asking. The last question is put after them: what counts is
                what P held then, not how long a busy machine takes to answer.
        """
        begin = time.monotonic()
        while True:
            asked = time.monotonic() - begin
            held = self.p.blocks_held()
            took = time.monotonic() - begin
            if held <= down_to:
                return took
            if asked > patience:
                return None
            time.sleep(0.02)

    def stop(self) -> None:
        """End both."""
        for server in self._servers.values():
            server.stop()


def ask(d: Server, prompt: object, params: Params) -> httpx.Response:
    """Have `d` go on with what a P is said to hold."""
    return d.post("/v1/completions", body(prompt, TOKENS, kv_transfer_params=params))


def served(d: Server, prompt: object, params: Params) -> list[list[int]] | str:
    """Return the tokens of each choice that `d` answers with, wherever the KV came from.

    Where there are none, or D has answered and is gone, return what happened instead.
    """
    answer = ask(d, prompt, params)
    if answer.status_code != 200:
        return f"{answer.status_code}: {answer.text}"
    return tokens_of(answer.json()) if d.healthy else "D answered, and is gone"
