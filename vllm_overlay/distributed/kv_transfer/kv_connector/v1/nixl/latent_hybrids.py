# SPDX-License-Identifier: Apache-2.0
"""0.23.0 to 0.26.0: beside recurrent states a latent cache is not all that there is to read.

All ranks of P hold the same latent cache, so of a P with more tensor ranks than D one rank is read,
and the others are only told that D has their blocks. Recurrent states are shared out among the
ranks, and the worker plans a read from each of P's ranks for them: of the latent cache from one, of
the states from all, each into its share of ours. Then it insists on a single read. Before 0.23.0 no
engine with NIXL serves a model that has both.
"""

from __future__ import annotations

from typing import Any

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.older import pulls


def reads_one_rank(worker: Any) -> bool:  # noqa: ANN401 - of any release, pulling or pushing
    """Whether one of several ranks of P holds all that this worker needs.

    Where P pushes, the worker that asks is P's, and it is as on stock.
    """
    return bool(worker.use_mla) and not (worker._has_mamba and pulls(worker))
