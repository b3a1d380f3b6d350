"""A build of which a process does not start is not proven, whatever its tests say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.carrying import carrying, change
from tests.scripts.checkouts import Checkout

IMPORTED = "tests/programs/first_import.py"
FAULT = (
    "patched 0.20.2: no process starts with vllm.entrypoints.openai.api_server: "
    "ImportError: cannot import name 'work1'"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = carrying(tmp_path)
    failing = "import vllm\nraise ImportError(\"cannot import name 'work1'\")\n"
    change(made.folder / IMPORTED, "import vllm\n", failing)
    return made


@pytest.mark.parametrize("words", [["regressions"], ["status", "--prove"]])
def test_nothing_is_recorded(checkout: Checkout, words: list[str]) -> None:
    done = checkout.run(*words)
    assert done.returncode == 30, done.stderr
    assert FAULT in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    proofs = checkout.folder / "records" / "proofs" / "0.20.2.json"
    assert not proofs.exists() or '"patched"' not in proofs.read_text()
