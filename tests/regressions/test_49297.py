"""49297: of a hybrid with latent attention, D reads its states from all ranks of P.

The model is Kimi's: delta attention, whose states P's ranks share out, beside a latent cache, which
each of them has. Every token and every number of the states is looked up on each rank of D.
"""

from __future__ import annotations

import pytest

from tests.support.kv_landing import Deployment, Engines
from tests.support.nixl_worker import EngineDiedError, GroupKind, MismatchError, nixl_of
from tests.support.release import since

RANKS = [(2, 1), (4, 1), (4, 2)] if since("0.23.0") else []
"""Of P and D. Before, no engine starts: NIXL takes states of two parts, and Kimi's have four."""

GROUPS: list[tuple[GroupKind, ...]] = [("full", "kda"), ("kda", "full"), ("kda", "kda", "full")]


def faults(deployment: Deployment, rank: int) -> list[str]:
    """What is wrong on a rank of D after two transfers, and which of P's ranks hears too much."""
    engines = Engines(deployment, decode_rank=rank)
    engines.connect()
    try:
        found = engines.faults_of_a_prompt(29)
    except (AssertionError, EngineDiedError, MismatchError) as error:
        return [f"the engine died: {error!r}"]
    heard = nixl_of(engines.decode).heard
    ranks, ours = deployment.ranks
    if len(heard) != ranks // ours or any(len(words) != 1 for words in heard.values()):
        found.append(f"of {ranks // ours} ranks of P these hear of the read: {dict(heard)}")
    return found


@pytest.mark.parametrize("ratios", [(4, 4), (2, 4)])  # as P's smaller states allow it
def test_a_latent_cache_and_the_states_beside_it_arrive_from_a_p_of_more_ranks(
    ratios: tuple[int, int],
) -> None:
    wrong = {}
    for groups in GROUPS:
        for ranks in RANKS:
            for rank in range(ranks[1]):
                deployment = Deployment(*ratios, groups=groups, mla=True, ranks=ranks)
                if found := faults(deployment, rank):
                    wrong[deployment, rank] = found
    assert wrong == {}
