"""Version and compatibility hash of a worker of the installed vLLM.

`python -m tests.handshake_hash` prints both on its last line.
"""

from __future__ import annotations

from tests import vllm_cpu

vllm_cpu.prepare()

import vllm  # noqa: E402 - the platform has to be settled first

from tests.nixl_worker import make_worker  # noqa: E402

if __name__ == "__main__":
    print(vllm.__version__, make_worker().compat_hash)
