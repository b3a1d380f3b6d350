"""The stand-in for the model runner's slots of states copies what the release's own code copies.

What a kernel copies after a step, on later releases, is not compared.
"""

from __future__ import annotations

import inspect
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.v1.worker import mamba_utils

from tests.simulation.slots import Slots, Span

TOKENS = 4
R = "r"


class Released:
    """The release's functions, and what they would copy: from which slot to which."""

    def __init__(self, places: int) -> None:
        self.copied: list[tuple[int, int]] = []
        self._first: dict[str, int] = {}
        self.accepted = [1]
        spec = SimpleNamespace(block_size=TOKENS, num_speculative_blocks=places)
        self._buffers = SimpleNamespace(mamba_group_ids=[0], mamba_spec=spec, offset=0)
        self._signature = inspect.signature(mamba_utils.collect_mamba_copy_meta)

    def before(self, span: Span, *, fresh: bool) -> list[tuple[int, int]]:
        if fresh:
            self._first.clear()
            self.accepted[0] = 1
        return self._call(mamba_utils.preprocess_mamba, span)

    def after(self, span: Span, right: int) -> list[tuple[int, int]] | None:
        """None where a kernel does it."""
        self.accepted[0] = right + 1
        does = getattr(mamba_utils, "postprocess_mamba", None)
        return does and self._call(does, span)

    def _call(self, function: Any, span: Span) -> list[tuple[int, int]]:  # noqa: ANN401
        words = {
            "scheduler_output": SimpleNamespace(
                finished_req_ids=set(),
                preempted_req_ids=set(),
                scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
                num_scheduled_tokens={R: span.end - span.start},
                scheduled_spec_decode_tokens={R: [0] * span.guesses} if span.guesses else {},
            ),
            "kv_cache_config": None,
            "cache_config": SimpleNamespace(enable_prefix_caching=True),
            "mamba_state_idx": self._first,
            "input_batch": SimpleNamespace(req_ids=[R], num_accepted_tokens_cpu=self.accepted),
            "requests": {R: SimpleNamespace(num_computed_tokens=span.start)},
            "forward_context": {},
            "mamba_state_copy_funcs": (),
            "copy_bufs": self._buffers,
        }
        known = inspect.signature(function).parameters
        self.copied = []
        with (
            mock.patch.object(mamba_utils, "collect_mamba_copy_meta", self._note),
            mock.patch.object(mamba_utils, "do_mamba_copy_block"),
            mock.patch.object(
                mamba_utils,
                "get_mamba_groups",
                lambda _: (self._buffers.mamba_group_ids, self._buffers.mamba_spec),
            ),
        ):
            function(**{name: word for name, word in words.items() if name in known})
        return self.copied

    def _note(self, *args: Any, **named: Any) -> None:  # noqa: ANN401 - as the release calls it
        said = self._signature.bind(*args, **named).arguments
        source = said["src_block_idx"] + said["accept_token_bias"]
        self.copied.append((source, said["dest_block_idx"]))


def spans(chance: Random) -> list[tuple[Span, int]]:
    """A prompt, from where its prefix ends, and its answer; of each step, how many of its guesses
    are right."""
    at, prompt = chance.randrange(4) * TOKENS, chance.randint(13, 40)
    steps = []
    while at < prompt:
        end = min(prompt, at + chance.randint(1, 3 * TOKENS))
        steps.append((Span(at, end, 0), 0))
        at = end
    for _ in range(15):
        guesses = chance.randrange(4)
        right = chance.randint(0, guesses)
        steps.append((Span(at, at + 1 + guesses, guesses), right))
        at += 1 + right
    return steps


@pytest.mark.parametrize("seed", range(40))
def test_the_same_is_copied(seed: int) -> None:
    chance = Random(seed)  # noqa: S311 - repeatable is what it has to be
    ours, theirs = Slots("align", TOKENS), Released(places=3)
    for i, (span, right) in enumerate(spans(chance)):
        fresh = not i or chance.random() < 0.05
        assert ours.begin(R, span, fresh=fresh) == theirs.before(span, fresh=fresh)
        copied, judged = theirs.after(span, right), ours.judge(R, span, right)
        if copied is None:
            theirs.accepted[0] = ours._at[R][1]  # which the kernel notes, too
        else:
            assert judged == copied
