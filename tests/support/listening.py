"""An engine that peers can shake hands with."""

from __future__ import annotations

from typing import Any

from tests.support.decode_engine import DecodeEngine


def answer_handshakes(engine: DecodeEngine) -> None:
    """Answer at the side channel of the engine's scheduler what its worker says of itself."""
    connector: Any = engine.scheduler.connector
    payload = engine.worker.xfer_handshake_metadata
    if hasattr(connector, "set_xfer_handshake_metadata_pp_aware"):  # from 0.26.0 on
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): payload})
    else:
        connector.set_xfer_handshake_metadata({0: payload})
