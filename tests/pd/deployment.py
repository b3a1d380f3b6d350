"""One P, one D, and the prompts that go through them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.pd.client import body, tokens_of
from tests.pd.server import Server, Side

LEASE_S = 60
"""VLLM_NIXL_ABORT_REQUEST_TIMEOUT of P: after this many seconds stock frees what nobody fetched."""

TOKENS = 12
"""Length of each answer that `plain` knows."""

PROMPTS = tuple(f"{n:03d} " + "the quick brown fox jumps over it " * 3 for n in range(320))
"""Prompts of 106 tokens, seven blocks, that differ in their first."""

Note = Callable[..., None]
"""Puts measured figures into the report, by name."""
Start = Callable[..., Server]
"""Starts a server that ends with the test; takes what `Server` takes."""


class Deployment:
    """One P and one D; `ready` brings back whichever a test has broken."""

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

    def restart(self, name: str, core: int) -> None:
        """Start one of the two anew; does not wait for it."""
        if name in self._servers:
            self._servers.pop(name).stop()
        self._servers[name] = Server(
            self._side,
            name,
            self._model,
            self._logs(name),
            transfer={},
            environment={"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": str(LEASE_S)},
            core=core,
        )

    def decode(self, prompt: str, params: dict[str, object] | None, **more: object) -> list[int]:
        """Have D go on with `prompt` after P, and return its tokens."""
        asked = body(prompt, TOKENS, kv_transfer_params=params, **more)
        answer = self.d.post("/v1/completions", asked)
        assert answer.status_code == 200, (answer.status_code, answer.text, self.d.tail())
        return tokens_of(answer.json())[0]

    def released(self, patience: float = 1.0) -> float | None:
        """Return after how many seconds P held no block any more; None if it still does.

        Args:
            patience: Seconds to go on asking. The last question may be answered later than that,
                which counts against P, not for it.
        """
        begin = time.monotonic()
        while True:
            held = self.p.blocks_held()
            took = time.monotonic() - begin
            if not held:
                return took
            if took > patience:
                return None
            time.sleep(0.02)

    def stop(self) -> None:
        """End both."""
        for server in self._servers.values():
            server.stop()
