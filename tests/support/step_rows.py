"""A step of the model as its attention layers are told of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from vllm.triton_utils import triton
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import gdn_attn, mamba_attn
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder

from tests.support.release import since


def step(
    *rows: tuple[int, int, bool],
    columns: int = 1,
    **changes: Any,  # noqa: ANN401 - of the release's fields
) -> CommonAttentionMetadata:
    """A step with a row of tokens for each request, as the model runner tells it but for `changes`.

    Args:
        rows: tokens computed before, those of the step, and whether they are of a prompt.
        columns: blocks of each request. They are numbered from 1, request by request.
        changes: fields that are other ones.
    """
    computed, queries, prefilling = zip(*rows, strict=True)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    ends = torch.tensor(computed, dtype=torch.int32) + torch.diff(starts)
    fields: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": ends,
        "_seq_lens_cpu": ends,  # up to 0.29.0
        "seq_lens_cpu_upper_bound": ends,  # from 0.20.0 on
        "_num_computed_tokens_cpu": torch.tensor(computed, dtype=torch.int32),
        "num_reqs": len(rows),
        "num_actual_tokens": sum(queries),
        "max_query_len": max(queries),
        "max_seq_len": int(ends.max()),
        "block_table_tensor": torch.arange(1, 1 + columns * len(rows)).int().view(-1, columns),
        "slot_mapping": torch.zeros(sum(queries), dtype=torch.int64),
        "is_prefilling": torch.tensor(prefilling),  # from 0.19.0 on
    } | changes
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{k: v for k, v in fields.items() if k in known})


@contextlib.contextmanager
def without_kernels(builder: Any) -> Iterator[None]:  # noqa: ANN401 - of each kind
    """What only the kernels for prompts want to know goes to the device, and needs one."""
    nothing = (None, None, None)
    chunks = (None,) * (4 if since("0.32.0") else 3)
    with contextlib.ExitStack() as stack:
        for module in (mamba_attn, gdn_attn):
            stack.enter_context(
                mock.patch.object(module, "compute_causal_conv1d_metadata", return_value=nothing)
            )
        if isinstance(builder, Mamba2AttentionMetadataBuilder):
            stack.enter_context(
                mock.patch.object(builder, "_build_chunk_metadata_tensors", return_value=chunks)
            )
        # Without a device triton is a stand-in.
        stack.enter_context(mock.patch.object(triton, "cdiv", lambda a, b: -(-a // b), create=True))
        yield
