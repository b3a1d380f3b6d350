"""How long the checks of one large request keep an API server's event loop.

`python -m tests.programs.loop_path TURNS` prints, as JSON, the medians over as many turns, in
seconds: `check`, what is looked at in `kv_transfer_params` with 131,072 token ids before they are
sent to the engine core; and `parse`, what reading that body as JSON takes, for scale. Patched files
only.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import find_unsendable

IDS = 131_072


def main(turns: int) -> None:
    """Measure both in turns."""
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]], "ids": list(range(IDS))}
    text = json.dumps({"kv_transfer_params": params})
    spent: dict[str, list[float]] = {"check": [], "parse": []}
    for _ in range(turns):
        spent["check"].append(_seconds(lambda: find_unsendable(params)))
        spent["parse"].append(_seconds(lambda: json.loads(text)))
    print(json.dumps({name: statistics.median(all_) for name, all_ in spent.items()}))


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(int(sys.argv[1]))
