"""Imports a module of vLLM before any other, as a process that starts with it does.

`python -m tests.programs.first_import MODULE` says nothing if it can be.
"""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    importlib.import_module(sys.argv[1])
