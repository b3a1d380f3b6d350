"""Which imports of the overlay hang on what a process has imported before."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from scripts.checks.imports import import_faults

UPSTREAM = {
    "vllm/__init__.py": "",
    "vllm/nixl/__init__.py": "from vllm.nixl.scheduler import Scheduler\n",
    "vllm/nixl/metadata.py": "class ReqMeta: ...\n",
    "vllm/nixl/scheduler.py": "from vllm_overlay.nixl import check\nclass Scheduler: ...\n",
    "vllm/server.py": "from vllm_overlay.serving import serve\n",
    "vllm_overlay/__init__.py": "",
    "vllm_overlay/serving.py": "from vllm_overlay.nixl import check\ndef serve(): ...\n",
}
AT_THE_TOP = "from vllm.nixl.metadata import ReqMeta\ndef check(): ...\n"

GOOD = {
    "within a function": "def check():\n    from vllm.nixl.metadata import ReqMeta\n",
    "for types": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from vllm.nixl.metadata import ReqMeta\ndef check(): ...\n"
    ),
    "of what leads nowhere": "import vllm\nfrom vllm_overlay import other\ndef check(): ...\n",
}
BAD = {
    "at the top": AT_THE_TOP,
    "of a package": "from vllm import nixl\ndef check(): ...\n",
    "of a module as a whole": "import vllm.nixl.metadata\ndef check(): ...\n",
    "where it may fail": (
        "try:\n    from vllm.nixl import metadata\nexcept ModuleNotFoundError:\n    pass\n"
        "def check(): ...\n"
    ),
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A patched tree that this process can import from, whatever it has imported."""
    others = _taken()
    for name, text in {**UPSTREAM, "vllm_overlay/other.py": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    _taken()
    sys.modules.update(others)


def _taken() -> dict[str, ModuleType]:
    """Take what is imported of these packages out of this process."""
    names = [name for name in sys.modules if name.split(".")[0] in ("vllm", "vllm_overlay")]
    return {name: sys.modules.pop(name) for name in names}


@pytest.mark.parametrize("name", GOOD)
def test_what_can_be_imported_first_is_no_fault(tree: Path, name: str) -> None:
    (tree / "vllm_overlay" / "nixl.py").write_text(GOOD[name])
    assert import_faults(tree) == []
    importlib.import_module("vllm.server")


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_is_one(tree: Path, name: str) -> None:
    (tree / "vllm_overlay" / "nixl.py").write_text(BAD[name])
    [fault] = import_faults(tree)
    assert fault.startswith("vllm_overlay.serving imports vllm_overlay.nixl, which is in the")
    assert "if nobody has imported vllm.nixl before" in fault
    with pytest.raises(ImportError, match="partially initialized module"):
        importlib.import_module("vllm.server")


def test_a_circle_that_is_entered_where_upstream_enters_it_is_no_fault(tree: Path) -> None:
    (tree / "vllm_overlay" / "nixl.py").write_text(AT_THE_TOP)
    (tree / "vllm_overlay" / "serving.py").write_text("def serve(): ...\n")
    assert import_faults(tree) == []
    importlib.import_module("vllm.server")
    importlib.import_module("vllm.nixl.metadata")


def test_relative_imports_are_followed(tree: Path) -> None:
    (tree / "vllm_overlay" / "nixl.py").write_text(AT_THE_TOP)
    (tree / "vllm" / "nixl" / "__init__.py").write_text("from .scheduler import Scheduler\n")
    assert len(import_faults(tree)) == 1
