"""An engine that offers its blocks: peers shake hands with it, clients are told where they are."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Any

from tests.support.decode_engine import DecodeEngine


def scheduler_part(engine: DecodeEngine) -> Any:  # noqa: ANN401 - of another name from 0.24.0 on
    """NIXL's part of an engine's scheduler."""
    connector: Any = engine.scheduler.connector
    return connector.connector_scheduler


def listen(engine: DecodeEngine, lease: float) -> None:
    """Take a port of the loopback interface for handshakes, and keep offered blocks so long.

    `lease` is in seconds.
    """
    part = scheduler_part(engine)
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        part.side_channel_port = probe.getsockname()[1]
    part.side_channel_host = "127.0.0.1"
    part._kv_lease_duration = lease  # from 0.22.0 on; the environment says it before
    answer_handshakes(engine)


def answer_handshakes(engine: DecodeEngine, payload: object = None) -> None:
    """Answer at the side channel of the engine's scheduler what its worker says of itself.

    `payload` is said instead, if there is one: the release's `NixlHandshakePayload`.
    """
    introduce(engine.scheduler.connector, {0: payload or engine.worker.xfer_handshake_metadata})


def introduce(connector: Any, said: Mapping[int, object]) -> None:  # noqa: ANN401 - the scheduler's
    """Let a scheduler's connector answer handshakes with what each tensor rank says of itself."""
    if hasattr(connector, "set_xfer_handshake_metadata_pp_aware"):  # from 0.26.0 on
        staged = {(0, rank): payload for rank, payload in said.items()}
        connector.set_xfer_handshake_metadata_pp_aware(staged)
    else:
        connector.set_xfer_handshake_metadata(said)


def keep_answers(engine: DecodeEngine) -> dict[str, dict[str, Any]]:
    """Request id -> the `kv_transfer_params` that its client is answered with from now on."""
    answers: dict[str, dict[str, Any]] = {}
    update = engine.scheduler.update_from_output

    def keeping(*arguments: Any) -> Any:  # noqa: ANN401 - the scheduler's own
        outputs = update(*arguments)
        for output in (one for client in outputs.values() for one in client.outputs):
            if output.kv_transfer_params is not None:
                answers[output.request_id] = output.kv_transfer_params
        return outputs

    engine.scheduler.update_from_output = keeping
    return answers
