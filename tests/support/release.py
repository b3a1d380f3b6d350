"""Which release the build under test is of."""

from __future__ import annotations

import vllm
from packaging.version import Version


def since(release: str) -> bool:
    """Whether the build is of `release` or a later one."""
    return Version(Version(vllm.__version__).base_version) >= Version(release)
