"""A real NIXL connector worker on a CPU, with a scripted NIXL underneath.

The worker under test is upstream's own `NixlConnectorWorker`: its constructor,
`register_kv_caches`, `add_remote_agent` and everything behind them run as released (or as
patched). Replaced are only its surroundings: the NIXL library (`ScriptedNixl`), the attention
backend (a stand-in that declares a cache layout and its kernel block sizes), the
tensor-parallel group (rank and size), and the model hub (a configuration written by us).

A test reads like the life of a request on the decode side::

    worker = make_worker()
    connect(worker, "P", tp_size=2)
    receive(worker, "req-d", local_blocks=[[1, 2]], remote_blocks=[[5, 6]],
            remote_request_id="req-p", engine_id="P", tp_size=2)
    nixl = nixl_of(worker)
    nixl.finish(nixl.reads[0])
    sent, received = worker.get_finished()

One code serves every supported release; what differs between them is absorbed by building the
peer's metadata field by field (`peer_metadata`) and registering it through the worker's own
`add_remote_agent`. Load the plugin `tests.support.vllm_cpu` first.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import inspect
import itertools
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from unittest import mock

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector import utils as kv_connector_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.support.harness import HarnessError, building, is_of_release
from tests.support.nixl_release import NixlAgentMetadata, NixlConnectorMetadata, NixlConnectorWorker
from tests.support.stand_in_model import HEAD_SIZE, HEADS, LAYERS, model_folder

GroupKind = Literal["full", "sliding", "mamba", "kda", "wide", "nvfp4"]
"""What one KV-cache group holds: all tokens, a window of them, a recurrent state of Mamba-2 or of
Kimi's delta attention, all tokens in blocks of twice the size, as layers with half the heads
have them beside others, or all tokens in four bits an element, with scales."""

STATES = ("mamba", "kda")
"""The kinds of groups that hold states."""

STATE_LAYOUT = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
"""Transfers demand this layout of a state's convolution; it is asked for once in a process."""

_Result = TypeVar("_Result")

State = Literal["PROC", "DONE", "ERR"]
"""What NIXL says about a posted read."""

DTYPE = torch.float16
"""Of the cache, as of the model."""

# ---------------------------------------------------------------- what differs between releases

_MODULE: Any = sys.modules[NixlConnectorWorker.__mro__[-2].__module__]
"""Where the worker's constructor finds its names: from 0.24.0 on with what pull and push share."""

PACKED = "layers" in {field.name for field in dataclasses.fields(KVCacheTensor)}
"""The layout of a cache is part of the configuration: from 0.29.0 on."""

_TOPOLOGY = vars(kv_connector_utils).get("TransferTopology")

BESIDE = PACKED or (_TOPOLOGY is not None and not hasattr(_TOPOLOGY, "split_k_and_v"))
"""Keys and values lie beside each other in a cache whose first dimension is the blocks: from 0.26.0
on."""

_ONE_STATE = BESIDE and not hasattr(_TOPOLOGY, "get_transfer_cache_regions")
"""All states of a layer are one cache: from 0.27.0 on."""

STAGES = "remote_pp_size" in inspect.signature(NixlConnectorWorker._nixl_handshake).parameters
"""Peers may have several pipeline stages: from 0.26.0 on."""

_AWAITING = (
    "awaiting_kvs" in inspect.signature(NixlConnectorMetadata.add_new_req_to_recv).parameters
)
"""The worker is told whether the scheduler awaits what it asks for: from 0.30.0 on."""


def topology_of(worker: NixlConnectorWorker) -> Any:  # noqa: ANN401 - named otherwise up to 0.19.1
    """What a worker with registered caches knows of tensor ranks, its own and its peers'."""
    topology = worker.kv_topo if hasattr(worker, "kv_topo") else worker.transfer_topo
    if topology is None:
        raise HarnessError("a worker without registered caches", "one from `make_worker`")
    return topology


def target_ranks(worker: NixlConnectorWorker, tp_size: int) -> list[int]:
    """The tensor ranks of a peer of `tp_size` that this worker shakes hands with."""
    topology = topology_of(worker)
    old = hasattr(topology, "get_target_remote_ranks")  # up to 0.19.1
    name = "get_target_remote_ranks" if old else "handshake_target_ranks"
    ranks: list[int] = getattr(topology, name)(tp_size)
    return ranks


def rank_key(rank: int) -> Any:  # noqa: ANN401 - an int, or pipeline and tensor rank
    """How the worker calls a tensor rank of its peers."""
    return (0, rank) if STAGES else rank


def handshake_result(agents: dict[Any, str]) -> Any:  # noqa: ANN401 - a dict, or a tuple
    """What a handshake that found these agents returns; with peers of several stages also the
    difference between the clocks."""
    return (agents, 0.0) if STAGES else agents


# ---------------------------------------------------------------- the scripted NIXL


class Call(NamedTuple):
    """One call that the worker made to NIXL, with its arguments in order."""

    name: str
    args: tuple[Any, ...]


@dataclasses.dataclass(eq=False)
class Read:
    """A read that the worker made with `make_prepped_xfer`.

    `agent` is the peer it reads from; `local` and `remote` are indices into the descriptor lists
    whose handles are `sides`; `notif` is what the peer hears when the read is complete.
    """

    handle: int
    agent: str
    local: list[int]
    remote: list[int]
    notif: bytes
    sides: tuple[int, int] = (0, 0)
    state: State = "PROC"
    posted: bool = False
    released: bool = False


class MismatchError(Exception):
    """A read between blocks of two sizes, or beyond our memory, which NIXL refuses to make."""


class UnscriptedError(HarnessError, AttributeError):
    """The release wants something of NIXL that `ScriptedNixl` does not have."""


class ScriptedNixl:
    """Stands in for NIXL's agent: records every call in order, does what the test says.

    Attributes:
        calls: every call so far, oldest first.
        reads: every read made so far, oldest first; `state` decides what polling answers.
        heard: agent name -> notifications it received, from `send_notif` and from reads that
            completed, in order; without heartbeats, which from 0.22.0 on prolong leases.
        inbox: what the next `get_new_notifs` hands to the worker (agent name -> payloads).
        on: call name -> function run with the call's arguments, after it was recorded and
            before anything happens. It may raise, or return the call's result (None: go on as
            usual).
        misuse: what a real NIXL would answer with a crash: use of a released handle, a second
            release. Also raised, but guards in the worker may swallow that; assert on this.
    """

    def __init__(self, agent_name: str, config: object = None) -> None:
        self.name = agent_name
        self.calls: list[Call] = []
        self.reads: list[Read] = []
        self.heard: dict[str, list[bytes]] = defaultdict(list)
        self.inbox: dict[str, list[bytes]] = {}
        self.on: dict[str, Callable[..., Any]] = {}
        self.misuse: list[str] = []
        self._handles = itertools.count(1)
        self._sides: dict[int, str] = {}
        self._descs: dict[int, Any] = {}
        self._reads: dict[int, Read] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> None:
            raise UnscriptedError(f"NIXL is asked for `{name}`", "what `ScriptedNixl` has")

    # For the test.

    def called(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of every call of that name, oldest first."""
        return [call.args for call in self.calls if call.name == name]

    def finish(self, *reads: Read) -> None:
        """Complete these reads: polling says DONE and each peer hears its notification."""
        for read in reads:
            read.state = "DONE"
            self.heard[read.agent].append(read.notif)

    def fail(self, *reads: Read) -> None:
        """Let these reads end in an error: polling says ERR and the peers hear nothing."""
        for read in reads:
            read.state = "ERR"

    def move(self, read: Read) -> None:
        """Copy the bytes of a read, as NIXL does; the peer's memory must be in this process.

        Raises:
            MismatchError: NIXL would not.
        """
        known = [
            (int(start), int(length))
            for (regions,) in self.called("register_memory")
            for start, length, *_ in regions
        ]
        ours, theirs = (self._descs[side] for side in read.sides)
        for to, source in zip(read.local, read.remote, strict=True):
            # Some releases make arrays, of numbers without a sign.
            target, size, origin, offered = map(int, (*ours[to][:2], *theirs[source][:2]))
            if size != offered:
                raise MismatchError(f"descriptors of {size} and {offered} bytes")
            if not any(0 <= target - start <= length - size for start, length in known):
                raise MismatchError(f"a read of {size} bytes into what is not registered")
            ctypes.memmove(target, origin, size)

    def in_flight(self) -> list[Read]:
        """The reads that may still write into local blocks."""
        return [r for r in self.reads if r.posted and not r.released and r.state == "PROC"]

    # For the worker.

    def _record(self, name: str, *args: Any) -> Any:  # noqa: ANN401 - a call's result
        self.calls.append(Call(name, args))
        script = self.on.get(name)
        return script(*args) if script is not None else None

    def _read(self, handle: int, use: str) -> Read:
        read = self._reads.get(handle)
        if read is None or read.released:
            fault = f"{use} of {'an unknown' if read is None else 'a released'} handle {handle}"
            self.misuse.append(fault)
            raise RuntimeError(fault)
        return read

    def get_reg_descs(self, caches: Any, memory_type: str) -> list[Any]:  # noqa: ANN401
        return list(caches)

    def register_memory(self, descs: Any, backends: Any = None) -> None:  # noqa: ANN401
        self._record("register_memory", descs)

    def deregister_memory(self, descs: Any) -> None:  # noqa: ANN401
        self._record("deregister_memory", descs)

    def get_xfer_descs(self, blocks: Any, memory_type: str) -> list[Any]:  # noqa: ANN401
        return list(blocks)

    def check_remote_metadata(self, agent: str) -> bool:
        return True

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        result = self._record("add_remote_agent", metadata)
        return str(result) if result is not None else metadata.decode()

    def remove_remote_agent(self, agent: str) -> None:
        self._record("remove_remote_agent", agent)

    def prep_xfer_dlist(self, agent: str, descs: Any, mem_type: str = "") -> int:  # noqa: ANN401
        self._record("prep_xfer_dlist", agent, descs)
        handle = next(self._handles)
        self._sides[handle] = agent
        self._descs[handle] = _blocks(descs)
        return handle

    def release_dlist_handle(self, handle: int) -> None:
        self._record("release_dlist_handle", handle)

    def make_prepped_xfer(
        self,
        operation: str,
        local_side: int,
        local_ids: Any,  # noqa: ANN401 - any integer sequence
        remote_side: int,
        remote_ids: Any,  # noqa: ANN401
        notif_msg: bytes = b"",
    ) -> int:
        agent = self._sides[remote_side]
        local, remote = [int(i) for i in local_ids], [int(i) for i in remote_ids]
        self._record("make_prepped_xfer", agent, local, remote, notif_msg)
        sides = (local_side, remote_side)
        read = Read(next(self._handles), agent, local, remote, notif_msg, sides)
        self._reads[read.handle] = read
        self.reads.append(read)
        return read.handle

    def transfer(self, handle: int) -> str:
        read = self._read(handle, "transfer")
        self._record("transfer", handle)
        read.posted = True
        return read.state

    def check_xfer_state(self, handle: int) -> str:
        read = self._read(handle, "check_xfer_state")
        result = self._record("check_xfer_state", handle)
        return str(result) if result is not None else read.state

    def get_xfer_telemetry(self, handle: int) -> object:
        self._read(handle, "get_xfer_telemetry")
        result = self._record("get_xfer_telemetry", handle)
        if result is not None:
            return result
        return SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=1, descCount=1)

    def release_xfer_handle(self, handle: int) -> None:
        read = self._read(handle, "release_xfer_handle")
        self._record("release_xfer_handle", handle)
        read.released = True

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        self._record("send_notif", agent, notif_msg)
        if not notif_msg.startswith(b"HB:"):
            self.heard[agent].append(notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        result = self._record("get_new_notifs")
        inbox, self.inbox = self.inbox, {}
        return result if result is not None else inbox


def _blocks(descs: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """Address, bytes and device of each block, where rows may add a stride and a count to that."""
    if len(descs) == 0 or len(descs[0]) == 3:
        return descs
    return [
        (int(address) + i * int(stride), int(size), int(device))
        for address, size, device, stride, count in descs
        for i in range(int(count))
    ]


SCRIPTED: Mapping[str, Any] = {"NixlWrapper": ScriptedNixl, "nixl_agent_config": None}
"""What a worker's module takes its NIXL from: names and what stands there in nearly every test."""


def raising(error: Exception, when: Callable[..., bool] = lambda *_: True) -> Callable[..., None]:
    """A script for `ScriptedNixl.on` that raises `error` for the calls that `when` picks."""

    def script(*args: Any) -> None:  # noqa: ANN401 - whatever the call got
        if when(*args):
            raise error

    return script


# ---------------------------------------------------------------- configuration


@lru_cache(maxsize=2)
def tiny_model(mla: bool) -> str:
    """A folder with the configuration of a small model; `mla` gives it a DeepSeek-like latent
    cache, else it is Llama-like with `HEADS` KV heads."""
    if not mla:
        return str(model_folder("KvfixTinyModel", vocab_size=128))
    folder = model_folder(
        "KvfixTinyMlaModel",
        model_type="deepseek_v2",
        vocab_size=128,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=LAYERS,
    )
    return str(folder)


@lru_cache(maxsize=2)
def _model_config(mla: bool) -> ModelConfig:
    """What vLLM reads of `tiny_model`: most of the time that a configuration takes."""
    return ModelConfig(
        model=tiny_model(mla),
        tokenizer=None,
        skip_tokenizer_init=True,
        dtype="float16",
        seed=0,
    )


@building("a configuration of vLLM")
def make_vllm_config(
    *,
    mla: bool = False,
    hybrid: bool = False,
    block_size: int = 16,
    engine_id: str | None = None,
    connector: str = "NixlConnector",
    policy: Literal["recompute", "fail"] = "recompute",
    prefix_caching: bool = True,
    layout: Literal["HND", "NHD"] = "HND",
    permute: bool = False,
    extra_config: dict[str, Any] | None = None,
) -> VllmConfig:
    """A configuration as a P/D engine has it; `hybrid` allows several KV-cache groups, `permute`
    a peer whose cache has the other layout (`enable_permute_local_kv`).

    Tensor parallelism is not part of it: `make_worker` gives the worker its rank and size.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = VllmConfig(
            model_config=copy.deepcopy(_model_config(mla)),
            cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=2048,
                max_model_len=2048,
                is_encoder_decoder=False,
                disable_hybrid_kv_cache_manager=not hybrid,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector=connector,
                kv_role="kv_both",
                engine_id=engine_id,
                kv_load_failure_policy=policy,
                enable_permute_local_kv=permute,
                kv_connector_extra_config=extra_config or {},
            ),
        )
    # For a latent cache, later CPU platforms put a block size of their own in its place.
    config.cache_config.block_size = block_size
    if PACKED:
        config.cache_config.kv_cache_layout = {"HND": "LBHNC", "NHD": "LBNHC"}[layout]
    return config


def _backend(
    mla: bool, kernel_block_size: int | None, whole: bool = False
) -> type[AttentionBackend]:
    """An attention backend that only declares its cache: name, shape, kernel block sizes."""

    class TinyBackend(AttentionBackend):  # type: ignore[misc, unused-ignore]
        @staticmethod
        def get_name() -> str:
            return "TINY_MLA" if mla else "TINY"

        @staticmethod
        def get_impl_cls() -> type[Any]:
            raise NotImplementedError

        @staticmethod
        def get_builder_cls() -> type[Any]:
            raise NotImplementedError

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[Any]:
            return (
                [kernel_block_size]
                if kernel_block_size
                else super(TinyBackend, TinyBackend).get_supported_kernel_block_sizes()
            )

        @staticmethod
        def get_kv_cache_shape(
            num_blocks: int,
            block_size: int,
            num_kv_heads: int,
            head_size: int,
            cache_dtype_str: str = "auto",
        ) -> tuple[int, ...]:
            if mla:
                return (num_blocks, block_size, head_size)
            if BESIDE:
                return (num_blocks, num_kv_heads, block_size, 2 * head_size)
            first = (num_blocks, 2) if whole else (2, num_blocks)
            return (*first, block_size, num_kv_heads, head_size)

    return TinyBackend


def _nvfp4(block_size: int, heads: int) -> KVCacheSpec:
    """Of 16 elements of each head: from 0.20.0 on."""
    known = {field.name for field in dataclasses.fields(FullAttentionSpec)}
    packed: dict[str, Any] = {"num_head_slots": 2 * heads, "state_content_bytes": 9}
    spec: Any = FullAttentionSpec
    made: KVCacheSpec = spec(
        block_size=block_size,
        num_kv_heads=heads,
        head_size=16,
        dtype=torch.uint8,
        kv_quant_mode=kv_cache_interface.KVQuantMode.NVFP4,
        **(packed if known.issuperset(packed) else {}),
    )
    return made


def _spec(
    kind: GroupKind, mla: bool, block_size: int, heads: int, state_tokens: int
) -> KVCacheSpec:
    if kind == "nvfp4":
        return _nvfp4(block_size, heads)
    full: FullAttentionSpec = (
        MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=40, dtype=DTYPE)
        if mla
        else FullAttentionSpec(
            block_size=block_size, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=DTYPE
        )
    )
    if kind == "full" or (mla and kind not in STATES):
        return full
    if kind == "wide":
        return FullAttentionSpec(
            block_size=2 * block_size, num_kv_heads=heads // 2, head_size=HEAD_SIZE, dtype=DTYPE
        )
    if kind == "sliding":
        return SlidingWindowSpec(
            block_size=block_size,
            num_kv_heads=heads,
            head_size=HEAD_SIZE,
            dtype=DTYPE,
            sliding_window=2 * block_size,
        )
    if kind == "kda":
        with mock.patch.dict(os.environ, STATE_LAYOUT):
            shapes = MambaStateShapeCalculator.kda_state_shape(1, heads, 4)
        return MambaSpec(
            block_size=block_size,
            shapes=shapes,
            dtypes=(DTYPE,) * len(shapes),
            page_size_padded=full.page_size_bytes,
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        )
    # A Mamba-2 state as this rank holds it: convolution (channels of x, B and C by kernel width
    # less one) and SSM (heads, head size, state size). By default the state size is chosen so
    # that the state fills the attention groups' page, as real hybrids nearly do: up to 0.20.2 a
    # worker infers its peer's kernel block from that.
    return MambaSpec(
        block_size=block_size,
        shapes=((heads * 4 + 2 * heads * 2, 3), (heads, 4, 4 * state_tokens - 6)),
        dtypes=(DTYPE, DTYPE),
        page_size_padded=full.page_size_bytes,
    )


@building("a configuration of KV caches")
def make_kv_cache_config(
    groups: Sequence[GroupKind] = ("full",),
    *,
    mla: bool = False,
    block_size: int = 16,
    num_blocks: int = 8,
    heads: int = HEADS,
    state_tokens: int | None = None,
) -> KVCacheConfig:
    """A KV-cache configuration with `LAYERS` layers in each group.

    The i-th layers of all groups share one tensor, as vLLM's hybrid allocator lays them out.
    `block_size` is in tokens and logical (what the user set), `num_blocks` counts such blocks,
    `heads` are the KV heads of one rank. A Mamba state is as large as the KV of `state_tokens`
    tokens (a logical block's if None; more do not fit).
    """
    state_tokens = state_tokens or block_size
    specs = [_spec(kind, mla, block_size, heads, state_tokens) for kind in groups]
    names = [[f"group{g}.layer{i}" for i in range(LAYERS)] for g in range(len(groups))]
    page = specs[0].page_size_bytes
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            _tensor(page, num_blocks, [group[i] for group in names]) for i in range(LAYERS)
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(group, spec) for group, spec in zip(names, specs, strict=True)
        ],
    )


def _tensor(page: int, num_blocks: int, layers: list[str]) -> Any:  # noqa: ANN401 - KVCacheTensor
    """One tensor whose pages belong to any of `layers`, which are of different groups."""
    tensor: Any = KVCacheTensor
    if PACKED:
        return tensor(size=page * num_blocks, layers=layers, layer_stride=0, block_stride=page)
    return tensor(size=page * num_blocks, shared_by=layers)


# ---------------------------------------------------------------- the worker


def allocate(
    config: KVCacheConfig,
    kernel_block_size: int,
    whole: bool = False,
    layout: Literal["HND", "NHD"] = "HND",
) -> dict[str, Any]:
    """Zeroed caches for `register_kv_caches`, laid out as the model runner does it; `whole` and
    `layout` as in `make_worker`."""
    hybrid = any(isinstance(g.kv_cache_spec, MambaSpec) for g in config.kv_cache_groups)
    storage = {
        name: tensor
        for shared in config.kv_cache_tensors
        for tensor in [torch.zeros(shared.size, dtype=torch.int8)]
        for name in (shared.layers if PACKED else shared.shared_by)
    }
    caches: dict[str, Any] = {}
    smallest = min(group.kv_cache_spec.block_size for group in config.kv_cache_groups)
    in_smallest = kernel_block_size
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        kernel_block_size = in_smallest * (spec.block_size // smallest)
        for name in group.layer_names:
            raw = storage[name]
            if isinstance(spec, MambaSpec):
                blocks = raw.view(config.num_blocks, -1)
                caches[name] = blocks if _ONE_STATE else states_in(blocks, spec)
                continue
            kernel_blocks = config.num_blocks * spec.block_size // kernel_block_size
            if spec.dtype == torch.uint8:  # nvfp4, heads outermost
                inner = (2 * spec.num_kv_heads,) if BESIDE else (2, spec.num_kv_heads)
                pages = raw.view(torch.uint8).view(kernel_blocks, *inner, kernel_block_size, -1)
                caches[name] = pages if BESIDE else pages.transpose(2, 3)
                continue
            flat = raw.view(DTYPE)
            latent = isinstance(spec, MLAAttentionSpec)
            if PACKED or (BESIDE and not latent):
                inner = spec.num_kv_heads, kernel_block_size
                caches[name] = (
                    flat.view(kernel_blocks, *inner, -1)
                    if layout == "HND"
                    else flat.view(kernel_blocks, *reversed(inner), -1).transpose(1, 2)
                )
            elif latent:
                caches[name] = flat.view(kernel_blocks, kernel_block_size, spec.head_size)
            elif hybrid:  # blocks first, so that states and attention can share pages
                caches[name] = flat.view(
                    kernel_blocks, 2, spec.num_kv_heads, kernel_block_size, HEAD_SIZE
                )
            else:  # the backend's shape names tokens before heads
                first = (kernel_blocks, 2) if whole else (2, kernel_blocks)
                inner = spec.num_kv_heads, kernel_block_size
                caches[name] = (
                    flat.view(*first, *inner, HEAD_SIZE).transpose(2, 3)
                    if layout == "HND"
                    else flat.view(*first, *reversed(inner), HEAD_SIZE)
                )
    return caches


def states_in(cache: Any, spec: MambaSpec) -> list[torch.Tensor]:  # noqa: ANN401 - see allocate
    """The parts of the states in a cache, each with the blocks first; what it is made of already up
    to 0.26.0, and lies one after the other in each block later."""
    if isinstance(cache, list):
        return cache
    states, start = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        size = torch.Size(shape).numel() * dtype.itemsize
        states.append(cache[:, start : start + size].view(dtype).unflatten(1, shape))
        start += size
    return states


@contextlib.contextmanager
def surroundings(
    *,
    mla: bool = False,
    kernel_block_size: int | None = None,
    layout: Literal["HND", "NHD"] = "HND",
    whole: bool = False,
    **names: Any,  # noqa: ANN401 - any replacement
) -> Iterator[None]:
    """Replace what a worker meets while it is built, and nothing for longer.

    `names` are further names of the worker's module to replace.
    """
    backend = _backend(mla, kernel_block_size, whole)
    names = {
        **SCRIPTED,
        "get_current_attn_backends": lambda *_: [backend],
        **({} if PACKED else {"get_kv_cache_layout": lambda: layout}),
        **names,
    }
    with (
        mock.patch.multiple(_MODULE, **names),
        mock.patch.dict(os.environ, STATE_LAYOUT),
        # On its CPU platform the worker pins the calling thread to a core: not in a test run.
        mock.patch.object(os, "sched_setaffinity"),
    ):
        yield


@contextlib.contextmanager
def context_rank(tp_rank: int, size: int) -> Iterator[None]:
    """Be the rank, of so many that share a prompt's tokens, that a tensor rank is."""
    group = SimpleNamespace(rank_in_group=tp_rank % size, world_size=size)
    with mock.patch.object(parallel_state, "get_dcp_group", lambda: group):
        yield


@building("a NIXL worker")
def make_worker(
    *,
    engine_id: str = "D",
    tp_size: int = 1,
    tp_rank: int = 0,
    mla: bool = False,
    groups: Sequence[GroupKind] = ("full",),
    block_size: int = 16,
    kernel_block_size: int | None = None,
    num_blocks: int = 8,
    state_tokens: int | None = None,
    layout: Literal["HND", "NHD"] = "HND",
    whole: bool = False,
    worker_class: type[NixlConnectorWorker] = NixlConnectorWorker,
    nixl: Mapping[str, Any] = SCRIPTED,
    context: tuple[int, int] = (1, 1),
    **config: Any,  # noqa: ANN401 - handed on
) -> NixlConnectorWorker:
    """A worker with registered KV caches, over a `ScriptedNixl` (see `nixl_of`) or a real one.

    Args:
        engine_id: the engine that this worker belongs to.
        tp_size: ranks of the engine.
        tp_rank: this worker's rank.
        mla: a latent KV cache, the same on every rank.
        groups: what each KV-cache group holds.
        block_size: tokens in a logical block.
        kernel_block_size: tokens in a kernel block; the same as `block_size` if None.
        num_blocks: logical blocks of the cache.
        state_tokens: size of a Mamba state, see `make_kv_cache_config`.
        layout: the cache's layout; different TP sizes on P and D need HND.
        whole: keys and values of a block lie together, as FlashInfer has them, and from 0.23.0 on
            FlashAttention too, not each in a tensor of its own. From 0.26.0 on they always do.
        worker_class: the class to build.
        nixl: the NIXL underneath.
        context: ranks that share a prompt's tokens (decode context parallelism), and how many
            tokens in a row each has.
        config: further keyword arguments of `make_vllm_config`.
    """
    heads = max(1, HEADS // tp_size)
    vllm_config = make_vllm_config(
        mla=mla,
        hybrid=len(groups) > 1 or any(kind in STATES for kind in groups),
        block_size=block_size,
        engine_id=engine_id,
        layout=layout,
        **config,
    )
    vllm_config.parallel_config.tensor_parallel_size = tp_size
    vllm_config.parallel_config.decode_context_parallel_size = context[0]
    vllm_config.parallel_config.cp_kv_cache_interleave_size = context[1]
    kv_cache_config = make_kv_cache_config(
        groups,
        mla=mla,
        block_size=block_size,
        num_blocks=num_blocks,
        heads=heads,
        state_tokens=state_tokens,
    )
    with (
        surroundings(
            mla=mla,
            kernel_block_size=kernel_block_size,
            layout=layout,
            whole=whole,
            get_tensor_model_parallel_rank=lambda: tp_rank,
            get_tensor_model_parallel_world_size=lambda: tp_size,
            **nixl,
        ),
        context_rank(tp_rank, context[0]),
    ):
        worker = worker_class(vllm_config, engine_id, kv_cache_config)
        caches = allocate(kv_cache_config, kernel_block_size or block_size, whole, layout)
        worker.register_kv_caches(caches)
    return worker


def nixl_of(worker: NixlConnectorWorker) -> ScriptedNixl:
    """The scripted NIXL under a worker that `make_worker` built."""
    nixl = worker.nixl_wrapper
    if not isinstance(nixl, ScriptedNixl):
        raise HarnessError(f"a worker over {nixl!r}", "one over a `ScriptedNixl`")
    return nixl


# ---------------------------------------------------------------- its peers


def agent_name(engine_id: str, rank: int) -> str:
    """The NIXL agent of a peer's rank, as `ScriptedNixl` reports it."""
    return f"{engine_id}/{rank}"


def peer_metadata(
    worker: NixlConnectorWorker,
    engine_id: str,
    rank: int = 0,
    tp_size: int = 1,
    **changes: Any,  # noqa: ANN401 - any field
) -> NixlAgentMetadata:
    """What rank `rank` of a peer with the same model says about itself in the handshake.

    `changes` override fields of `NixlAgentMetadata`; those that a release does not know are an
    error there, as on the wire.
    """
    ratio = topology_of(worker).tp_ratio(tp_size)
    lens = worker.block_len_per_layer
    if not worker.use_mla:
        # A peer of more ranks holds fewer heads in each block, one of fewer ranks more.
        lens = [length // -ratio if ratio < 0 else length * ratio for length in lens]
    fields: dict[str, Any] = {
        "engine_id": engine_id,
        "agent_metadata": agent_name(engine_id, rank).encode(),
        "kv_caches_base_addr": [0x1000 * (i + 1) for i in range(len(lens))],
        "device_id": 0,
        "num_blocks": worker.num_blocks,
        "block_lens": list(lens),
        "kv_cache_layout": worker.kv_cache_layout,
        "block_size": worker.block_size,
        "ssm_sizes": tuple(
            size // -ratio if ratio < 0 else size * ratio for size in worker._mamba_ssm_size
        ),
    }
    known = {field.name for field in dataclasses.fields(NixlAgentMetadata)}
    if "attn_backend_name" in known:  # sent from 0.20.0 on
        fields["attn_backend_name"] = worker.backend_name
    if "physical_blocks_per_logical_kv_block" in known:  # sent from 0.21.0 on
        fields["physical_blocks_per_logical_kv_block"] = (
            worker._physical_blocks_per_logical_kv_block
        )
    if "block_strides" in known:
        fields["block_strides"] = list(lens)
    return NixlAgentMetadata(**(fields | changes))


def register_peer(
    worker: NixlConnectorWorker,
    engine_id: str,
    tp_size: int = 1,
    **changes: Any,  # noqa: ANN401 - any field of the metadata
) -> dict[Any, str]:
    """Do what a handshake with every rank that this worker talks to does, without a network.

    Returns:
        rank -> agent name: a handshake's result.
    """
    return {
        rank_key(rank): worker.add_remote_agent(
            peer_metadata(worker, engine_id, rank, tp_size, **changes), rank, tp_size
        )
        for rank in target_ranks(worker, tp_size)
    }


def connect(
    worker: NixlConnectorWorker,
    engine_id: str = "P",
    tp_size: int = 1,
    **changes: Any,  # noqa: ANN401 - any field of the metadata
) -> dict[Any, str]:
    """Make the worker know a peer engine, as after a handshake that succeeded."""
    agents = register_peer(worker, engine_id, tp_size, **changes)
    with worker._handshake_lock:
        worker._remote_agents[engine_id] = agents
        note_activity(worker, engine_id)
        if STAGES:
            worker._engine_clock_offset[engine_id] = 0.0
        if hasattr(worker, "_track_remote_engine_replacement"):  # from 0.31.0 on
            worker._track_remote_engine_replacement(engine_id, "127.0.0.1", peer_port(engine_id))
    return agents


def note_activity(worker: NixlConnectorWorker, engine_id: str) -> None:
    """Note that a peer has just been heard of, where the release asks when it was."""
    if hasattr(worker, "_engine_last_active"):  # from 0.24.0 on
        worker._engine_last_active[engine_id] = time.perf_counter()


def peer_port(engine_id: str) -> int:
    """Where a peer listens; from 0.31.0 on one that comes to another's address takes its place."""
    return 1 + sum(engine_id.encode())


def script_handshake(
    worker: NixlConnectorWorker, act: Callable[[str, int], dict[Any, str]]
) -> None:
    """Let `act(engine_id, tp_size)` be the handshake. It runs on the worker's own handshake
    thread; it may wait for an event, raise, or succeed with `register_peer`'s result."""

    def handshake(
        host: str,
        port: int,
        remote_tp_size: int,
        expected: str,
        *sizes: int,  # of other kinds of parallelism
    ) -> Any:  # noqa: ANN401 - see handshake_result
        return handshake_result(act(expected, remote_tp_size))

    worker._nixl_handshake = handshake


def await_handshakes(worker: NixlConnectorWorker, timeout: float = 10.0) -> None:
    """Wait until every handshake begun so far has ended and its callbacks have run.

    Raises:
        TimeoutError: one of them did not end within `timeout` seconds.
    """
    # One thread runs handshakes and their callbacks: what it is given now runs after them.
    worker._handshake_initiation_executor.submit(lambda: None).result(timeout)


# ---------------------------------------------------------------- requests


def receive(
    worker: NixlConnectorWorker,
    req_id: str = "req-d",
    *,
    local_blocks: Sequence[Sequence[int]] = ((1, 2),),
    remote_blocks: Sequence[Sequence[int]] = ((5, 6),),
    remote_request_id: str = "req-p",
    engine_id: str = "P",
    tp_size: int = 1,
) -> None:
    """One engine step in which the scheduler asks the worker to receive a request's KV.

    Blocks are logical ids, one list for each KV-cache group; no lists at all for
    `local_blocks` is a receive that only tells P to free its blocks.
    """
    metadata = NixlConnectorMetadata()
    metadata.add_new_req_to_recv(
        request_id=req_id,
        local_block_ids=[list(group) for group in local_blocks],
        kv_transfer_params={
            "remote_block_ids": [list(group) for group in remote_blocks],
            "remote_engine_id": engine_id,
            "remote_request_id": remote_request_id,
            "remote_host": "127.0.0.1",
            "remote_port": peer_port(engine_id),
            "tp_size": tp_size,
        },
        **({"awaiting_kvs": any(local_blocks)} if _AWAITING else {}),
    )
    worker.start_load_kv(metadata)


def step(worker: NixlConnectorWorker) -> tuple[set[str], set[str]]:
    """One engine step with nothing new: requests done sending, requests done receiving."""
    worker.start_load_kv(NixlConnectorMetadata())
    sent, received = worker.get_finished()
    return sent, received


def hold(worker: NixlConnectorWorker, req_id: str, deadline: float = float("inf")) -> None:
    """Make the worker, as a prefill worker, hold a request's blocks until it is notified."""
    metadata = NixlConnectorMetadata()
    metadata.reqs_in_batch.add(req_id)
    metadata.reqs_to_send[req_id] = deadline
    stamp(metadata)
    worker.start_load_kv(metadata)


def stamp(metadata: NixlConnectorMetadata) -> NixlConnectorMetadata:
    """Say when the scheduler made it, where it says so: from 0.27.1 on."""
    if hasattr(metadata, "scheduler_clock"):
        metadata.scheduler_clock = time.perf_counter()
    return metadata


# ---------------------------------------------------------------- what becomes of the engine


class EngineDiedError(Exception):
    """The release raised where that ends the engine; `__cause__` is what it raised."""


def lives(step: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:  # noqa: ANN401
    """Return `step(*args, **kwargs)`, one of the calls out of which an exception ends the engine.

    Raises:
        EngineDiedError: the release raised. A test that is about that asserts on `attempt`.
        HarnessError: something else did.
    """
    try:
        return step(*args, **kwargs)
    except (EngineDiedError, HarnessError):
        raise
    except Exception as error:
        if not is_of_release(error):
            raise HarnessError(f"{error!r}", "calls that the release knows") from error
        raise EngineDiedError(f"the engine dies of {error!r}") from error


def attempt(
    step: Callable[..., _Result],
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> _Result | EngineDiedError:
    """Return `step(*args, **kwargs)`, or how the engine died of it, which equals nothing else."""
    try:
        return lives(step, *args, **kwargs)
    except EngineDiedError as died:
        return died


def sent(worker: NixlConnectorWorker) -> set[str] | EngineDiedError:
    """One engine step with nothing new: requests done sending, or how the engine died."""
    said = attempt(step, worker)
    return said if isinstance(said, EngineDiedError) else said[0]


def received(worker: NixlConnectorWorker) -> set[str] | EngineDiedError:
    """One engine step with nothing new: requests done receiving, or how the engine died."""
    said = attempt(step, worker)
    return said if isinstance(said, EngineDiedError) else said[1]
