"""What other people's tools say of our code.

ruff and mypy read it, import-linter its imports (who may import whom stands in pyproject.toml), and
zizmor the workflows.
"""

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
    others = (["lint-imports", "--no-cache"], ["zizmor", "--offline", "--no-progress", ".github"])
    for words in others:
        result = run(words, cwd=ROOT, check=False)
        if result.returncode:
            yield f"{words[0]}:\n{result.stdout}{result.stderr}"
