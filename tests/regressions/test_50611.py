"""50611: with decode context parallelism, D's ranks receive the tokens that they hold, or refuse P.

Each rank keeps the KV of a share of a prompt's tokens then. A block of P's is D's only where both
hold the same share.
"""

from __future__ import annotations

import pytest
from vllm.config import ModelConfig

from tests.support.handed_over import handed_over
from tests.support.harness import HarnessError
from tests.support.kv_landing import Deployment, Engines
from tests.support.nixl_worker import EngineDiedError, nixl_of
from tests.support.prefill_engine import PrefillEngine
from tests.support.release import since

ADVICE = "Start prefill and decode with the same .*--decode-context-parallel-size"


def faults(deployment: Deployment, tokens: int, hit: int = 0) -> list[str]:
    """What is wrong on D's ranks after a prompt, of which some is cached; nothing of a rank that
    refused P before any read, and said what to start both with."""
    found = []
    for rank in range(deployment.ranks[1]):
        engines = Engines(deployment, decode_rank=rank)
        try:
            engines.connect()
        except HarnessError:
            raise
        except RuntimeError as refusal:
            with pytest.raises(RuntimeError, match=ADVICE):
                raise refusal
            assert nixl_of(engines.decode).reads == []
            continue
        try:
            found += engines.faults_of_a_prompt(tokens, hit)
        except EngineDiedError as error:
            found.append(f"the engine died: {error!r}")
    return found


def wrong(deployments: list[Deployment], hit: int = 0) -> dict[tuple[Deployment, int], list[str]]:
    """What is wrong with which prompt."""
    return {
        (deployment, tokens): found
        for deployment in deployments
        for tokens in (13, 30, 61)
        if (found := faults(deployment, tokens, hit))
    }


WHOLE = (1, 1)


def latent(ranks: tuple[int, int], *context: tuple[int, int]) -> Deployment:
    prefill, decode = context
    return Deployment(1, 1, mla=True, ranks=ranks, context=(prefill, decode))


if not since("0.29.0"):

    def test_d_shares_tokens_and_p_does_not() -> None:
        deployments = [latent((2, 2), WHOLE, (2, 1)), latent((1, 4), WHOLE, (4, 1))]
        assert wrong(deployments) == {}

    def test_p_shares_tokens_and_d_does_not() -> None:
        deployments = [latent((2, 2), (2, 1), WHOLE), latent((4, 1), (4, 1), WHOLE)]
        assert wrong(deployments) == {}

    def test_more_ranks_share_them_on_one_side() -> None:
        deployments = [latent((4, 4), (2, 1), (4, 1)), latent((4, 4), (4, 1), (2, 1))]
        assert wrong(deployments) == {}

    def test_each_has_more_of_them_in_a_row_on_one_side() -> None:
        assert wrong([latent((2, 2), (2, 1), (2, 4)), latent((4, 4), (4, 2), (4, 1))]) == {}

    def test_as_many_share_them_of_more_ranks_on_one_side() -> None:
        deployments = [latent((2, 4), (2, 1), (2, 1)), latent((4, 2), (2, 1), (2, 1))]
        assert wrong(deployments) == {}

    def test_ranks_that_hold_one_head_share_its_tokens_on_one_side(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(ModelConfig, "get_total_num_kv_heads", lambda _: 4)
        deployments = [
            Deployment(1, 1, ranks=(8, 8), context=context)
            for context in [(WHOLE, (2, 1)), ((2, 1), WHOLE), ((2, 1), (2, 2))]
        ]
        assert wrong(deployments) == {}

    def test_after_a_prefix_hit() -> None:
        assert wrong([latent((2, 2), WHOLE, (2, 1)), latent((2, 2), (2, 1), (2, 4))], hit=1) == {}

else:

    def test_p_says_how_many_ranks_share_its_tokens() -> None:
        """D asks each of them for its own."""
        p = PrefillEngine(engine_id="P")
        p.worker.vllm_config.parallel_config.decode_context_parallel_size = 2
        assert handed_over(p, "req", range(40))["dcp_size"] == 2
