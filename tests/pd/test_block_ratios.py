"""Whatever the ratios of P's and D's blocks, D has the prompt's KV or has refused P.

Two workers and their NIXL agents in one process, see tests/programs/block_ratios.py; no server.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.harness import HarnessError

Faults = dict[str, list[str]]


@pytest.fixture(scope="module")
def faults() -> Faults:
    words = [sys.executable, "-m", "tests.programs.block_ratios"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=600)
    if result.returncode != 0:
        raise HarnessError(f"it ended with {result.returncode}: {result.stderr[-3000:]}", "0")
    found: Faults = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.shows("K07")
@pytest.mark.parametrize(
    "case",
    ["attention", "latent", "several groups", "larger kernel blocks on D after a prefix hit"],
)
def test_without_mamba_layers(case: str, faults: Faults) -> None:
    assert faults[case] == []


@pytest.mark.shows("42097")
def test_with_mamba_layers(faults: Faults) -> None:
    assert faults["hybrid"] == []
