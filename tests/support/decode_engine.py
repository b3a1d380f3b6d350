"""A decode engine without a model: vLLM's scheduler and NIXL worker, stepped by the test.

Both are the released (or patched) ones, joined as the engine core joins them: what the scheduler
decides goes to the worker, what the worker reports goes back with the sampled tokens. Only the
model is missing: every request that was computed to the end of its tokens samples `TOKEN`.
What the model would have computed is on record (`Step.computed`), so a test can tell a prompt
that was computed from one whose KV was believed to be there.

    engine = DecodeEngine(policy="recompute")
    connect(engine.worker, "P")
    engine.ask("req-d", prompt=range(40), remote_blocks=[[5, 6, 7]])
    step = engine.step()
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.harness import building
from tests.support.nixl_worker import GroupKind, lives, make_worker, nixl_of, peer_port

TOKEN = 7
"""The token that every request samples."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What happened in one engine step.

    Attributes:
        computed: request id -> first token that the model computed, and the one after the last.
        finished: request id -> why it ended ("length", "error", ...), as its client is told.
        reusable: blocks that are free to be given to any request after the step.
    """

    computed: dict[str, tuple[int, int]]
    finished: dict[str, str]
    reusable: frozenset[int]


class DecodeEngine:
    """One rank of tensor parallelism and its scheduler.

    Attributes:
        worker: the NIXL worker (see `tests.support.nixl_worker`).
        scheduler: vLLM's scheduler, with NIXL's scheduler side in it.
        groups: what each KV-cache group holds.
        unit: tokens of a hash, from 0.26.0 on, if they are fewer than those of a block.
    """

    @building("a decode engine")
    def __init__(
        self,
        *,
        groups: Sequence[GroupKind] = ("full",),
        policy: Literal["recompute", "fail"] = "recompute",
        block_size: int = 16,
        num_blocks: int = 64,
        log_stats: bool = False,
        prefix_caching: bool | None = None,
        unit: int | None = None,
        **transfer: Any,  # noqa: ANN401 - of `make_vllm_config`
    ) -> None:
        self.groups = tuple(groups)
        self.worker = make_worker(
            groups=groups,
            policy=policy,
            block_size=block_size,
            num_blocks=num_blocks,
            # vLLM does not cache prefixes of recurrent states by default.
            prefix_caching="mamba" not in groups if prefix_caching is None else prefix_caching,
            **transfer,
        )
        config = self.worker.vllm_config
        config.cache_config.num_gpu_blocks = num_blocks
        init_none_hash(sha256)
        self.unit = unit
        self._hasher = get_request_block_hasher(unit or block_size, sha256)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=self.worker.kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=log_stats,
            **({"hash_block_size": unit} if unit else {}),
        )

    def guess(self, count: int, *, eagle: bool = False) -> None:
        """Keep places for so many guessed tokens of each request, as with speculative decoding.

        Its configuration would want a draft model. `eagle`: one that reads the states of the model
        that it guesses for.
        """
        self.scheduler.num_spec_tokens = self.scheduler.num_lookahead_tokens = count
        self.scheduler.use_eagle = eagle

    def serve_by_priority(self) -> None:
        """Go by the requests' priorities, instead of first come, first served."""
        scheduler = self.scheduler
        scheduler.policy = SchedulingPolicy.PRIORITY
        queues = {"waiting", "skipped_waiting", "kv_holding_waiting"}  # the last from 0.31.0 on
        for queue in queues & vars(scheduler).keys():
            setattr(scheduler, queue, create_request_queue(scheduler.policy))

    def ask(
        self,
        req_id: str,
        prompt: Iterable[int],
        remote_blocks: Sequence[Sequence[int]] | None = None,
        *,
        max_tokens: int = 2,
        engine_id: str = "P",
        tp_size: int = 1,
    ) -> None:
        """Add a request; with `remote_blocks`, one whose prompt P has prefilled there."""
        params: dict[str, Any] | None = None
        if remote_blocks is not None:
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [list(group) for group in remote_blocks],
                "remote_engine_id": engine_id,
                "remote_request_id": f"{req_id}-at-p",
                "remote_host": "127.0.0.1",
                "remote_port": peer_port(engine_id),
                "tp_size": tp_size,
            }
        self.send(req_id, prompt, params, max_tokens=max_tokens)

    def send(
        self,
        req_id: str,
        prompt: Iterable[int],
        params: dict[str, Any] | None,
        *,
        max_tokens: int = 2,
        **sampling: Any,  # noqa: ANN401 - of `SamplingParams`
    ) -> Request:
        """Add a request with these `kv_transfer_params`."""
        wanted = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
        wanted.update_from_generation_config({}, 1)
        request = Request(
            request_id=req_id,
            prompt_token_ids=list(prompt),
            sampling_params=wanted,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        request.kv_transfer_params = None if params is None else dict(params)
        self.scheduler.add_request(request)
        return request

    def step(self) -> Step:
        """Run one step of the engine.

        Raises:
            EngineDiedError: the scheduler or the worker raised, which ends an engine. A test that
                is about that asserts on `attempt`.
        """
        return lives(self._step)

    def _step(self) -> Step:
        decided = self.scheduler.schedule()
        self._start(decided)
        computed, sampled = {}, {}
        for req_id, count in decided.num_scheduled_tokens.items():
            request = self.scheduler.requests[req_id]
            end = request.num_computed_tokens  # counted in advance
            computed[req_id] = (end - count, end)
            sampled[req_id] = [TOKEN] if end >= request.num_tokens else []  # none as drafted
        reported = self._report()
        ids = list(computed)
        outputs = self.scheduler.update_from_output(
            decided,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
                sampled_token_ids=[sampled[req_id] for req_id in ids],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=None,
                kv_connector_output=reported,
            ),
        )
        finished = {
            output.request_id: str(output.finish_reason)
            for per_client in outputs.values()
            for output in per_client.outputs
            if output.finish_reason is not None
        }
        return Step(computed, finished, self._reusable())

    def _start(self, decided: SchedulerOutput) -> None:
        """Hand the worker what the scheduler decided."""
        self.worker.start_load_kv(sent(decided.kv_connector_metadata))

    def _report(self) -> KVConnectorOutput:
        """What the worker has to say at the end of a step."""
        return KVConnectorOutput(
            **finished(self.worker),
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_stats=self.worker.get_kv_connector_stats(),
        )

    def _reusable(self) -> frozenset[int]:
        pool = self.scheduler.kv_cache_manager.block_pool
        return frozenset(b.block_id for b in pool.blocks if b.ref_cnt == 0 and not b.is_null)

    def blocks_of(self, req_id: str) -> set[int]:
        """The blocks that a request holds, of all groups."""
        groups = self.scheduler.kv_cache_manager.get_block_ids(req_id)
        return {block for group in groups for block in group}

    def reads_in_flight(self) -> int:
        """How many reads may still write into blocks."""
        return len(nixl_of(self.worker).in_flight())


def sent(metadata: Any) -> Any:  # noqa: ANN401 - of the release
    """What a scheduler tells its workers, as they get it where they are processes of their own."""
    return pickle.loads(pickle.dumps(metadata))  # noqa: S301 - our own


def finished(side: Any, *args: object) -> dict[str, Any]:  # noqa: ANN401 - see below
    """What a worker, or the connector around it, says of transfers that are over; from 0.30.0 on
    with those that failed. `args` are what it wants to know."""
    if hasattr(side, "get_transfer_results"):
        results = side.get_transfer_results(*args)
        return {
            "finished_sending": results.finished_sending or None,
            "finished_recving": results.finished_recving or None,
            "failed_recving": results.failed_recving,
        }
    sent, received = side.get_finished(*args)
    return {"finished_sending": sent or None, "finished_recving": received or None}
