"""Version and compatibility hash of a worker of the installed vLLM.

`python -m tests.handshake_hash` prints both on its last line.
"""

from __future__ import annotations

from tests import vllm_cpu

vllm_cpu.prepare()

import vllm  # noqa: E402 - the platform has to be settled first
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (  # noqa: E402
    compute_nixl_compatibility_hash,
)

from tests.nixl_worker import make_worker  # noqa: E402

if __name__ == "__main__":
    worker = make_worker()
    # Of all factors only the model's path differs from run to run: a temporary folder.
    worker.model_config.model = "model"
    topology = worker.transfer_topo
    assert topology is not None
    print(
        vllm.__version__,
        compute_nixl_compatibility_hash(
            worker.vllm_config,
            worker.backend_name,
            # Gone by 0.33.0, where the default of what stands in its place is right.
            *([topology.cross_layers_blocks] if hasattr(topology, "cross_layers_blocks") else []),
        ),
    )
