# SPDX-License-Identifier: Apache-2.0
"""All releases: a dummy step keeps off the states of all requests.

With data parallelism a rank without a request to compute takes dummy steps, as many rows wide as
the graph of decodes that the other ranks replay. Layers with states write one for each row, into
the block that the row names. The rows are nobody's, but name blocks of requests that have left:
the block tables still do, and where the layers do not take all rows for decodes, so does what an
earlier step told the graph. Such a block may be one by now that a connector loads, on no queue of
the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_NOBODYS = 0
"""The null block, as in an engine that has had no request."""


def keep_off_states(
    runner: GPUModelRunner, rows: int, mode: CUDAGraphMode, capturing: bool
) -> None:
    """Have layers with states write those of a dummy step into the null block.

    Only on the device: the next step with requests tells it of theirs, as each does.

    Args:
        runner: before it makes the metadata of the step.
        rows: of the step, with those that are there for the graph's sake.
        mode: in all but a whole graph the layers are told nothing of such a step, and do nothing.
        capturing: whether the graph is captured now; then nobody has been here.
    """
    if mode != CUDAGraphMode.FULL or capturing:
        return
    for number, groups in enumerate(runner.attn_groups):
        for layers in groups:
            if not isinstance(layers.kv_cache_spec, MambaSpec):
                continue
            runner.input_batch.block_table[number].get_device_tensor(rows).fill_(_NOBODYS)
            for builder in layers.metadata_builders:
                vars(builder).setdefault("_nobodys", True)
                for name, told in vars(builder).items():
                    if "state_indices" in name and isinstance(told, torch.Tensor):
                        told.fill_(_NOBODYS)


def are_of_vllm(config: VllmConfig) -> bool:
    """Whether an engine's dummy steps are vLLM's; a plugin's worker may make them its own way."""
    worker: object = config.parallel_config.worker_cls  # "auto" until a platform has its say
    home: str = worker if isinstance(worker, str) else getattr(worker, "__module__", "")
    return home.partition(".")[0] in ("auto", "vllm")


def is_nobodys(builder: object) -> bool:
    """Whether the step that a builder of metadata is told of now is one of those; asked once."""
    return bool(vars(builder).pop("_nobodys", False))
