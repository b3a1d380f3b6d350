"""Does every token's KV land where it belongs? A slow, obvious reference, down to the bytes.

Two real workers (`tests.support.nixl_worker`), a prefill and a decode one, live in this process.
The decode worker is told about the prefill worker by the prefill worker's own handshake payload,
is asked to receive a prompt, the reads that it posts are carried out on memory, and it is stepped
once more. Then each token of the prompt is looked up at the place where the attention kernel will
look: nothing here knows how blocks are paired or what they were read in, only that token `t` of a
request sits in its logical block `t // block_size`.
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
    lives,
    make_worker,
    nixl_of,
    rank_key,
    receive,
    states_in,
    step,
)
from tests.support.release import since

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

    @property
    def decode_block(self) -> int:
        """Tokens in a logical block of D."""
        return self.kernel * self.split * self.decode_ratio

    @property
    def makes_its_blocks(self) -> bool:
        """Whether the release makes D's kernel blocks rightly of those that it reads of P."""
        if self.split == 1 or since("0.32.0"):
            return True
        return not since("0.29.0") if self.mla else not (since("0.26.0") or self.whole)


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
                whole=d.whole,
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

        Raises:
            EngineDiedError: D's worker raised when all had arrived.
        """
        p, d = (_Side(worker, self.deployment.whole) for worker in (self.prefill, self.decode))
        theirs, ours = p.allocate(tokens, seed), d.allocate(tokens, seed + 1)
        for group in range(len(self.deployment.groups)):
            p.fill(group, theirs[group], tokens)
        self.transfer(
            [d.asked_for(g, ids, hit) for g, ids in enumerate(ours)],
            [p.asked_for(g, ids, 0) for g, ids in enumerate(theirs)],
        )
        first = hit * self.deployment.decode_block
        found = [
            fault
            for group in range(len(self.deployment.groups))
            for fault in d.faults(group, ours[group], range(first, tokens), theirs[group], p)
        ]
        return found + d.strays(ours, hit)

    def transfer(self, ours: list[list[int]], theirs: list[list[int]]) -> None:
        """Make D receive `theirs` into `ours`, logical blocks of each group, and step it then."""
        receive(self.decode, local_blocks=ours, remote_blocks=theirs)
        nixl = nixl_of(self.decode)
        for read in nixl.in_flight():
            nixl.move(read)
            nixl.finish(read)
        lives(step, self.decode)


def _value(token: int, layer: int) -> float:
    return float(1 + token + layer * MAX_TOKENS)


class _Side:
    """One engine's caches, looked at as an attention kernel does."""

    def __init__(self, worker: NixlConnectorWorker, whole: bool) -> None:
        self.worker = worker
        self.whole = whole
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
                    self._kernel_block(cache, kernel)[:] = -1
            for token in range(tokens):
                self._cell(cache, ids, token)[:] = _value(token, layer)

    def faults(
        self,
        group: int,
        ids: list[int],
        wanted: Sequence[int],
        remote_ids: list[int],
        remote: _Side,
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
                cell = self._cell(cache, ids, token)
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
            and bool(self._kernel_block(self.worker.device_kv_caches[name], kernel).any())
        ]

    def _cell(self, cache: torch.Tensor, ids: list[int], token: int) -> torch.Tensor:
        """Where a token's keys and values are."""
        within = token % self.block
        index = ids[token // self.block] * self.ratio + within // self.kernel
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
