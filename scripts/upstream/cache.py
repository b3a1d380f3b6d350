"""Where the tools keep what they have fetched, or made of it."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of the cache: `KVFIX_CACHE`, else the platform's."""
    if named := os.environ.get("KVFIX_CACHE"):
        return Path(named).expanduser().absolute()  # some commands run in another folder
    import platformdirs

    return platformdirs.user_cache_path("kvfix", appauthor=False)
