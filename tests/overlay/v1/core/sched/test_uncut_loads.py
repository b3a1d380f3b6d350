"""What is cut, and that a hybrid that caches prefixes computes what it cannot receive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.regressions.test_42554 import BLOCK, asked, comes_to_its_end
from tests.support.nixl_worker import nixl_of

pytest.importorskip("vllm_overlay.v1.core.sched.uncut_loads", reason="up to 0.22.1")
from vllm_overlay.v1.core.sched.uncut_loads import is_cut


class NixlConnector:
    """As it is called."""


class OtherConnector:
    """One that loads beside the steps, too."""


REQUEST: Any = SimpleNamespace(request_id="r")


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("connector", [NixlConnector, OtherConnector])
def test_what_nixl_loads_is_not_cut(connector: type, loads: bool, states: bool) -> None:
    scheduler: Any = SimpleNamespace(need_mamba_block_aligned_split=states, connector=connector())
    spared = loads and connector is NixlConnector
    assert is_cut(scheduler, REQUEST, loads) is (states and not spared)


@pytest.mark.parametrize("chosen", [0, 1])
def test_of_several_the_one_that_loads_counts(chosen: int) -> None:
    several = SimpleNamespace(
        _connectors=[NixlConnector(), OtherConnector()], _requests_to_connector={"r": chosen}
    )
    scheduler: Any = SimpleNamespace(need_mamba_block_aligned_split=True, connector=several)
    assert is_cut(scheduler, REQUEST, loads=True) is bool(chosen)


@pytest.mark.parametrize("budget", [BLOCK, 8 * BLOCK])
def test_one_that_cannot_be_read_is_computed(budget: int) -> None:
    """In the parts that the release makes of a prompt."""
    d = asked(range(1000, 1000 + 3 * BLOCK))
    d.step()
    nixl_of(d.worker).fail(*nixl_of(d.worker).reads)
    d.scheduler.max_num_scheduled_tokens = budget
    computed = comes_to_its_end(d)
    assert computed[0][0] == 0
    assert [end for _, end in computed[:-1]] == [begin for begin, _ in computed[1:]]
