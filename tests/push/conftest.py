"""The mark of tests/push: which defect a test shows where P pushes.

`@pytest.mark.shows("K04", mends=">=0.24.0")`: the fix whose defect it is like, or "-". On the
releases of `mends` (PEP 440) stock has to fail the test and patched has to pass it; elsewhere
nobody claims anything, and what is seen goes on record. `nox -s push` reads it
(scripts/prove/push.py).
"""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", "shows(defect, mends): see tests/push/conftest.py")
