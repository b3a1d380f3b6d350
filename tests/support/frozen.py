"""A pytest plugin: what is there before the first test is never again searched for garbage.

Upstream's conftest collects garbage after each test. Most of that time went into the million
objects that importing vLLM and the test files leaves, none of which is garbage.
"""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Set aside what imports have made."""
    gc.collect()
    gc.freeze()
