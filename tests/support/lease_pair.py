"""P and D with vLLM's own schedulers and side channel between them, and NIXL scripted.

What P hands out is what D is asked for; D's questions reach P's own handshake listener over the
loopback interface. Reads and notifications are the test's: it says when a read ends, and what P's
worker hears.

    with prefill_server() as p:
        offer = p.prefill("asked", PROMPT)
        d = decode_server()
        d.send("answered", PROMPT, offer)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from vllm import envs

from tests.support.decode_engine import Step
from tests.support.harness import HarnessError, building
from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.offering import answer_handshakes, keep_answers, listen, scheduler_part

LEASE = 0.05
"""Seconds for which P keeps what nobody reads."""


class Server(IdleEngine):
    """An engine whose answers are kept.

    Attributes:
        agent: what NIXL calls its worker.
        answers: request id -> the `kv_transfer_params` that its client was answered with.
    """

    @building("a server")
    def __init__(self, agent: str, **config: Any) -> None:  # noqa: ANN401 - handed on
        super().__init__(**config)
        self.agent = agent
        vars(nixl_of(self.worker))["name"] = agent
        self.answers = keep_answers(self)

    @property
    def part(self) -> Any:  # noqa: ANN401 - of another name from 0.24.0 on
        """NIXL's part of the scheduler."""
        return scheduler_part(self)

    def offer(self, req_id: str) -> dict[str, Any]:
        """What a request was answered with, for a peer that has shaken hands with it as "P".

        Raises:
            HarnessError: it was not answered.
        """
        if req_id not in self.answers:
            raise HarnessError(f"no answer to {req_id}", "one, as its prompt is computed")
        answer = self.answers[req_id] | {"remote_engine_id": "P"}
        # From 0.33.0 on it would do so again for another generation.
        answer.pop("remote_registration_generation", None)
        return answer


class PrefillServer(Server):
    """P, listening for peers."""

    @building("a prefill server")
    def __init__(self, lease: float, **config: Any) -> None:  # noqa: ANN401 - handed on
        super().__init__("P/0", **config)
        listen(self, lease)

    def leave(self) -> None:
        """Stop listening, and know nothing more, as if the process had ended."""
        self.part.shutdown()
        vars(self.part).pop("_confirmed_reads", None)

    def leave_unanswered(self) -> None:
        """Let nothing that is asked from now on reach it, until `answer_again`."""
        self.part.shutdown()

    def answer_again(self) -> None:
        """Answer what is asked from now on, and what was meanwhile."""
        self.part._stop_event = threading.Event()
        self.part._nixl_handshake_listener_t = None
        answer_handshakes(self)

    def prefill(self, req_id: str, prompt: Sequence[int]) -> dict[str, Any]:
        """Compute a prompt.

        Returns:
            The parameters with which D is asked to read its KV.
        """
        self.send(req_id, prompt, {"do_remote_decode": True}, max_tokens=1)
        for _ in range(4):  # also tells the worker of the lease
            self.step()
        return self.offer(req_id)

    def hears_of(self, d: Server) -> None:
        """Let its worker hear what a decode server has sent, and take a step."""
        nixl_of(self.worker).inbox[d.agent] = nixl_of(d.worker).heard.pop("P/0", [])
        self.step()
        self.step()

    def outlive_leases(self) -> None:
        """Wait until the leases that it has given have ended, and take the steps that see it."""
        time.sleep(2 * LEASE)
        self.step()
        self.step()


@contextlib.contextmanager
def prefill_server(
    lease: float = LEASE,
    **config: Any,  # noqa: ANN401 - handed on
) -> Iterator[PrefillServer]:
    """P, until the end of the block; it keeps what nobody reads for `lease` seconds."""
    settings: Any = {
        "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": lease,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    }
    with mock.patch.multiple(envs, create=True, **settings):
        server = PrefillServer(lease, **config)
        try:
            yield server
        finally:
            server.part._stop_event.set()  # its thread sees that within a second


def decode_server(agent: str = "D/0", **config: Any) -> Server:  # noqa: ANN401 - handed on
    """D, which has taken a step before and has shaken hands with P."""
    server = Server(agent, **config)
    connect(server.worker, "P")
    server.step()
    return server


def computed_of(steps: Sequence[Step], req_id: str) -> int:
    """How many tokens of a request an engine has computed in these steps."""
    return sum(end - start for step in steps for start, end in [step.computed.get(req_id, (0, 0))])
