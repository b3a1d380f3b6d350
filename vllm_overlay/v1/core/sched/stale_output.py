# SPDX-License-Identifier: Apache-2.0
"""Up to 0.26.0: what a step sampled for a request that has been preempted since is not its output.

Steps overlap, under async scheduling or with pipeline stages: a step is decided while earlier ones
still run, and may take the blocks of a request whose last token one of those is about to sample.
The request then finishes without blocks, or with new ones that nothing was written to yet, and
NIXL hands those out to be read. So such a token is dropped: the request computes its tokens anew
and finishes with what it has computed, as it does from 0.27.0 on. The token was sent to nobody.

Only for requests whose blocks a peer is to read. The others' tokens do not depend on their blocks.
Not with both, asynchronous steps and pipeline stages: each stage but the last notes a token that is
under way, for good if nothing has come of it, and then waits for what the last one does not send.
And only where the scheduler's own `schedule` and `update_from_output` are these or call them. In a
plugin's with a copy of its own the token is not dropped, so it has to be counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.present import transfers_with_nixl

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
    from vllm.v1.request import Request


SPARE = 8
"""Steps that may be under way beside one for each pipeline stage; vLLM has one, when it schedules
asynchronously."""


def _preempted_since(scheduler: Scheduler) -> dict[int, set[str]]:
    """For each step under way, by its identity: the hand-offs preempted since it was decided."""
    # Made on demand: a test may make a scheduler without its constructor.
    since: dict[int, set[str]] = scheduler.__dict__.setdefault("_preempted_since", {})
    return since


def awaits_output(scheduler: Scheduler, decided: SchedulerOutput) -> None:
    """Hear that a step was decided; its output will come."""
    since = _preempted_since(scheduler)
    since[id(decided)] = set()
    if len(since) > scheduler.parallel_config.pipeline_parallel_size + SPARE:
        since.clear()  # nobody says when one ends


def is_preempted(scheduler: Scheduler, request: Request) -> None:
    """Hear that a request has lost its blocks, and will be computed anew."""
    if _drops_stale(scheduler) and is_handed_off(scheduler.connector, request):
        for preempted in _preempted_since(scheduler).values():
            preempted.add(request.request_id)
        # It counts what steps under way will sample for it: nothing.
        request.num_output_placeholders = 0


def drop_stale(scheduler: Scheduler, decided: SchedulerOutput, output: ModelRunnerOutput) -> None:
    """Take out of a step's output what it has for hand-offs that were preempted since."""
    since = _preempted_since(scheduler)
    if id(decided) not in since:
        return
    scheduler.__dict__["_has_dropped"] = True
    _give_back(scheduler, output)
    for req_id in since.pop(id(decided)):
        index = output.req_id_to_index.get(req_id)
        if index is None:
            continue
        if output.sampled_token_ids:
            output.sampled_token_ids[index] = []  # as of a step that ends within the prompt
        if (logprobs := output.prompt_logprobs_dict.pop(req_id, None)) is not None:
            vars(scheduler).setdefault("_kept_logprobs", {})[req_id] = logprobs
        request = scheduler.requests.get(req_id)
        if request is not None and hasattr(request, "discard_latest_async_tokens"):
            # Up to 0.21.0 a reset of the prefix cache has the next token dropped: this one.
            request.discard_latest_async_tokens = False


def _give_back(scheduler: Scheduler, output: ModelRunnerOutput) -> None:
    """Put logprobs of prompts that were dropped with a token beside the token that is sent.

    The worker makes them once.
    """
    kept: dict[str, LogprobsTensors] = vars(scheduler).get("_kept_logprobs", {})
    for req_id in [*kept]:
        index = output.req_id_to_index.get(req_id)
        if req_id not in scheduler.requests:
            del kept[req_id]
        elif index is not None and output.sampled_token_ids and output.sampled_token_ids[index]:
            output.prompt_logprobs_dict.setdefault(req_id, kept.pop(req_id))


def _drops_stale(scheduler: Scheduler) -> bool:
    """Whether `drop_stale` is called for the steps that `awaits_output` hears of, and may drop."""
    stages = scheduler.parallel_config.pipeline_parallel_size
    if stages > 1 and scheduler.scheduler_config.async_scheduling:
        return False
    methods = type(scheduler).schedule, type(scheduler).update_from_output
    are_vllms = all(str(method.__module__).startswith("vllm.") for method in methods)
    return are_vllms or "_has_dropped" in scheduler.__dict__


def is_handed_off(connector: KVConnectorBase_V1 | None, request: Request) -> bool:
    """Whether a peer reads a request's blocks with NIXL when it has finished."""
    params = request.kv_transfer_params
    if not isinstance(params, dict) or not params.get("do_remote_decode"):
        return False
    return transfers_with_nixl(connector)
