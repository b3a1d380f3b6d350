"""Does every token's KV land where it belongs? A slow, obvious reference, down to the bytes.

Two real workers (`tests.support.nixl_worker`), a prefill and a decode one, live in this process.
The decode worker is told about the prefill worker by the prefill worker's own handshake payload,
is asked to receive a prompt, and the reads that it posts are carried out on memory. Then each
token of the prompt is looked up at the place where the attention kernel will look: nothing here
knows how blocks are paired, only that token `t` of a request sits in its logical block
`t // block_size`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from tests.support.harness import HarnessError
from tests.support.nixl_release import NixlAgentMetadata, NixlConnectorWorker
from tests.support.nixl_worker import (
    BESIDE,
    SCRIPTED,
    GroupKind,
    make_worker,
    nixl_of,
    rank_key,
    receive,
    states_in,
)

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
        stated: whether P says its ratio; no is what stock 0.20.x does.
    """

    prefill_ratio: int
    decode_ratio: int
    groups: tuple[GroupKind, ...] = ("full",)
    kernel: int = 4
    split: int = 1
    prefix_caching: bool = False
    mla: bool = False
    stated: bool = True

    @property
    def decode_block(self) -> int:
        """Tokens in a logical block of D."""
        return self.kernel * self.split * self.decode_ratio


class Engines:
    """A prefill and a decode worker of a deployment, not yet connected."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        max_tokens: int = 64,
        state_tokens: int | None = None,
        nixl: Mapping[str, Any] = SCRIPTED,
    ) -> None:
        d = deployment
        kernels = d.kernel, d.kernel * d.split
        blocks = kernels[0] * d.prefill_ratio, kernels[1] * d.decode_ratio
        self.deployment = d
        self.prefill, self.decode = (
            make_worker(
                engine_id=name,
                groups=d.groups,
                mla=d.mla,
                block_size=block,
                kernel_block_size=kernel,
                # Block 0 is vLLM's null block.
                num_blocks=1 + len(d.groups) * (-(-max_tokens // block) + 1),
                state_tokens=state_tokens or min(blocks),
                prefix_caching=d.prefix_caching,
                nixl=nixl,
            )
            for name, block, kernel in zip("PD", blocks, kernels, strict=True)
        )

    def connect(self) -> None:
        """Let D hear P's handshake payload. What D raises is its refusal."""
        payload = self.prefill.xfer_handshake_metadata
        if payload is None:
            raise HarnessError("P says nothing about itself", "a worker with registered caches")
        said = msgspec.msgpack.decode(payload.agent_metadata_bytes)
        if not self.deployment.stated:
            said.pop("physical_blocks_per_logical_kv_block", None)
        agent = self.decode.add_remote_agent(msgspec.convert(said, NixlAgentMetadata), 0, 1)
        self.decode._remote_agents["P"] = {rank_key(0): agent}

    def faults_of_a_prompt(self, tokens: int, hit: int = 0, seed: int = 0) -> list[str]:
        """Send one prompt from P to D; say what is not where it should be, or not what it was.

        Args:
            tokens: length of the prompt.
            hit: leading logical blocks that D has cached.
            seed: for the choice of blocks.
        """
        p, d = _Side(self.prefill), _Side(self.decode)
        theirs, ours = p.allocate(tokens, seed), d.allocate(tokens, seed + 1)
        for group in range(len(self.deployment.groups)):
            p.fill(group, theirs[group], tokens)
        split = self.transfer(
            [d.asked_for(g, ids, hit) for g, ids in enumerate(ours)],
            [p.asked_for(g, ids, 0) for g, ids in enumerate(theirs)],
        )
        first = hit * self.deployment.decode_block
        found = [
            fault
            for group in range(len(self.deployment.groups))
            for fault in d.faults(group, ours[group], range(first, tokens), theirs[group], p, split)
        ]
        return found + d.strays(ours, hit)

    def transfer(self, ours: list[list[int]], theirs: list[list[int]]) -> int:
        """Make D receive `theirs` into `ours`, logical blocks of each group.

        Returns:
            The parts in which D's kernel blocks lie afterwards: received, not yet post-processed.
        """
        receive(self.decode, local_blocks=ours, remote_blocks=theirs)
        for read in nixl_of(self.decode).reads:
            nixl_of(self.decode).move(read)
        return self.deployment.split


def _value(token: int, layer: int) -> float:
    return float(1 + token + layer * MAX_TOKENS)


class _Side:
    """One engine's caches, looked at as an attention kernel does."""

    def __init__(self, worker: NixlConnectorWorker) -> None:
        self.worker = worker
        self.groups = worker.kv_cache_config.kv_cache_groups
        self.ratio = worker._physical_blocks_per_logical_kv_block
        self.kernel: int = worker.block_size
        self.block = self.kernel * self.ratio

    def allocate(self, tokens: int, seed: int) -> list[list[int]]:
        """Logical blocks of a prompt for each group, none of them twice: groups share memory."""
        chance = torch.Generator().manual_seed(seed)
        free = (1 + torch.randperm(self.worker._logical_num_blocks - 1, generator=chance)).tolist()
        counts = [
            1 if isinstance(group.kv_cache_spec, MambaSpec) else -(-tokens // self.block)
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
                    state[ids[0]] = torch.arange(state[0].numel()).view(state[0].shape) % 91 + part
                continue
            for block in ids:
                for kernel in range(block * self.ratio, (block + 1) * self.ratio):
                    self._kernel_block(cache, kernel, 1)[:] = -1
            for token in range(tokens):
                self._cell(cache, ids, token, 1)[:] = _value(token, layer)

    def faults(
        self,
        group: int,
        ids: list[int],
        wanted: Sequence[int],
        remote_ids: list[int],
        remote: _Side,
        split: int,
    ) -> list[str]:
        """Tokens of `wanted` that are not in their place, or a state that is not the peer's."""
        spec = self.groups[group].kv_cache_spec
        found = []
        for layer, name in enumerate(self.groups[group].layer_names):
            cache = self.worker.device_kv_caches[name]
            if isinstance(spec, MambaSpec):
                theirs = states_in(remote.worker.device_kv_caches[name], spec)
                for ours, sent in zip(states_in(cache, spec), theirs, strict=True):
                    if not torch.equal(ours[ids[0]], sent[remote_ids[0]]):
                        found.append(f"{name}: the state of {len(ids)} blocks is not the peer's")
                continue
            window = getattr(spec, "sliding_window", None)
            for token in wanted[-window:] if window else wanted:
                cell = self._cell(cache, ids, token, split)
                if not bool((cell == _value(token, layer)).all()):
                    found.append(f"{name}: token {token} holds {cell.flatten()[0].item()}")
        return found

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
            and bool(self._kernel_block(self.worker.device_kv_caches[name], kernel, 1).any())
        ]

    def _cell(self, cache: torch.Tensor, ids: list[int], token: int, split: int) -> torch.Tensor:
        """Where a token's keys and values are. A block received in `split` parts still has the
        peer's order of heads and tokens within each part, until it is post-processed."""
        within = token % self.block
        block = self._kernel_block(
            cache, ids[token // self.block] * self.ratio + within // self.kernel, split
        )
        part, slot = divmod(within % self.kernel, self.kernel // split)
        return block[..., part, :, slot, :]

    def _kernel_block(self, cache: torch.Tensor, index: int, split: int) -> torch.Tensor:
        """One kernel block as (keys and values, parts, heads, tokens of a part, head size)."""
        if BESIDE and cache.dim() == 4:  # blocks, heads, tokens, keys and values of each
            block = cache[index]
            return block.view(1, split, block.shape[0], self.kernel // split, -1)
        if cache.dim() == 3:  # latent: blocks, tokens, elements
            return cache[index].view(1, split, 1, self.kernel // split, -1)
        # Blocks first in a hybrid; else as in memory, with heads before tokens.
        block = cache[index] if self.worker._has_mamba else cache[:, index].transpose(1, 2)
        heads, size = block.shape[1], block.shape[3]
        return block.view(block.shape[0], split, heads, self.kernel // split, size)
