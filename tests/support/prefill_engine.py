"""A prefill engine whose steps overlap: what the scheduler hands out, and what is in those blocks.

vLLM's scheduler and NIXL's connector, as released (or patched), without a model. `schedule` decides
a step and `update` ends the oldest one, so a test can let steps overlap as the engine core does
under async scheduling (two) and with pipeline stages (one each). What a step computes is in the KV
cache when it has ended: whoever reads before that may be too early.

    engine = PrefillEngine()
    engine.prefill("asked", range(40))
    engine.schedule()
    engine.update()
    assert engine.handed_out["asked"] == list(range(40))
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.decode_engine import TOKEN, DecodeEngine
from tests.support.harness import HarnessError, building

_Cache: TypeAlias = dict[tuple[int, int], int]
"""Block and place in it -> the token there."""


class PrefillEngine(DecodeEngine):
    """One rank of tensor parallelism and its scheduler, stepped in two halves.

    Attributes:
        answers: request id -> the `kv_transfer_params` that its client is answered with, once the
            request has finished; None if there are none.
        handed_out: request id -> the tokens whose KV the blocks held that its answer names, when
            it was given; those of the first group, one after the other.
        read: requests that a decode engine has read when the next step ends.
        tokens: request id -> the tokens that its client was sent.
    """

    @building("a prefill engine")
    def __init__(
        self,
        *,
        async_scheduling: bool = True,
        step_tokens: int | None = None,
        drafts: int = 0,
        **config: Any,  # noqa: ANN401 - of `DecodeEngine`
    ) -> None:
        super().__init__(**config)
        kind: type[Scheduler] = AsyncScheduler if async_scheduling else Scheduler
        self.scheduler = kind(
            vllm_config=self.worker.vllm_config,
            kv_cache_config=self.worker.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.worker.vllm_config),
            block_size=self.block_size,
        )
        if step_tokens is not None:
            self.scheduler.max_num_scheduled_tokens = step_tokens
        self.guess(drafts)
        self.answers: dict[str, dict[str, Any] | None] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.handed_out: dict[str, list[int]] = {}
        self.read: set[str] = set()
        self._in_flight: deque[tuple[SchedulerOutput, dict[str, list[int]], _Cache]] = deque()
        self._kv: _Cache = {}

    @property
    def block_size(self) -> int:
        """Tokens in a block of the first group."""
        size: int = self.worker.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        return size

    def prefill(
        self,
        req_id: str,
        prompt: Iterable[int],
        *,
        max_tokens: int = 1,
        params: dict[str, Any] | None = None,
        **sampling: Any,  # noqa: ANN401 - of `SamplingParams`
    ) -> Request:
        """Add a request whose KV a decode engine is to read, or one with other `params`."""
        params = {"do_remote_decode": True} if params is None else params
        return self.send(req_id, prompt, params, max_tokens=max_tokens, **sampling)

    def schedule(self) -> dict[str, int]:
        """Decide a step.

        Returns:
            How many tokens of which request it computes.
        """
        decided = self.scheduler.schedule()
        sampled: dict[str, list[int]] = {}
        written: _Cache = {}
        for req_id, count in decided.num_scheduled_tokens.items():
            request = self.scheduler.requests[req_id]
            end = request.num_computed_tokens  # counted in advance
            written |= self._written(request, end - count, end)
            sampled[req_id] = [] if request.is_prefill_chunk else [TOKEN]
        self._in_flight.append((decided, sampled, written))
        return dict(decided.num_scheduled_tokens)

    def update(self) -> None:
        """End the oldest step under way, and hand the scheduler what it has sampled."""
        if not self._in_flight:
            raise HarnessError("no step under way", "one that `schedule` began")
        decided, sampled, written = self._in_flight.popleft()
        self._kv |= written
        outputs = self.scheduler.update_from_output(
            decided,
            ModelRunnerOutput(
                req_ids=list(sampled),
                req_id_to_index={req_id: index for index, req_id in enumerate(sampled)},
                sampled_token_ids=list(sampled.values()),
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=None,
                kv_connector_output=KVConnectorOutput(finished_sending=self.read or None),
            ),
        )
        self.read = set()
        for output in (one for per_client in outputs.values() for one in per_client.outputs):
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                answer = output.kv_transfer_params
                self.answers[output.request_id] = answer
                self.handed_out[output.request_id] = self._held(
                    (answer or {}).get("remote_block_ids")
                )

    def run(self, steps: int, *, at_once: int = 2) -> None:
        """Go on for so many steps, `at_once` of which overlap, and then until all are over."""
        for _ in range(steps):
            while self.under_way < at_once:
                self.schedule()
            self.update()
        while self.under_way:
            self.update()

    @property
    def under_way(self) -> int:
        """How many steps have been decided and have not ended."""
        return len(self._in_flight)

    def leave(self, req_id: str) -> None:
        """Its client leaves."""
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def _held(self, blocks: Sequence[Sequence[int]] | None) -> list[int]:
        places = [(block, i) for block in (blocks or [[]])[0] for i in range(self.block_size)]
        return [self._kv[place] for place in places if place in self._kv]

    def _written(self, request: Request, start: int, end: int) -> _Cache:
        """What a step writes that computes these positions of a request."""
        known = request.all_token_ids
        [blocks, *_] = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return {
            (blocks[i // self.block_size], i % self.block_size): (
                known[i] if i < len(known) else TOKEN  # a step under way samples it
            )
            for i in range(start, end)
        }
