"""Where the installed release keeps NIXL's connector: in one file up to 0.19.1, a package since.

Everything below `tests/` that needs a name of it takes it from here.
"""

from __future__ import annotations

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as connector_module
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        GET_META_MSG,
        NixlAgentMetadata,
        NixlConnectorMetadata,
        NixlHandshakePayload,
        compute_nixl_compatibility_hash,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import NixlConnectorScheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker
except ModuleNotFoundError:
    from vllm.distributed.kv_transfer.kv_connector.v1 import nixl_connector as connector_module
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import (
        GET_META_MSG,
        NixlAgentMetadata,
        NixlConnectorMetadata,
        NixlConnectorScheduler,
        NixlConnectorWorker,
        NixlHandshakePayload,
        compute_nixl_compatibility_hash,
    )

__all__ = [
    "GET_META_MSG",
    "NixlAgentMetadata",
    "NixlConnectorMetadata",
    "NixlConnectorScheduler",
    "NixlConnectorWorker",
    "NixlHandshakePayload",
    "compute_nixl_compatibility_hash",
    "connector_module",
]
