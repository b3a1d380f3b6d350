"""What cannot be proven is said, and is no success."""

from __future__ import annotations

import sys

import pytest

from scripts.commands import regressions
from scripts.system.errors import UsageError


def test_a_fix_without_a_patch_there_is_none_to_prove(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["regressions", "0.19.1", "--fix", "K01", "--fix", "K07"])
    with pytest.raises(UsageError, match=r"0\.19\.1 has no patch for K07$"):
        regressions.main()
