"""mypy on the patched tree of a small release: it speaks of hooks and overlay, of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.checks import typecheck as module
from scripts.checks.typecheck import lay_out, typecheck
from tests.scripts.repos import write

WORKER = "vllm/worker.py"
OVERLAY = "vllm_overlay/worker.py"
STOCK = """\
import torch_of_nobody
from vllm.state import State


class Worker:
    def __init__(self, state: State) -> None:
        self.state = state

    def read(self, req_id: str) -> int:
        return self.wrong  # of upstream's own, and not our business


def untyped(worker):
    return worker.read("a")
"""
STATE = "class State:\n    blocks: dict[str, int]\n"
HOOKED = STOCK.replace("from vllm.state", "from vllm_overlay.worker import count\nfrom vllm.state")
HOOKED = HOOKED.replace(
    '    return worker.read("a")', '    count(worker)\n    return worker.read("a")'
)
COUNT = """\
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.worker import Worker


def count(worker: Worker) -> int:
    return len(worker.state.blocks)
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("typecheck")  # mypy's cache is shared


@pytest.fixture
def release(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a small release in place of all others."""
    write(tmp_path, {"vllm/__init__.py": "", WORKER: STOCK, "vllm/state.py": STATE})
    monkeypatch.setattr(module, "release_tree", lambda release: tmp_path)
    monkeypatch.setattr(module, "read_source", lambda release, path: (tmp_path / path).read_text())
    monkeypatch.setattr(module, "_WORK", work)
    monkeypatch.setattr(module, "_CACHES", work / "caches")
    return tmp_path


def faults(hooked: str = HOOKED, overlay: str = COUNT) -> list[str]:
    files = {"vllm_overlay/__init__.py": b"", OVERLAY: overlay.encode()}
    texts = {WORKER: hooked}
    return typecheck("0.20.2", lay_out("0.20.2", texts, files), texts, files)


def test_says_nothing_of_what_is_right_and_of_what_is_upstreams(release: Path) -> None:
    assert faults() == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("vllm/state.py", "blocks:", "all_blocks:", f'{OVERLAY}:10: "State" has no attribute'),
        # Of another length: mypy takes a file of the same second and size for the same.
        ("vllm/worker.py", "class Worker:", "class Readers:", f"{OVERLAY}:6: "),
    ],
    ids=["attribute", "class"],
)
def test_names_what_has_moved_away_in_a_release(
    release: Path, file: str, old: str, new: str, said: str
) -> None:
    path = release / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    found = faults(HOOKED.replace(old, new) if file == WORKER else HOOKED)
    assert [fault for fault in found if fault.startswith(f"0.20.2: {said}")], found


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("import count", "import counted", "counted"),
        ("from vllm_overlay.worker", "from vllm_overlay.gone", "vllm_overlay.gone"),
        (
            "from vllm_overlay.worker",
            "from vllm.gone import x\nfrom vllm_overlay.worker",
            "vllm.gone",
        ),
        ("    count(worker)", "    count(worker, 1)", "Too many arguments"),
        ("    count(worker)", "    count(Worker.state)", "state"),
        ("    count(worker)", "    count(wrker)", "wrker"),
    ],
)
def test_names_a_hook_that_cannot_work(release: Path, old: str, new: str, said: str) -> None:
    assert HOOKED.count(old) == 1
    found = faults(HOOKED.replace(old, new))
    assert any(said in fault for fault in found), found
    assert all(fault.startswith(f"0.20.2: {WORKER}:") for fault in found)


def test_names_a_module_of_vllm_that_is_gone_for_the_overlay(release: Path) -> None:
    found = faults(overlay=COUNT.replace("vllm.worker", "vllm.gone"))
    assert any(f"{OVERLAY}:6: " in fault and "vllm.gone" in fault for fault in found), found


def test_is_no_success_where_mypy_does_not_run(release: Path) -> None:
    found = faults(overlay="def broken(:\n")
    assert found
    assert OVERLAY in found[0]


def test_begins_with_what_is_known_of_another_release_and_never_with_what_was_cut_short(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CACHES", tmp_path / "caches")
    spoilt = tmp_path / "caches" / "0.20.2" / "3.12" / "cache.0.db"
    spoilt.parent.mkdir(parents=True)
    spoilt.write_bytes(b"half")  # and nobody said that it is at rest
    assert faults() == []
    assert faults(overlay="def broken(:\n")  # mypy stops in the middle
    known = {path.name for path in (tmp_path / "caches").glob("*/3.12/*.db")}
    assert known
    (tmp_path / "caches" / "0.20.2").rename(tmp_path / "caches" / "0.20.1")
    assert faults() == []
    assert {path.name for path in (tmp_path / "caches" / "0.20.2").rglob("*.db")} == known


def test_a_cache_that_was_spoilt_where_it_lay_is_made_anew(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = tmp_path / "caches"
    monkeypatch.setattr(module, "_CACHES", caches)
    assert faults() == []
    for path in caches.glob("*/3.12/*.db"):
        path.write_bytes(path.read_bytes()[:4096] + b"half" * 4096)
    (caches / "0.20.2").rename(caches / "0.20.1")
    assert faults() == [], "begun with that of another release"
