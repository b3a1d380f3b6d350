"""A connector that is neither NIXL's nor vLLM's: it notes what its methods are called with."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

CALLS: list[list[Any]] = []
"""Of every such connector of this process, oldest first: name, and arguments in plain words."""


class Nothing(KVConnectorMetadata):  # type: ignore[misc, unused-ignore]
    """What its scheduler has to say to its workers."""


class RecordingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc, unused-ignore]
    """The scheduler's side, which the methods that a worker has do not belong to."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:  # noqa: ANN401
        CALLS.append(["matched", _plain(request), computed])
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:  # noqa: ANN401
        CALLS.append(["allocated", _plain(request), external])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401
        return Nothing()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ANN401
        CALLS.append(["finished", _plain(request), [*block_ids]])
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ANN401
        CALLS.append(["finished", _plain(request), [[*ids] for ids in block_ids]])
        return False, None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        raise NotImplementedError

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


class MovingConnector(RecordingConnector):
    """One that loads whole prompts while their requests wait, and keeps what finishes, each if the
    request's parameters say so. What is over is for the workers to say, so for the scenario."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:  # noqa: ANN401
        super().get_num_new_matched_tokens(request, computed)
        there = request.num_prompt_tokens - computed if _says(request, "loads") else 0
        return there, there > 0

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ANN401
        super().request_finished(request, block_ids)
        return _says(request, "keeps"), None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ANN401
        super().request_finished_all_groups(request, block_ids)
        return _says(request, "keeps"), None


def _says(request: Any, word: str) -> bool:  # noqa: ANN401 - upstream's Request
    return bool((request.kv_transfer_params or {}).get(word))


def _plain(request: Any) -> list[Any]:  # noqa: ANN401 - upstream's Request
    params = request.kv_transfer_params
    kind = "" if params is None or type(params) is dict else f"a {type(params).__name__}"
    return [len(request.prompt_token_ids), params, kind, request.status.name]
