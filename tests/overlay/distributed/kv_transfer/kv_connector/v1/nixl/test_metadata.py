"""The version that stands for an engine in the handshake."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.metadata import handshake_version

NUMBERS = st.lists(st.integers(0, 99), min_size=1, max_size=4).map(
    lambda parts: ".".join(map(str, parts))
)
LOCAL = st.lists(
    st.from_regex(r"[a-z0-9]{1,6}", fullmatch=True).filter(lambda part: part != "kvfix"),
    max_size=3,
).map(".".join)


@given(release=NUMBERS, local=LOCAL, patch_set=NUMBERS)
def test_only_the_patch_sets_own_part_is_dropped(release: str, local: str, patch_set: str) -> None:
    stock = f"{release}+{local}" if local else release
    patched = f"{stock}{'.' if local else '+'}kvfix.{patch_set}"
    assert handshake_version(patched) == stock
    assert handshake_version(stock) == stock


@pytest.mark.parametrize(
    "version",
    [
        "",
        "dev",
        "0.20.2",
        "0.20.2rc1",
        "0.20.2.dev7+g1234567.d20260101",
        "0.20.2+cu129",
        "0.20.2+kvfix",  # names no patch set
        "0.20.2+kvfix.local",
        "0.20.2+kvfixed.1.0",
        "0.20.2+mykvfix.1.0",
        "+kvfix.1.0",  # would leave nothing
        "kvfix.1.0",
        "0.20.2 (kvfix.1.0)",
        "0.20.2+cu129+kvfix.1.0",  # two local parts are no version
    ],
)
def test_every_other_version_is_left_as_it_is(version: str) -> None:
    assert handshake_version(version) == version
