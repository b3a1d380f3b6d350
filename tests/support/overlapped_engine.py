"""A decode engine that decides on steps before the output of earlier ones is there.

As the engine core does it with async scheduling (`depth` 2) or with pipeline stages (as many as
there are; from 0.23.0 on with both, one more): the scheduler decides on a step and it is queued,
until there are `depth` of them or nothing is left to do; then the oldest ends. `cache` is the
device's memory: a step writes its KV when it ends, the latest that it can, and what is received is
there at once, the earliest. The KV of a token is a hash of it and all before it, so whoever reads
finds out whether it is right.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.support import decode_engine
from tests.support.decode_engine import TOKEN, DecodeEngine
from tests.support.nixl_worker import lives, nixl_of

STOP = 9
"""The token that ends a request."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What a step does for one request: its tokens `start` up to `end`, in these blocks."""

    request: Request
    start: int
    end: int
    blocks: Sequence[Sequence[int]]
    samples: bool


@dataclasses.dataclass(frozen=True)
class _Step:
    decided: SchedulerOutput
    parts: dict[str, Part]


class OverlappedEngine(DecodeEngine):
    """Steps overlap; `connected` says whether there is a KV connector.

    Attributes:
        cache: (block, offset in it) -> the KV there.
        steps: those that run, oldest first.
        computed: request id -> how many tokens the model computed for it.
        finished: request id -> why it ended.
        wrong: what a request read that was not its KV.
    """

    def __init__(
        self,
        *,
        depth: int = 2,
        scheduler: type[Scheduler] = AsyncScheduler,
        connected: bool = True,
        **config: Any,  # noqa: ANN401 - handed on
    ) -> None:
        def make(*, vllm_config: VllmConfig, **how: Any) -> Scheduler:  # noqa: ANN401 - likewise
            if not connected:
                vllm_config.kv_transfer_config = None
            # With async scheduling a step more runs than there are pipeline stages.
            asynchronous = scheduler is AsyncScheduler
            vllm_config.scheduler_config.async_scheduling = asynchronous
            vllm_config.parallel_config.pipeline_parallel_size = depth - asynchronous
            return scheduler(vllm_config=vllm_config, **how)

        with mock.patch.object(decode_engine, "Scheduler", make):
            super().__init__(**config)
        self.depth = depth
        self.block_size = self.worker.vllm_config.cache_config.block_size
        self.cache: dict[tuple[int, int], int] = {}
        self.steps: deque[_Step] = deque()
        self.computed: dict[str, int] = {}
        self.finished: dict[str, str] = {}
        self.wrong: list[str] = []
        self._stops: dict[str, int] = {}
        self._landed: set[str] = set()

    def ask(
        self,
        req_id: str,
        prompt: Iterable[int],
        remote_blocks: Sequence[Sequence[int]] | None = None,
        *,
        stops_after: int | None = None,
        **how: Any,  # noqa: ANN401 - handed on
    ) -> None:
        """Add a request; one that `stops_after` so many tokens samples STOP then."""
        super().ask(req_id, prompt, remote_blocks, **how)
        if stops_after is not None:
            self._stops[req_id] = stops_after
            params = self.scheduler.requests[req_id].sampling_params
            params.stop_token_ids = [STOP]

    def abort(self, *req_ids: str) -> None:
        """Clients leave."""
        self.scheduler.finish_requests(req_ids, RequestStatus.FINISHED_ABORTED)

    def advance(self) -> SchedulerOutput | None:
        """Do what the engine core does in one turn.

        Returns:
            What was decided; None if there was nothing to decide.

        Raises:
            EngineDiedError: see `DecodeEngine.step`.
        """
        decided = None
        if self.scheduler.has_requests():
            decided = lives(self._launch)
            if decided.num_scheduled_tokens and len(self.steps) < self.depth:
                return decided
        if self.steps:
            lives(self._end)
        return decided

    def run(self, turns: int = 200) -> bool:
        """Go on until nothing is left to do, at most for so many turns; whether it is so."""
        while (self.steps or self.scheduler.has_requests()) and turns:
            self.advance()
            turns -= 1
        return not self.steps and not self.scheduler.has_requests()

    def _start(self, decided: SchedulerOutput) -> None:
        if self.scheduler.connector is not None:
            super()._start(decided)

    def _report(self) -> KVConnectorOutput | None:
        return None if self.scheduler.connector is None else super()._report()

    def _launch(self) -> SchedulerOutput:
        decided = self.scheduler.schedule()
        self._start(decided)
        parts = {}
        for req_id, count in decided.num_scheduled_tokens.items():
            request = self.scheduler.requests[req_id]
            end = request.num_computed_tokens  # counted in advance
            blocks = [list(g) for g in self.scheduler.kv_cache_manager.get_block_ids(req_id)]
            parts[req_id] = Part(request, end - count, end, blocks, end >= request.num_tokens)
            self.computed[req_id] = self.computed.get(req_id, 0) + count
        self.steps.append(_Step(decided, parts))
        self._land()
        return decided

    def _land(self) -> None:
        """What is received arrives."""
        for request in self.scheduler.requests.values():
            if (
                request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
                and request.request_id not in self._landed
            ):
                self._landed.add(request.request_id)
                blocks = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
                self._write(request, range(request.num_computed_tokens), blocks)
        nixl = nixl_of(self.worker)
        nixl.finish(*nixl.in_flight())

    def _end(self) -> None:
        step = self.steps.popleft()
        for req_id, part in step.parts.items():
            if not part.request.is_finished():  # nobody wants what an ended one reads
                self.wrong += [f"{req_id} at {place}" for place in self._misread(part)]
        for part in step.parts.values():
            self._write(part.request, range(part.start, part.end), part.blocks)
        self._update(step)

    def _update(self, step: _Step) -> None:
        ids = list(step.parts)
        outputs = self.scheduler.update_from_output(
            step.decided,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
                sampled_token_ids=[self._sample(part) for part in step.parts.values()],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=None,
                kv_connector_output=self._report(),
            ),
        )
        for per_client in outputs.values():
            for output in per_client.outputs:
                if output.finish_reason is not None:
                    self.finished[output.request_id] = str(output.finish_reason)

    def _sample(self, part: Part) -> list[int]:
        if not part.samples:
            return []
        number = part.request.num_output_tokens + 1  # of which places for guesses are none
        return [STOP if self._stops.get(part.request.request_id) == number else TOKEN]

    def _write(
        self, request: Request, tokens: Sequence[int], blocks: Sequence[Sequence[int]]
    ) -> None:
        for group in blocks:
            for token, place in self._places(tokens, group):
                self.cache[place] = kv_of(request, token)

    def _misread(self, part: Part) -> Iterator[tuple[int, int]]:
        """Yield where a step finds something else than what its first token looks back at."""
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        null = self.scheduler.kv_cache_manager.block_pool.null_block.block_id
        for manager, group in zip(managers, part.blocks, strict=True):
            before = part.start - 1
            if isinstance(manager, MambaManager) and part.start:
                state = group[before // self.block_size]
                if state == null:
                    yield state, before % self.block_size  # it goes on from nothing
            first = max(0, manager.get_num_skipped_tokens(part.start))  # of states -1, of nothing
            for token, place in self._places(range(first, part.start), group):
                if self.cache.get(place) != kv_of(part.request, token):
                    yield place

    def _places(
        self, tokens: Sequence[int], group: Sequence[int]
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield tokens with the place of their KV in a group's blocks."""
        null = self.scheduler.kv_cache_manager.block_pool.null_block.block_id
        for token in tokens:
            block = group[token // self.block_size]
            if block != null:  # nothing is kept there: it is outside of the window
                yield token, (block, token % self.block_size)


def kv_of(request: Request, token: int) -> int:
    """What the device keeps of one of its tokens."""
    prompt = list(request.prompt_token_ids or ())
    tokens = prompt + [TOKEN] * (token + 1 - len(prompt))
    return hash(tuple(tokens[: token + 1]))
