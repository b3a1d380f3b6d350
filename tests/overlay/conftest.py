"""What every test of the overlay begins with: nothing counted in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from vllm_overlay.distributed.kv_transfer import fix_counts


@pytest.fixture(autouse=True)
def _nothing_counted() -> Iterator[None]:
    gc.collect()  # a metric of an earlier test would still take what is counted
    fix_counts.taken()
    yield
    fix_counts.taken()
