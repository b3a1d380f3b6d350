"""A small patch set that can be carried: releases of a small vLLM, and real tests of its fixes.

Everything runs as it does for users but for three things: an environment is an unpacked wheel
beside this Python instead of 8 GB of packages, lint reads the patches and not the tools' own code,
and what mypy keeps (of Python's own library, above all) lies in one place for all copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from scripts.project import ROOT, read_toml
from tests.scripts import checkouts, toys
from tests.scripts.checkouts import (
    Checkout,
    copied,
    registry_text,
    scratch,
    sdist_bytes,
    wheel_bytes,
    wheel_name,
)
from tests.scripts.repos import write

WORKER = toys.WORKER
HOOKED = "vllm_overlay/distributed/kv_transfer/kv_transfer_state.py"
REGISTRY = toys.registry(
    toys.fix("1", applies_to=">=0.20.0", fixed_in=""),
    toys.fix("2", applies_to=">=0.20.0", fixed_in=""),
)
_ENVIRONMENT = '''

class Environment(Environment):
    """An unpacked wheel."""

    def __init__(self, release):
        super().__init__(release)
        self.python = Path(sys.executable)

    def make(self):
        return self

    def install(self, wheel):
        import zipfile

        shutil.rmtree(self.folder, ignore_errors=True)
        zipfile.ZipFile(wheel).extractall(self.folder)

    def install_into(self, folder, key, *packages, timeout=0):
        import zipfile

        shutil.rmtree(folder, ignore_errors=True)
        for wheel in packages:
            zipfile.ZipFile(wheel).extractall(folder)

    def site(self):
        return self.folder

    def variables(self, shadow):
        variables = super().variables(shadow)
        variables["PYTHONPATH"] += os.pathsep + str(self.folder)
        return variables
'''
_TEST = """
from vllm.worker import {0}


def test() -> None:
    assert {0}(1) == 2
"""
SIMULATION = "tests/simulation/__main__.py"
_SIMULATION = '''"""Play nothing, and say what was found."""
import argparse
import json

from vllm import worker

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--replay")
options, _ = parser.parse_known_args()
found = None
rows = [{"steps": 1, "histories": 1, "seconds": 1, "found": {found: 1} if found else {}}]
if options.replay:
    with open(options.replay) as played:
        rows = [{"of": json.loads(played.readline())["label"], "label": found}]
elif found:
    row = {"label": found, "seed": "s", "steps": 1, "shrunk": [], "setting": "two engines"}
    rows.insert(0, row | {"timeline": "it goes wrong", "columns": ["P0"], "lines": []})
with open(options.out, "w") as out:
    out.writelines(json.dumps(row) + "\\n" for row in rows)
'''
_FILES = {
    "README.md": "# Tools\n<!-- matrix, made by a tool -->\nold\n<!-- end of matrix -->\nend\n",
    "CHANGELOG.md": "- 1: this\n- 2: that\n",
    "tests/regressions/test_1.py": _TEST.format("work2"),
    "tests/regressions/test_2.py": _TEST.format("work9"),
    SIMULATION: _SIMULATION,
    "tests/support/vllm_cpu.py": "",
    **{
        f"tests/support/{name}.py": (ROOT / "tests" / "support" / f"{name}.py").read_text()
        for name in ("entered", "harness", "raised", "frozen")
    },
    "tests/programs/forks.py": (ROOT / "tests" / "programs" / "forks.py").read_text(),
    "tests/programs/first_import.py": "import vllm\n",
    "tests/programs/handshake_hash.py": "import vllm\nprint(vllm.__version__, 'abc')\n",
    HOOKED: '"""All releases: what a hook calls."""\n'
    "def _sync_engine_id_across_tp(x: int) -> None:\n    print(x)\n",
    "tests/overlay/distributed/kv_transfer/test_kv_transfer_state.py": "",
    "vllm_overlay/distributed/__init__.py": "",
    "vllm_overlay/distributed/kv_transfer/__init__.py": "",
}


def carrying(folder: Path) -> Checkout:
    """Return a patch set for one release, 0.20.2."""
    return copied(_carrying(), folder)


@cache  # whoever carries begins with it
def _carrying() -> Checkout:
    folder = scratch()
    made = checkouts.small(folder)
    (made.patches / "fixes.toml").write_text(registry_text(REGISTRY), encoding="utf-8")
    checkouts.empty_overlay(made)
    write(made.folder, _FILES)
    change(
        made.folder / "scripts" / "commands" / "lint.py",
        "[*code_faults(), *patch_set_faults(), *figure_faults()]",
        "[*patch_set_faults()]",
    )
    kept = f"Path({str(folder / 'mypy')!r})"
    change(made.folder / "scripts/checks/typecheck.py", '_WORK / "caches"', kept)
    with (made.folder / "scripts" / "prove" / "environment.py").open("a") as file:
        file.write(_ENVIRONMENT)
    result = made.run("edit", "--restamp")
    assert result.returncode == 0, result.stderr
    return made


def release(checkout: Checkout, name: str, texts: Mapping[str, str]) -> None:
    """Pin a further release of the small vLLM."""
    lock = read_toml(checkout.patches / "upstream.lock")
    pinned = {
        one: {
            file: (checkout.cache / "files" / sha256 / file).read_bytes()
            for file, sha256 in table["files"].items()
        }
        for one, table in lock.items()
    }
    files = {
        f"vllm-{name}.tar.gz": sdist_bytes(texts, name),
        wheel_name(name): wheel_bytes(texts, version=name),
    }
    checkout.lock({**pinned, name: files})


def change(path: Path, old: str, new: str) -> None:
    """Replace a passage that a file has."""
    text = path.read_text()
    assert old in text, old
    path.write_text(text.replace(old, new))
