"""50153: of a recurrent state D reads what P computed, however many tokens either of them guesses.

A model with such states keeps a slot for each guess behind the state itself. P and D need not
guess alike: often P does not guess at all.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from tests.support.decode_engine import DecodeEngine
from tests.support.handed_over import handed_over
from tests.support.hybrid_engine import engine_of
from tests.support.nixl_release import NixlAgentMetadata, NixlConnectorWorker
from tests.support.nixl_worker import connect, lives, nixl_of, states_in
from tests.support.prefill_engine import PrefillEngine

TOKENS = 40
"""Of the prompt, in blocks of 16; P and D both leave the last one to D's first step."""


def prefilled(engine: PrefillEngine) -> dict[str, Any]:
    """P's answer to a prompt, as its router hands it on to D."""
    return handed_over(engine, "asked", range(TOKENS))


def states_of(worker: NixlConnectorWorker) -> list[torch.Tensor]:
    """All that is kept of states: a row for each slot."""
    [group] = [g for g in worker.kv_cache_config.kv_cache_groups if _recurrent(g.kv_cache_spec)]
    return [
        part
        for name in group.layer_names
        for part in states_in(worker.device_kv_caches[name], group.kv_cache_spec)
    ]


def _recurrent(spec: object) -> bool:
    return isinstance(spec, MambaSpec)


def received(p: PrefillEngine, d: DecodeEngine, params: dict[str, Any]) -> list[set[float]]:
    """Let D receive the prompt.

    Returns:
        for each of D's slots, the numbers of those of P whose content is in it.
    """
    for part in states_of(p.worker):
        for slot in range(len(part)):
            part[slot] = slot
    payload = p.worker.xfer_handshake_metadata
    assert payload is not None
    said = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
    connect(d.worker, "P", kv_caches_base_addr=said.kv_caches_base_addr)
    d.send("asked", range(TOKENS), params)
    d.step()
    for read in nixl_of(d.worker).reads:
        nixl_of(d.worker).move(read)
    return [
        {value for part in states_of(d.worker) for value in part[slot].unique().tolist()}
        for slot in slots_of(d)
    ]


def slots_of(engine: DecodeEngine) -> list[int]:
    """The slots that the request has for states, on P until its blocks are free."""
    slots: list[int] = engine.scheduler.kv_cache_manager.get_block_ids("asked")[1]
    return slots


def last_state(mode: str) -> int:
    """Which slot of a request has the state of the prompt but for its last token."""
    return 0 if mode == "none" else (TOKENS - 2) // 16


GUESSES = [(2, 0), (0, 2), (3, 1), (1, 3)]
"""Of P and of D."""


@pytest.mark.parametrize("modes", [("none", "none"), ("align", "align")], ids="-".join)
@pytest.mark.parametrize("guesses", GUESSES)
def test_d_goes_on_from_the_state_of_the_prompt(
    guesses: tuple[int, int], modes: tuple[str, str]
) -> None:
    p = engine_of(PrefillEngine, mode=modes[0], guesses=guesses[0])
    d = engine_of(DecodeEngine, mode=modes[1], guesses=guesses[1])
    params = prefilled(p)
    theirs = slots_of(p)[last_state(modes[0])]
    got = lives(received, p, d, params)
    assert got[last_state(modes[1])] == {theirs}
