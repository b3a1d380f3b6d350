"""What every test of the overlay begins with: nothing counted in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_overlay.distributed.kv_transfer import fix_counts


@pytest.fixture(autouse=True)
def _nothing_counted() -> Iterator[None]:
    # A metric of an earlier test would take what is counted for as long as it is not collected.
    fix_counts._begin()
    yield
    fix_counts._begin()
