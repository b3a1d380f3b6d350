from __future__ import annotations

from pathlib import Path

import pytest

from scripts.upstream_tests.selection import affected, batches, recommended

WORKER = "vllm/nixl/worker.py"
FILES = {
    WORKER: "",
    "vllm/nixl/__init__.py": "from vllm.nixl.worker import Worker\n",
    "vllm/engine.py": "def start():\n    import vllm.nixl\n",
    "vllm/types.py": "import typing\nif typing.TYPE_CHECKING:\n    import vllm.nixl.worker\n"
    "else:\n    import vllm.other\n",
    "vllm/other.py": "",
    "tests/test_direct.py": "from vllm.nixl import worker\n",
    "tests/test_module.py": "import vllm.nixl.worker as w\n",
    "tests/test_package.py": "from vllm.nixl import Worker\n",
    "tests/test_late.py": "import vllm.engine\n",
    "tests/test_typed.py": "import vllm.types\n",
    "tests/test_other.py": "import vllm.other, os\n",
    "tests/unit/test_helped.py": "from .utils import more\n",
    "tests/unit/test_around.py": "from ..unit import utils\n",
    "tests/unit/utils.py": "from tests import deeper\n",
    "tests/deeper.py": "class Case:\n    def test(self):\n        from vllm.nixl.worker import W\n",
    "tests/unit/notes.py": "import vllm.nixl.worker\n",
}
NEAR = ["direct", "module", "unit/around", "unit/helped"]


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (0, []),
        (1, NEAR),
        (2, sorted([*NEAR, "package"])),
        (3, sorted([*NEAR, "package", "late"])),
        (9, sorted([*NEAR, "package", "late"])),
    ],
)
def test_a_test_is_affected_by_what_it_imports(
    tmp_path: Path, steps: int, found: list[str]
) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tests = affected(tmp_path, [WORKER], steps)
    names = [test.removeprefix("tests/").replace("test_", "").removesuffix(".py") for test in tests]
    assert sorted(names) == found


def test_recommended_files_are_found_where_upstream_has_moved_them(tmp_path: Path) -> None:
    unit = "tests/v1/kv_connector/unit"
    moved = "tests/entrypoints/deep/down/test_chat_error.py"
    others = ["tests/entrypoints/test_chat.py", "tests/lora/test_config.py"]
    for name in (f"{unit}/test_nixl_connector.py", moved, *others):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert recommended(tmp_path) == [f"{unit}/test_nixl_connector.py", moved]


def test_small_files_share_a_process(tmp_path: Path) -> None:
    sizes = {"a": 60_000, "b": 210_000, "c": 110_000, "d": 80_000, "e": 1_000}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"#" * size)
    assert batches(tmp_path, sizes) == [("b",), ("c", "d"), ("a", "e")]
    assert batches(tmp_path, []) == []
