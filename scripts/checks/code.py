"""What other people's tools say of our code: ruff, mypy, and zizmor of the workflows."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from scripts.project import ROOT
from scripts.system.process import run

_PYTHON = ("scripts", "vllm_overlay", "tests", "noxfile.py")


def code_faults() -> Iterator[str]:
    """Yield what each of them finds."""
    python = (sys.executable, "-m")
    for command in (("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)):
        result = run([*python, *command, *_PYTHON], cwd=ROOT, check=False)
        if result.returncode:
            yield f"{' '.join(command)}:\n{result.stdout}{result.stderr}"
    result = run(["zizmor", "--offline", "--no-progress", ".github"], cwd=ROOT, check=False)
    if result.returncode:
        yield f"zizmor:\n{result.stdout}{result.stderr}"
