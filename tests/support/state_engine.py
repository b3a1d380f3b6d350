"""An engine that knows of how many tokens a recurrent state is.

A block of states has one: that after the last token that a step computed there. From 0.30.0 on some
layers also export one from within a step, and what is found by a part of a block is copied first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.utils.math_utils import cdiv
from vllm.v1 import kv_cache_interface
from vllm.v1.request import Request

from tests.support.hybrid_engine import states_of
from tests.support.overlapped_engine import OverlappedEngine, kv_of

PLENTY = 2048


class StateEngine(OverlappedEngine):
    """Its groups are one of attention, and one of states."""

    def answers(self, req_id: str, budgets: Iterable[int] = ()) -> bool:
        """Go on in steps of at most so many tokens, then in large ones; whether it has ended."""
        for tokens in budgets:
            self.scheduler.max_num_scheduled_tokens = tokens
            self.advance()
        self.scheduler.max_num_scheduled_tokens = PLENTY
        for _ in range(20):
            self.advance()
        return self.finished.get(req_id) == "length"

    def _end(self) -> None:
        copies = getattr(self.steps[0].decided, "kv_cache_block_copies", None) or ()
        sources = [
            [self.cache.get((copy.src_block_id, offset), 0) for offset in range(self.block_size)]
            for copy in copies
        ]  # all are read before any is written
        for copy, source in zip(copies, sources, strict=True):
            self.cache.update(((copy.dst_block_id, at), kv) for at, kv in enumerate(source))
        super()._end()

    def _write(
        self, request: Request, tokens: Sequence[int], blocks: Sequence[Sequence[int]]
    ) -> None:
        attention, states = blocks
        super()._write(request, tokens, [attention])
        for token, (block, at) in self._places(tokens[-1:], states):
            self.cache.update(((block, other), 0) for other in range(self.block_size))
            self.cache[block, at] = kv_of(request, token)
        spec = states_of(self).kv_cache_spec
        exports = getattr(spec, "num_prefill_checkpoint_blocks", 0)  # from 0.30.0 on
        if exports and (exported := self._exported(tokens[0], tokens[-1] + 1)):
            block = states[cdiv(tokens[-1] + 1, self.block_size) - 2]
            self.cache[block, (exported - 1) % self.block_size] = kv_of(request, exported - 1)

    def _exported(self, start: int, end: int) -> int | None:
        """After how many tokens a step exports a state, as its layers decide."""
        _, states = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        unit = self.unit or self.block_size
        at = kv_cache_interface.get_mamba_prefill_checkpoint_position(
            end, unit, states.drop_eagle_checkpoint_block
        )
        valid = kv_cache_interface.is_mamba_prefill_checkpoint_valid(
            start, end, at, unit, self.block_size, 1
        )
        return at if valid else None
