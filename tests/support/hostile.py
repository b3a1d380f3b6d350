"""What hostile clients and peers send, case by case: the same seed and number, the same case.

`tests.support.hostile_visits` sends it.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tests.support.lying_params import GOOD
from tests.support.serving_app import ENDPOINTS, MODEL, body

MARK = b"kvfix lease 1"
"""With what a question of K20 begins."""

_TEXTS = ["", "\ud800", "true", "5600", "P" * 5000, "P", "..", "a:1", "\0", "é" * 40]
_NUMBERS = [-1, 0, 1, 2, 16, 1024, 65535, 65536, 2**31, 2**63, 2**64, 2**70, -(2**70)]
_HOSTS = ["127.0.0.1", "localhost", "127.1", "::1", "0.0.0.0", "*", "a b", "[::1]", "127.0.0.1;"]  # noqa: S104 - sent, not bound
_SIZES = ["tp_size", "dcp_size", "pp_size"]
_FIELDS = ["model", "prompt", "messages", "input", "token_ids", "sampling_params", "max_tokens"]
_FIELDS += ["max_output_tokens", "stream", "temperature", "stop", "logprobs", "request_id", "user"]
_FIELDS += ["prompt_logprobs", "kv_transfer_params", "vllm_xargs", "metadata", "extra_args"]


class Places(NamedTuple):
    """Ports of this machine that a client may name."""

    nobody: int
    liar: int
    honest: int


class Case:
    """One case of a run."""

    def __init__(self, seed: str, number: int) -> None:
        self.number = number
        self.random = random.Random(f"{seed}/{number}")  # noqa: S311 - to be had again

    def junk(self, depth: int = 2) -> Any:  # noqa: ANN401 - on purpose
        """What a field may hold that should not."""
        pick = self.random
        kind = pick.randrange(9 if depth else 6)
        if kind < 3:
            return pick.choice([None, True, False, 0.5, -1e308])
        if kind < 5:
            return pick.choice(_NUMBERS) if kind == 3 else pick.randint(-5, 5)
        if kind == 5:
            return pick.choice(_TEXTS)
        if kind == 6:
            return {pick.choice(_TEXTS[:4]): self.junk(depth - 1)}
        return [self.junk(depth - 1) for _ in range(pick.randrange(4))]

    def params(self, places: Places) -> Any:  # noqa: ANN401 - on purpose
        """`kv_transfer_params`, in which up to four fields are no good."""
        pick = self.random
        if pick.random() < 0.03:
            return self.junk()
        params = copy.deepcopy(GOOD) | {
            "remote_engine_id": pick.choice(["P", "liar", "liar-2", "nobody"]),
            "remote_request_id": f"case-{self.number}",
            "remote_host": pick.choice(_HOSTS) if pick.random() < 0.3 else "127.0.0.1",
            "remote_port": pick.choice(places),
            "remote_block_ids": [[pick.randrange(1, 60) for _ in range(pick.randrange(5))]],
        }
        if pick.random() < 0.2:
            params["remote_lease"] = pick.choice(["x" * 32, self.junk()])
        for name in pick.sample([*params, *_SIZES, "remote_num_tokens"], pick.randrange(5)):
            if pick.random() < 0.3:
                params.pop(name, None)
            else:
                params[name] = pick.choice(_NUMBERS) if name in _SIZES else self.junk()
        return params

    def request(self, places: Places) -> tuple[str, bytes]:
        """A path of the API server and a body for it."""
        pick = self.random
        path = pick.choice([*ENDPOINTS, "/invocations"])
        if path in ENDPOINTS:
            request = body(path, self.params(places))
        else:
            request = {"model": MODEL, "prompt": "hi", "kv_transfer_params": self.params(places)}
        if pick.random() < 0.5:
            request |= {"stream": True}
        if path != "/inference/v1/generate" and pick.random() < 0.5:
            long = "x" * pick.randrange(1, 70)
            request |= {"prompt": long, "input": long} if "messages" not in request else {}
        if pick.random() < 0.3:
            request[pick.choice(_FIELDS)] = self.junk()
        if pick.random() < 0.05:
            request[pick.choice(_TEXTS)] = self.junk()
        raw = json.dumps(request).encode()
        return path, self.damaged(raw) if pick.random() < 0.1 else raw

    def damaged(self, raw: bytes) -> bytes:
        """Bytes of which some are others, or missing, or more."""
        pick = self.random
        damaged = bytearray(raw)
        for _ in range(pick.randrange(1, 4)):
            at = pick.randrange(len(damaged) + 1)
            damaged[at : at + pick.randrange(3)] = pick.randbytes(pick.randrange(4))
        return bytes(
            damaged[: pick.randrange(len(damaged) + 1)] if pick.random() < 0.3 else damaged
        )

    def question(
        self, good: Sequence[object], lease: Sequence[object], *, readable: bool = True
    ) -> list[bytes]:
        """The frames of a message to the side channel: of a handshake, or about a lease.

        What is not `readable` has another number of frames or parts, or is no MessagePack.
        """
        pick = self.random
        asked: Any = list(good)
        for _ in range(pick.randrange(3)):
            asked[pick.randrange(len(asked))] = pick.choice([self.junk(1), b"get_meta_msg", 0, 7])
        frames = [b"", _packed(asked) or _packed(good)]
        if pick.random() < 0.4:
            about: Any = list(lease)
            about[pick.randrange(len(about))] = self.junk(1)
            frames[0] = MARK + _packed(about if pick.random() < 0.8 else self.junk())
            if pick.random() < 0.3:
                frames[0] = MARK + self.damaged(frames[0])[len(MARK) :]
        if not readable:
            frames[1] = pick.choice([self.damaged(frames[1]), _packed(self.junk()), b""])
            frames = frames[: pick.randrange(1, 3)] * pick.randrange(1, 3)
        return frames

    def answer(self, good: bytes) -> bytes:
        """What a peer says of itself."""
        pick = self.random
        if pick.random() < 0.3:
            return pick.choice([b"", self.damaged(good), _packed(self.junk())])
        said = msgspec.msgpack.decode(good)
        about = msgspec.msgpack.decode(said["agent_metadata_bytes"])
        for name in pick.sample([*about], pick.randrange(3)):
            # What it says of its blocks is believed, memory for them included.
            about[name] = pick.choice([-1, 0, 3]) if name == "num_blocks" else _small(self.junk())
        said["agent_metadata_bytes"] = _packed(about)
        return _packed(said)

    def notification(self, req_ids: Sequence[str]) -> bytes:
        """What a peer's agent sends a worker."""
        pick = self.random
        about = pick.choice([*req_ids, *_TEXTS, f"case-{self.number}"])
        text = f"{about}:{pick.choice([*_NUMBERS, 'x', '', '1:1', 1.5])}"
        if pick.random() < 0.2:
            text = "HB:" + ",".join(pick.choices([*req_ids, *_TEXTS], k=pick.randrange(5)))
        raw = text.encode(errors="surrogatepass")
        return self.damaged(raw) if pick.random() < 0.3 else raw


def _packed(value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError, TypeError):
        return b""


def _small(value: object) -> object:
    return value % 2**16 if isinstance(value, int) and not isinstance(value, bool) else value
