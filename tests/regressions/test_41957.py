"""41957: a latent cache is read of a P with more ranks, also where the model names one KV head.

DeepSeek V4's config does. Each rank of P has the whole cache: D reads the first of those that it
shook hands with, and the others hear that they need not wait: all of them free the blocks.
"""

from __future__ import annotations

import pytest
from vllm.config import ModelConfig

from tests.support.kv_landing import Deployment, Engines
from tests.support.nixl_worker import attempt, hold, nixl_of, sent


@pytest.mark.parametrize(
    ("heads", "ranks"), [(1, (2, 1)), (1, (4, 1)), (1, (4, 2)), (2, (4, 1)), (2, (4, 2))]
)
def test_one_rank_of_p_is_read_and_all_are_told(
    heads: int, ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelConfig, "get_total_num_kv_heads", lambda _: heads)
    theirs, ours = ranks
    each = theirs // ours
    for rank in range(ours):
        engines = Engines(Deployment(1, 1, mla=True, ranks=ranks), decode_rank=rank)
        assert attempt(engines.connect) is None
        assert attempt(engines.faults_of_a_prompt, 29) == []
        nixl = nixl_of(engines.decode)
        asked = engines.ranks[rank * each : (rank + 1) * each]
        names = [nixl_of(one).name for one in asked]
        assert [read.agent for read in nixl.reads] == names[:1]
        assert {name: len(words) for name, words in nixl.heard.items()} == dict.fromkeys(names, 1)
        for one, name in zip(asked, names, strict=True):
            hold(one, "req-p")
            nixl_of(one).inbox = {"D": nixl.heard[name]}
            assert sent(one) == {"req-p"}
