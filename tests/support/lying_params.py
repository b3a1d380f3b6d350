"""Transfer parameters as a client might make them up: a Hypothesis strategy."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

GOOD: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "P",
    "remote_request_id": "at-p",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
"""Parameters in which nothing is wrong: what a prefill server hands out."""

JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 0, 65536, 2**31, 2**63, 2**64]),
    st.floats(allow_nan=False),
    st.text(st.characters(), max_size=5),
    st.sampled_from(["", "\ud800", "true", "5600", "P" * 5000]),
    st.lists(st.integers(-2, 9), max_size=4),
    st.lists(st.lists(st.integers(-2, 9) | st.none(), max_size=5), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
"""What a field may hold that should not."""

MISSING = object()


@st.composite
def lying_params(draw: st.DrawFn, good: dict[str, Any]) -> Any:  # noqa: ANN401 - on purpose
    """`good` with up to four fields dropped or replaced by junk; now and then no object at all."""
    if draw(st.integers(0, 30)) == 0:
        return draw(JUNK)
    params = copy.deepcopy(good)
    names = st.sampled_from([*good, "remote_num_tokens", "another"])
    for name in draw(st.lists(names, max_size=4, unique=True)):
        value = draw(st.just(MISSING) | JUNK)
        if value is MISSING:
            params.pop(name, None)
        else:
            params[name] = value
    return params
