"""A step of the model as its attention layers are told of it."""

from __future__ import annotations

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


def step(*rows: tuple[int, int, bool]) -> CommonAttentionMetadata:
    """A step with a row of tokens for each request: computed before, in the step, of a prompt."""
    computed, queries, prefilling = zip(*rows, strict=True)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    ends = torch.tensor(computed, dtype=torch.int32) + torch.diff(starts)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=ends,
        seq_lens_cpu_upper_bound=ends,
        num_reqs=len(rows),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=int(ends.max()),
        block_table_tensor=torch.zeros(len(rows), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64),
        is_prefilling=torch.tensor(prefilling),
    )
