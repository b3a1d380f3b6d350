"""Two engines with real NIXL agents in this process, and every ratio of their blocks.

Whatever the ratios of kernel to logical blocks on P and D, D has to have the prompt's KV after a
real read, byte for byte, or has to refuse P in the handshake and read nothing.

`python -m tests.programs.block_ratios` prints what is wrong with the installed vLLM on its last
line, as JSON: for each case of `CASES` a list of faults.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from tests.support import vllm_cpu

vllm_cpu.prepare()

from vllm.v1.kv_cache_interface import MambaSpec  # noqa: E402 - the platform comes first

from tests.support.harness import HarnessError  # noqa: E402
from tests.support.kv_landing import Deployment, Engines  # noqa: E402
from tests.support.nixl_agents import REAL, await_finished  # noqa: E402
from tests.support.nixl_worker import hold, peer_port, receive  # noqa: E402

Prompt = tuple[int, int]
"""A prompt's length in tokens, and how many of its logical blocks D has cached."""

PROMPTS: list[Prompt] = [(3, 0), (8, 0), (13, 0), (32, 0), (45, 0)]
"""Kernel blocks hold four tokens, so these end within a kernel block, at its end, and within and
at the end of a logical block of each size."""


def every_ratio(deployment: Deployment) -> list[Deployment]:
    """`deployment` with each ratio of P and D."""
    return [
        dataclasses.replace(deployment, prefill_ratio=prefill, decode_ratio=decode)
        for prefill in (1, 2, 4)
        for decode in (1, 2, 4)
    ]


class TransferError(Exception):
    """D has not received what it asked for."""


class RealEngines(Engines):
    """Two engines whose agents move the bytes."""

    def __init__(self, deployment: Deployment, state_tokens: int | None) -> None:
        super().__init__(deployment, state_tokens=state_tokens, nixl=REAL)

    def connect(self) -> None:
        super().connect()
        # From 0.31.0 on D forgets an engine that is at no address which it knows. It is told the
        # address with a handshake over the network, and P serves none here.
        if hasattr(self.decode, "_track_remote_engine_replacement"):
            self.decode._track_remote_engine_replacement("P", "127.0.0.1", peer_port("P"))

    def transfer(self, ours: list[list[int]], theirs: list[list[int]]) -> None:
        for group in self.decode.kv_cache_config.kv_cache_groups:
            for name in group.layer_names:
                cache = self.decode.device_kv_caches[name]
                for part in cache if isinstance(group.kv_cache_spec, MambaSpec) else [cache]:
                    part.zero_()
        hold(self.prefill, "req-p")
        receive(self.decode, local_blocks=ours, remote_blocks=theirs)
        if (reported := await_finished(self.decode)) != (set(), {"req-d"}):
            raise TransferError(f"D reports {reported}")
        if lost := self.decode.get_block_ids_with_load_errors():
            raise TransferError(f"the read of {lost} failed")

    def close(self) -> None:
        self.decode.shutdown()
        self.prefill.shutdown()


def faults(
    deployment: Deployment, prompts: list[Prompt], state_tokens: int | None = None
) -> Iterator[str]:
    """What is wrong on D after each of `prompts`, or what one of the engines died of."""
    d = deployment
    engines = RealEngines(d, state_tokens)
    try:
        engines.connect()
        for seed, prompt in enumerate(prompts):
            for fault in engines.faults_of_a_prompt(*prompt, seed=seed):
                yield f"prompt {prompt}: {fault}"
            if (reported := await_finished(engines.prefill)) != ({"req-p"}, set()):
                yield f"prompt {prompt}: P reports {reported}"
                return
    except HarnessError:
        raise
    except RuntimeError as refusal:
        # Hybrids are served whatever the ratios: theirs follow from TP sizes, not from a flag. With
        # a sliding window beside the states D cannot, and 42097 refuses.
        whatever = "mamba" in d.groups and "sliding" not in d.groups
        must_serve = (whatever or d.prefill_ratio == d.decode_ratio) and d.makes_its_blocks
        if must_serve or "--block-size" not in str(refusal):
            yield f"refused: {refusal}"
    except (AssertionError, IndexError, TimeoutError, TransferError) as error:
        yield f"{type(error).__name__}: {error}"
    finally:
        engines.close()


def of_every_ratio(deployment: Deployment) -> list[str]:
    """The first three faults of each ratio."""
    return [
        f"{d.prefill_ratio} -> {d.decode_ratio}, {fault}"
        for d in every_ratio(deployment)
        for fault in list(faults(d, PROMPTS))[:3]
    ]


def main() -> None:
    """Run every case."""
    hybrid = Deployment(4, 4, groups=("full", "mamba"))
    split = Deployment(1, 1, prefix_caching=True)
    hits: dict[int, list[Prompt]] = {
        2: [(13, 1), (18, 1), (33, 2), (40, 1), (41, 5), (48, 2)],
        4: [(18, 1), (33, 1), (40, 2), (45, 1)],
    }
    found = {
        "attention": of_every_ratio(Deployment(1, 1)),
        "latent": of_every_ratio(Deployment(1, 1, mla=True)),
        "several groups": of_every_ratio(Deployment(1, 1, groups=("full", "sliding"))),
        # A state that fills half a logical block looks like half the ratio to a D that guesses.
        "hybrid": of_every_ratio(hybrid)
        + of_every_ratio(dataclasses.replace(hybrid, groups=("full", "sliding", "mamba")))
        + list(faults(hybrid, [(45, 0)], state_tokens=8)),
        "larger kernel blocks on D after a prefix hit": [
            f"1/{parts}, {fault}"
            for parts, prompts in hits.items()
            for fault in faults(dataclasses.replace(split, split=parts), prompts)
        ],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
