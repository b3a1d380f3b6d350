# SPDX-License-Identifier: Apache-2.0
"""Up to 0.26.0: of a recurrent state D reads what P computed, not what it guessed.

Behind the state after the last token a scheduler that speculates keeps a slot for each guess, and
names those as well. Both lists are paired from their ends, or from their starts where P's is the
shorter one, so the state is read from its slot only if both sides guess equally many tokens. P says
how many slots it keeps for that; upstream's 0.27.0 does not name them, which a stock D of these
releases would pair as wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_overlay.v1.kv_cache_interface import state_specs

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds

_FIELD = "remote_num_speculative_blocks"
"""In `kv_transfer_params`: slots for guesses at the end of each list of states that P names."""

_Scheduler = Any
"""`NixlConnectorScheduler`; from 0.24.0 on what those that pull and those that push are made of."""


def scratch_slots(scheduler: _Scheduler) -> dict[str, int]:
    """Return what P's answer says of its slots for guesses: nothing, where it has no states."""
    for spec in state_specs(scheduler.kv_cache_config).values():
        return {_FIELD: spec.num_speculative_blocks}  # as many in each group
    return {}


def states_only(scheduler: _Scheduler, params: dict[str, Any], block_ids: BlockIds) -> BlockIds:
    """Return the blocks that are to be read into, of states without the slots for guesses.

    P's are left out of `params` as well. Of a group whose slots go by position, one for the end of
    each block of tokens, all states stay; else the last one. All is as on stock where P does not
    say how many slots it keeps, or neither side keeps any.
    """
    specs = state_specs(scheduler.kv_cache_config)
    theirs, scratch = params["remote_block_ids"], params.get(_FIELD)
    if type(scratch) is not int or scratch < 0 or len(block_ids) != len(theirs):
        return block_ids
    if not any(scratch or spec.num_speculative_blocks for spec in specs.values()):
        return block_ids
    ours, theirs = list(block_ids), list(theirs)
    for group, spec in specs.items():
        first = 0 if spec.mamba_cache_mode == "all" else -1
        ours[group] = _without(ours[group], spec.num_speculative_blocks)[first:]
        # Where P speculates it keeps the state before the last one, if its prompt's last few tokens
        # begin a block: more than D may ask for.
        theirs[group] = _without(theirs[group], scratch)[-len(ours[group]) or first :]
    params["remote_block_ids"] = theirs
    return type(block_ids)(ours)


def _without(slots: list[int], scratch: int) -> list[int]:
    """Return the slots before those for guesses, never none: that would mean that all is here."""
    return slots[: max(1, len(slots) - scratch)]
