"""Does every token's KV land where it belongs? A slow, obvious reference, down to the bytes.

Two real workers (`tests.support.nixl_worker`), a prefill and a decode one, live in this process.
The decode worker is told about the prefill worker by the prefill worker's own handshake payload,
is asked to receive a prompt, the reads that it posts are carried out on memory, and it is stepped
once more. Then each token of the prompt is looked up at the place where the attention kernel will
look: nothing here knows how blocks are paired or what they were read in, only that token `t` of a
request sits in its logical block `t // block_size`, or the rank's `t`-th where ranks share tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from tests.support.harness import HarnessError
from tests.support.nixl_release import NixlAgentMetadata, NixlConnectorWorker
from tests.support.nixl_worker import (
    BESIDE,
    SCRIPTED,
    GroupKind,
    context_rank,
    lives,
    make_worker,
    nixl_of,
    note_activity,
    rank_key,
    receive,
    states_in,
    step,
    target_ranks,
)
from tests.support.release import since
from tests.support.stand_in_model import HEADS

Layout = Literal["HND", "NHD"]

MAX_TOKENS = 256
"""Longer prompts have no value of their own for each token (see `_value`)."""


@dataclasses.dataclass(frozen=True)
class Deployment:
    """How P and D are set up.

    Attributes:
        prefill_ratio: kernel blocks in a logical block of P; `decode_ratio` of D.
        groups: what each KV-cache group holds.
        kernel: tokens in a kernel block of P.
        split: kernel blocks of P in one of D.
        prefix_caching: whether D caches prefixes.
        mla: whether the model has a latent KV cache.
        whole: keys and values of a block lie together, see `make_worker`.
        stated: whether P says its ratio; no is what stock 0.20.x does.
        layouts: of P's cache and of D's: heads or tokens outermost within a block. D may receive
            another one than its own.
        ranks: of P and of D. Attention has to be latent if they are not as many.
        context: of P and of D: ranks that share a prompt's tokens (decode context parallelism), and
            how many tokens in a row each has.
    """

    prefill_ratio: int
    decode_ratio: int
    groups: tuple[GroupKind, ...] = ("full",)
    kernel: int = 4
    split: int = 1
    prefix_caching: bool = False
    mla: bool = False
    whole: bool = False
    stated: bool = True
    layouts: tuple[Layout, Layout] = ("HND", "HND")
    ranks: tuple[int, int] = (1, 1)
    context: tuple[tuple[int, int], tuple[int, int]] = ((1, 1), (1, 1))

    @property
    def decode_block(self) -> int:
        """Tokens in a logical block of D."""
        return self.kernel * self.split * self.decode_ratio

    @property
    def makes_its_blocks(self) -> bool:
        """Whether the release makes D's kernel blocks rightly of those that it reads of P.

        Heads and tokens that are as many may be taken for each other.
        """
        if self.split == 1 and self.layouts[0] != self.layouts[1] and not since("0.32.0"):
            return self.kernel == HEADS if since("0.26.0") else not self.whole
        if self.split == 1 or since("0.32.0"):
            return True
        return not since("0.29.0") if self.mla else not (since("0.26.0") or self.whole)


class Engines:
    """The workers of P's ranks, the first of which is `prefill`, and one of D's, not connected."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        max_tokens: int = 64,
        state_tokens: int | None = None,
        decode_rank: int = 0,
        nixl: Mapping[str, Any] = SCRIPTED,
    ) -> None:
        d = deployment
        if d.ranks[0] != d.ranks[1] and not d.mla:
            raise HarnessError("ranks that share heads out otherwise", "a latent cache")
        kernels = d.kernel, d.kernel * d.split
        blocks = kernels[0] * d.prefill_ratio, kernels[1] * d.decode_ratio
        self.deployment = d

        def make(side: int, rank: int) -> NixlConnectorWorker:
            return make_worker(
                engine_id="PD"[side],
                tp_size=d.ranks[side],
                tp_rank=rank,
                groups=d.groups,
                mla=d.mla,
                block_size=blocks[side],
                kernel_block_size=kernels[side],
                # Block 0 is vLLM's null block.
                num_blocks=1 + len(d.groups) * (-(-max_tokens // blocks[side]) + 1),
                state_tokens=state_tokens or min(blocks),
                prefix_caching=d.prefix_caching,
                whole=d.whole,
                layout=d.layouts[side],
                permute=d.layouts[0] != d.layouts[1],
                nixl=nixl,
                context=d.context[side],
            )

        self.ranks = [make(0, rank) for rank in range(d.ranks[0])]
        self.prefill, self.decode = self.ranks[0], make(1, decode_rank)

    def connect(self) -> None:
        """Let D hear the handshake payload of P's ranks. What D raises is its refusal."""
        agents = {}
        for rank in target_ranks(self.decode, len(self.ranks)):
            payload = self.ranks[rank].xfer_handshake_metadata
            if payload is None:
                raise HarnessError("P says nothing about itself", "a worker with registered caches")
            said = msgspec.msgpack.decode(payload.agent_metadata_bytes)
            if not self.deployment.stated:
                said.pop("physical_blocks_per_logical_kv_block", None)
            metadata = msgspec.convert(said, NixlAgentMetadata)
            with context_rank(self.decode.tp_rank, self.deployment.context[1][0]):
                agents[rank_key(rank)] = self.decode.add_remote_agent(
                    metadata, rank, len(self.ranks)
                )
        self.decode._remote_agents["P"] = agents
        note_activity(self.decode, "P")

    def faults_of_a_prompt(self, tokens: int, hit: int = 0, seed: int = 0) -> list[str]:
        """Send one prompt from P to D; say what is not where it should be, or not what it was.

        Args:
            tokens: length of the prompt.
            hit: leading logical blocks that D has cached.
            seed: for the choice of blocks.

        Raises:
            EngineDiedError: D's worker raised when all had arrived.
        """
        p, *others, d = (
            _Side(worker, self.deployment.whole) for worker in (*self.ranks, self.decode)
        )
        theirs, ours = p.allocate(tokens, seed), d.allocate(tokens, seed + 1)
        for group in range(len(self.deployment.groups)):
            for side in (p, *others):
                side.fill(group, theirs[group], tokens)
        self.transfer(
            [d.asked_for(g, ids, hit) for g, ids in enumerate(ours)],
            [p.asked_for(g, ids, 0) for g, ids in enumerate(theirs)],
        )
        first = hit * self.deployment.decode_block * self.deployment.context[1][0]
        found = [
            fault
            for group in range(len(self.deployment.groups))
            for fault in d.faults(group, ours[group], range(first, tokens))
        ]
        return found + d.strays(ours, hit)

    def transfer(self, ours: list[list[int]], theirs: list[list[int]]) -> None:
        """Make D receive `theirs` into `ours`, logical blocks of each group, and step it then."""
        ranks = len(self.ranks)
        receive(self.decode, local_blocks=ours, remote_blocks=theirs, tp_size=ranks)
        nixl = nixl_of(self.decode)
        for read in nixl.in_flight():
            nixl.move(read)
            nixl.finish(read)
        lives(step, self.decode)


def _value(token: int, layer: int) -> float:
    return float(1 + token + layer * MAX_TOKENS)


def _written(cell: torch.Tensor, token: int, layer: int) -> torch.Tensor:
    """What prefill leaves in a cell of a token: its value, and last in each head the head."""
    written = torch.full_like(cell, _value(token, layer))
    written[..., -1] = torch.arange(cell.shape[-2])
    return written


class _Side:
    """One engine's caches, looked at as an attention kernel does."""

    def __init__(self, worker: NixlConnectorWorker, whole: bool) -> None:
        self.worker = worker
        self.whole = whole
        self.groups = worker.kv_cache_config.kv_cache_groups
        self.ratio = worker._physical_blocks_per_logical_kv_block
        self.kernel: int = worker.block_size
        self.block = self.kernel * self.ratio
        parallel = worker.vllm_config.parallel_config
        self.sharers: int = parallel.decode_context_parallel_size
        self.in_a_row: int = parallel.cp_kv_cache_interleave_size

    def place(self, token: int) -> int | None:
        """Which of the tokens that this rank holds a token of the prompt is; None if of none."""
        turn, within = divmod(token, self.in_a_row)
        if turn % self.sharers != self.worker.tp_rank % self.sharers:
            return None
        return turn // self.sharers * self.in_a_row + within

    def allocate(self, tokens: int, seed: int) -> list[list[int]]:
        """Logical blocks of a prompt for each group, none of them twice: groups share memory."""
        chance = torch.Generator().manual_seed(seed)
        free = (1 + torch.randperm(self.worker._logical_num_blocks - 1, generator=chance)).tolist()
        counts = [
            1
            if isinstance(group.kv_cache_spec, MambaSpec)
            else -(-tokens // (self.block * self.sharers))
            for group in self.groups
        ]
        return [[free.pop() for _ in range(count)] for count in counts]

    def asked_for(self, group: int, ids: list[int], hit: int) -> list[int]:
        """What the connector's scheduler side makes of a group's blocks: without the hit, and
        clipped to the window."""
        spec = self.groups[group].kv_cache_spec
        if isinstance(spec, MambaSpec):
            return ids
        window = getattr(spec, "sliding_window", None)
        rest = ids[hit:]
        return rest[-(-(-window // self.block) + 1) :] if window else rest

    def fill(self, group: int, ids: list[int], tokens: int) -> None:
        """Write what prefill leaves behind; everything else in the request's blocks is junk."""
        for layer, name in enumerate(self.groups[group].layer_names):
            cache = self.worker.device_kv_caches[name]
            if isinstance(self.groups[group].kv_cache_spec, MambaSpec):
                for part, state in enumerate(states_in(cache, self.groups[group].kv_cache_spec)):
                    state[ids[0]] = self._state(state[0].shape, part)
                continue
            for block in ids:
                for kernel in range(block * self.ratio, (block + 1) * self.ratio):
                    self._kernel_block(cache, kernel)[:] = -1
            for token in range(tokens):
                if (place := self.place(token)) is not None:
                    cell = self._cell(cache, ids, place)
                    cell[:] = _written(cell, token, layer)

    def faults(self, group: int, ids: list[int], wanted: Sequence[int]) -> list[str]:
        """Tokens of `wanted` that are not in their place, or a state that is not this rank's."""
        spec = self.groups[group].kv_cache_spec
        found = []
        for layer, name in enumerate(self.groups[group].layer_names):
            cache = self.worker.device_kv_caches[name]
            if isinstance(spec, MambaSpec):
                for part, state in enumerate(states_in(cache, spec)):
                    held, due = state[ids[0]], self._state(state[0].shape, part)
                    if not torch.equal(held, due.to(held.dtype)):
                        wrong = int((held != due).sum())
                        found.append(f"{name}: {wrong} of {held.numel()} of state {part} are wrong")
                continue
            window = getattr(spec, "sliding_window", None)
            for token in wanted[-window:] if window else wanted:
                if (place := self.place(token)) is None:
                    continue
                cell = self._cell(cache, ids, place)
                if not torch.equal(cell, _written(cell, token, layer)):
                    held = cell[0, :, 0].tolist(), cell[0, :, -1].tolist()
                    found.append(f"{name}: token {token} holds {held[0]} of heads {held[1]}")
        return found

    def _state(self, shape: Sequence[int], part: int) -> torch.Tensor:
        """A part of the state as it is on this rank: of each of its projections a share of rows.

        The convolution is one of three projections, the first of Mamba-2 twice as long as the
        others.
        """
        rows = shape[0]
        if part:
            shares = [rows]
        elif self.worker.model_config.use_mla:
            shares = [rows // 3] * 3
        else:
            shares = [rows // 2, rows // 4, rows // 4]
        rank, ranks = self.worker.tp_rank, self.worker.world_size
        starts = [sum(shares[:i]) * ranks + rank * share for i, share in enumerate(shares)]
        own = torch.cat([start + torch.arange(n) for start, n in zip(starts, shares, strict=True)])
        within = torch.arange(math.prod(shape[1:]))
        # Whole numbers that the cache's type can hold.
        return ((own[:, None] * len(within) + within) % 2039 + part).view(tuple(shape))

    def strays(self, ids: list[list[int]], hit: int) -> list[str]:
        """Blocks that were written though nobody asked for them."""
        asked = {b for g, group in enumerate(ids) for b in self.asked_for(g, group, hit)}
        # All groups share their memory: one group's caches show all of it.
        names = next(
            g.layer_names for g in self.groups if not isinstance(g.kv_cache_spec, MambaSpec)
        )
        return [
            f"{name}: kernel block {kernel} was overwritten"
            for name in names
            for kernel in range(self.worker.num_blocks)
            if kernel // self.ratio not in asked
            and bool(self._kernel_block(self.worker.device_kv_caches[name], kernel).any())
        ]

    def _cell(self, cache: torch.Tensor, ids: list[int], place: int) -> torch.Tensor:
        """Where the keys and values of the rank's token of this number are."""
        within = place % self.block
        index = ids[place // self.block] * self.ratio + within // self.kernel
        return self._kernel_block(cache, index)[..., within % self.kernel, :]

    def _kernel_block(self, cache: torch.Tensor, index: int) -> torch.Tensor:
        """One kernel block as (keys and values, heads, tokens, head size)."""
        if BESIDE and cache.dim() == 4:  # blocks, heads, tokens, keys and values of each
            return cache[index].unsqueeze(0)
        if cache.dim() == 3:  # latent: blocks, tokens, elements
            return cache[index].view(1, 1, self.kernel, -1)
        if self.worker._has_mamba:  # blocks first, and heads before tokens
            return cache[index]
        return (cache[index] if self.whole else cache[:, index]).transpose(1, 2)
