"""Version and compatibility hash of a worker of the installed vLLM.

`python -m tests.programs.handshake_hash` prints both on its last line.
"""

from __future__ import annotations

from tests.support import vllm_cpu

vllm_cpu.prepare()

import vllm  # noqa: E402 - the platform has to be settled first

from tests.support.nixl_release import compute_nixl_compatibility_hash  # noqa: E402
from tests.support.nixl_worker import make_worker, topology_of  # noqa: E402

if __name__ == "__main__":
    worker = make_worker()
    # Of all factors only the model's path differs from run to run: a temporary folder.
    worker.model_config.model = "model"
    topology = topology_of(worker)
    print(
        vllm.__version__,
        compute_nixl_compatibility_hash(
            worker.vllm_config,
            worker.backend_name,
            # Gone by 0.29.0, where the default of what stands in its place is right.
            *([topology.cross_layers_blocks] if hasattr(topology, "cross_layers_blocks") else []),
        ),
    )
