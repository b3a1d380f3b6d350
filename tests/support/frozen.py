"""A pytest plugin: what is there before the first test is never again searched for garbage.

Upstream's conftest collects garbage after each test. Most of that time went into the million
objects that importing vLLM and the test files leaves, none of which is garbage. vLLM's
`cleanup_dist_env_and_memory`, which the conftest calls, unfreezes before it collects.
"""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Set aside what imports have made, for good."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
