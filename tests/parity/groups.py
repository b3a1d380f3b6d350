"""What D's scheduler takes of a P's blocks, however P and D have their caches in groups."""

from __future__ import annotations

import itertools

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.parity.scenario import LeftOutError, Observed, scenario
from tests.support.lying_params import GOOD
from tests.support.nixl_release import NixlConnectorScheduler
from tests.support.nixl_worker import make_vllm_config
from tests.support.release import since
from tests.support.ring_groups import has, kept_in

BLOCK = 16

PAIRS: dict[str, tuple[tuple[str, ...], tuple[str, ...], bool]] = {
    "full": (("full",), ("full",), False),
    "latent": (("full",), ("full",), True),
    "two latent": (("full", "full"), ("full", "full"), True),
    "latent of one group read into two": (("full",), ("full", "full"), True),
    "latent of two groups read into one": (("full", "full"), ("full",), True),
    "ring": (("full", "CircularBufferSpec"), ("full", "CircularBufferSpec"), False),
    "latent ring": (("full", "CircularBufferSpec"), ("full", "CircularBufferSpec"), True),
    "tail": (("full", "KpoolTailSpec"), ("full", "KpoolTailSpec"), False),
}
"""The groups of P and of D, and whether they are latent. A name that is none of the tests' own is
that of what a group of the release keeps: one block for a request, whatever its length."""


@scenario(*PAIRS)
def prompts_are_read(pair: str) -> Observed:
    """How many tokens of prompts of several lengths D is to read, and whether it waits for them."""
    theirs, ours, latent = PAIRS[pair]
    if theirs != ours and not since("0.30.0"):
        raise LeftOutError("before 0.30.0 the groups of P and D are the same ones")
    for kind in ours:
        if kind != "full" and not has(kind):
            raise LeftOutError(f"no {kind} in this release")
    config = make_vllm_config(mla=latent, hybrid=len(ours) > 1)
    scheduler = NixlConnectorScheduler(config, "D", kept_in(ours, mla=latent))
    found = {}
    for number, tokens in enumerate((1, BLOCK, BLOCK + 1, 5 * BLOCK)):
        ids = itertools.count(1)
        counts = [-(-tokens // BLOCK) if kind == "full" else 1 for kind in theirs]
        request = Request(f"r{number}", list(range(tokens)), SamplingParams(max_tokens=1), None)
        blocks = [list(itertools.islice(ids, count)) for count in counts]
        request.kv_transfer_params = {**GOOD, "remote_block_ids": blocks}
        found[str(tokens)] = list(scheduler.get_num_new_matched_tokens(request, 0))
    return found
