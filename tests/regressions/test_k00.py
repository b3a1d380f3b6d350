"""K00: a patched engine shakes hands with a stock one.

vLLM's version is part of the hash that both sides compare before they exchange anything. The
patch set's own part of the version must not split a fleet that is rolled engine by engine; a
truly different release must still be refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import vllm

from tests.support.nixl_release import compute_nixl_compatibility_hash
from tests.support.nixl_worker import make_vllm_config

HashOf = Callable[[str], str]


@pytest.fixture
def hash_of(monkeypatch: pytest.MonkeyPatch) -> HashOf:
    """Version of vLLM -> the compatibility hash that such an engine computes."""
    config = make_vllm_config()

    def compute(version: str) -> str:
        monkeypatch.setattr(vllm, "__version__", version)
        value: str = compute_nixl_compatibility_hash(config, "FLASH_ATTN", False)
        return value

    return compute


@pytest.mark.parametrize(
    ("stock", "patched"),
    [
        ("0.20.2", "0.20.2+kvfix.0.1.0"),
        ("0.21.0", "0.21.0+kvfix.12.0.3"),
        ("0.20.2", "0.20.2+kvfix.0.2.0rc1"),
        ("0.20.2+cu129", "0.20.2+cu129.kvfix.0.1.0"),
        ("0.20.2+acme.7", "0.20.2+acme.7.kvfix.0.1.0"),
        ("0.20.2.dev3+g1234567", "0.20.2.dev3+g1234567.kvfix.0.1.0"),
    ],
)
def test_a_patched_engine_and_its_stock_build_agree(
    hash_of: HashOf, stock: str, patched: str
) -> None:
    assert hash_of(patched) == hash_of(stock)


def test_patch_sets_agree_and_builds_are_still_told_apart(hash_of: HashOf) -> None:
    assert hash_of("0.20.2+kvfix.0.1.0") == hash_of("0.20.2+kvfix.0.2.0")
    builds = [
        "0.20.1+kvfix.0.1.0",
        "0.20.2+kvfix.0.1.0",
        "0.20.2+cu129.kvfix.0.1.0",
        "0.21.0+kvfix.0.1.0",
        "0.20.2.dev3+kvfix.0.1.0",
        "0.20.2+kvfixed.1",
        "0.20.2+kvfix",
        "dev",
    ]
    assert len({hash_of(build) for build in builds}) == len(builds)
