"""The ecosystem's own router (`vllm-router`), in front of one P and one D."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx

from tests.pd.machine import Group, free_ports
from tests.pd.server import Server, client
from tests.support.harness import HarnessError

_START_S = 240.0


class Router:
    """A running router; its clients see one server.

    It asks P for one token, passes what P answers to D, and gives D the client's own body. What D
    alone refuses has therefore been prefilled by P.

    Before that it has both of them tokenize the client's own body (`/render`) and goes on whatever
    they answer. Where P refuses it there, vLLM closes the connection (see `client`), and now and
    then the router is quicker: it answers 500, "error sending request ... reset by peer".
    """

    def __init__(self, p: Server, d: Server, log: Path) -> None:
        """Start it and wait until it answers."""
        port, metrics = free_ports(2)
        words = [
            str(Path(sys.executable).with_name("vllm-router")),
            "--vllm-pd-disaggregation", "--prefill", p.url, "--decode", d.url,
            "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics),
        ]  # fmt: skip
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._group = Group(words, {}, log)
        self._client = client(self.url)
        deadline = time.monotonic() + _START_S
        while not self._healthy():
            if not self._group.alive or time.monotonic() >= deadline:
                said = log.read_text(errors="replace")[-2000:]
                raise HarnessError(f"no router:\n{said}", f"an answer at {self.url}")
            time.sleep(0.1)

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._group.stop()

    def post(self, path: str, body: object) -> httpx.Response:
        """Post a body as JSON and return the whole answer."""
        return self._client.post(path, json=body)

    def _healthy(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx.TransportError:
            return False
