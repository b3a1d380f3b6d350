"""What an installed patched wheel says of itself, by every way in which one can ask."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.metadata import files, version
from pathlib import Path

import vllm

import vllm_overlay


def test_every_version_is_the_patched_one() -> None:
    stated = version("vllm")
    assert f"+kvfix.{vllm_overlay.build()['patch_set']}" in stated
    assert vllm.__version__ == stated
    assert vllm.__version_tuple__[-1] == stated.partition("+")[2]


def test_the_release_is_the_one_it_was_made_from() -> None:
    assert version("vllm").partition("+")[0] == vllm_overlay.build()["release"]


def test_fixes_by_command_and_by_call_are_those_of_the_sbom() -> None:
    command = [sys.executable, "-m", "vllm_overlay", "--json"]
    printed = json.loads(subprocess.check_output(command))
    assert printed["fixes"] == vllm_overlay.fixes()
    (sbom,) = (f for f in files("vllm") or () if f.match("*.dist-info/sboms/*.cdx.json"))
    document = json.loads(Path(str(sbom.locate())).read_text())
    patches = document["metadata"]["component"]["pedigree"]["patches"]
    resolved = {issue["id"] for patch in patches for issue in patch["resolves"]}
    assert resolved == {fix["id"] for fix in vllm_overlay.fixes()}


def test_the_table_names_every_fix() -> None:
    command = [sys.executable, "-m", "vllm_overlay"]
    printed = subprocess.check_output(command, text=True)
    for fix in vllm_overlay.fixes():
        assert f"{fix['id']} " in printed
        assert fix["title"] in printed


def test_vllm_version_is_the_patched_one() -> None:
    # As `vllm --version`, on a machine where vLLM finds no device by itself.
    code = (
        "from tests.support import vllm_cpu; vllm_cpu.prepare(); "
        "import sys; sys.argv = ['vllm', '-v']; "
        "from vllm.entrypoints.cli.main import main; main()"
    )
    printed = subprocess.check_output([sys.executable, "-W", "ignore", "-c", code], text=True)
    assert printed.split()[-1] == version("vllm")


def changed_modules() -> list[str]:
    """The modules of vLLM whose installed file says that kvfix changed it."""
    sources = (
        file for file in files("vllm") or () if file.parts[0] == "vllm" and file.suffix == ".py"
    )
    changed = [f for f in sources if b"vllm-kvfix" in Path(str(f.locate())).read_bytes()[:400]]
    return [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in changed]


def test_every_changed_module_imports_without_a_gpu() -> None:
    modules = changed_modules()
    assert modules
    for module in modules:
        importlib.import_module(module)


def test_every_changed_module_may_be_imported_first() -> None:
    """As plugins import the scheduler. What is ours is imported on the way, by halves."""
    code = """
import importlib, os, sys
from tests.support import vllm_cpu
import torch, transformers
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        vllm_cpu.prepare()
        importlib.import_module(name)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name, flush=True)
"""
    command = [sys.executable, "-W", "ignore", "-c", code, *changed_modules()]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert not [line for line in said if line.startswith("vllm.")]


def test_the_files_are_those_of_the_build() -> None:
    command = [sys.executable, "-m", "vllm_overlay", "--check"]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
    assert f"{len(vllm_overlay.files())} files are as this build was made" in said.stdout
    of_vllm = [name for name in vllm_overlay.files() if name.startswith("vllm/")]
    assert len(of_vllm) == len(changed_modules()) + 1, "and the module of the version"
