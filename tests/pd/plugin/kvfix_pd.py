"""A vLLM plugin for machines with few cores, loaded by every process of a server under test.

NIXL's Python binding sets the pause of its progress thread to nothing, so each agent keeps one
core busy for good; two servers on two cores then wait for each other. A pause of a millisecond
brings an idle agent to a hundredth of a core.

Where vLLM's CPU platform has no attention over a latent KV cache, `kvfix_latent` has. Nothing else
of NIXL or vLLM is touched.
"""

from __future__ import annotations

from collections.abc import Callable

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


def _paused(make: Callable[..., object]) -> Callable[..., object]:
    def agent(name: str, config: _bindings.nixlAgentConfig) -> object:
        config.pthrDelay = _PAUSE_US
        return make(name, config)

    return agent


def _with_latent(choose: Callable[..., str]) -> Callable[..., str]:
    def chosen(*arguments: object, **options: object) -> str:
        try:
            return choose(*arguments, **options)
        except NotImplementedError:  # as up to 0.27 for a latent cache
            return "kvfix_latent.LatentBackend"

    return chosen
