"""39907, K06: P is one engine over two nodes with clocks of their own; D reads from both.

No engine id is configured, as a user would not. On stock the second node has made one up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pd.client import body, prefill, tokens_of
from tests.pd.deployment import TOKENS, Plain
from tests.pd.nodes import start_two_nodes
from tests.pd.server import Server, Side


@dataclass
class TwoNodes:
    """P's server and the process of its second node, and D."""

    p: Server
    second: Server
    d: Server


@pytest.fixture(scope="module")
def engines(side: Side, model: Path, logs: Callable[[str], Path]) -> Iterator[TwoNodes]:
    with ExitStack() as stack:

        def start(name: str, **options: object) -> Server:
            given = {"transfer": {}, **options}
            server = Server(side, name, model, logs(name), **given)  # type: ignore[arg-type]
            return stack.enter_context(server)

        p, second = start_two_nodes(start)
        d = start("D-of-two-nodes", core=1)
        p.wait_ready()
        d.wait_ready()
        yield TwoNodes(p, second, d)


@pytest.mark.shows("K06")
def test_a_lease_means_the_same_on_both_nodes(engines: TwoNodes, prompts: Iterator[str]) -> None:
    prefill(engines.p, next(prompts))
    assert engines.p.blocks_held() > 0
    assert "Releasing expired KV blocks" not in engines.second.text()


@pytest.mark.shows("39907")
def test_d_reads_from_the_ranks_of_both(
    engines: TwoNodes, plain: Plain, prompts: Iterator[str]
) -> None:
    prompt = next(prompts)
    held = engines.p.blocks_held()
    asked = body(prompt, TOKENS, kv_transfer_params=prefill(engines.p, prompt))
    answer = engines.d.post("/v1/completions", asked)
    assert answer.status_code == 200, (answer.text, engines.d.tail())
    assert tokens_of(answer.json()) == [plain[prompt]]
    assert "NIXL transfer failure" not in engines.d.text()
    assert engines.d.metric("nixl_bytes_transferred_sum") > 0
    assert engines.p.blocks_held() == held
