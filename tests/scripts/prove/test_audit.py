"""Which defects a build has: of a release, of one's own sources, and of what is patched."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.patchset.registry import Registry, load_registry
from scripts.patchset.target import Target
from scripts.project import project
from scripts.prove import audit
from scripts.prove.audit import Has, audit_release, audit_wheel
from scripts.prove.status import Cell, State
from scripts.system.errors import NotLockedError, UsageError
from scripts.upstream.tree import read_source
from scripts.wheel.build import build_wheel
from tests.scripts.checkouts import wheel_bytes, wheel_name
from tests.scripts.wheels import with_metadata, zip_bytes

RELEASE = project().default_release


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


def own(folder: Path, version: str = f"{RELEASE}+ours", **changed: str) -> Path:
    """Return a build of the default release's sources, with some files changed."""
    touched = {name for patch in Target.of(RELEASE).patches for name in patch.files}
    texts = {name: read_source(RELEASE, name) for name in touched} | changed
    path = folder / wheel_name(version)
    path.write_bytes(wheel_bytes(texts, version=version))
    return path


def test_a_release_has_what_its_fixes_are_for(registry: Registry) -> None:
    found = audit_release(RELEASE, registry)
    having = {fix.id for fix in registry.fixes.values() if fix.affects(RELEASE)}
    assert {one.fix.id for one in found.defects} == having - {"K00"}
    assert all(one.patched for one in found.defects)


def test_what_nothing_on_record_tells_is_said(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(State.UNPROVEN, False, ("There is no run.",), "", runs=False, inputs="")
    monkeypatch.setattr(audit, "release_cells", lambda *_: {"K06": cell})
    [found] = audit_release(RELEASE, registry).defects
    assert (found.fix.id, found.has, found.why) == ("K06", Has.UNKNOWN, "There is no run.")


def test_a_build_of_ones_own_has_the_same(registry: Registry, tmp_path: Path) -> None:
    found = audit_wheel(own(tmp_path), registry)
    assert (found.release, found.inside) == (RELEASE, ())
    assert found.defects == audit_release(RELEASE, registry).defects


def test_what_is_no_build_of_vllm_is_said_to_be_none(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "other-1.0-py3-none-any.whl"
    path.write_bytes(zip_bytes(with_metadata({"other.py": b""}, "1.0", "other")))
    with pytest.raises(UsageError, match="has no vllm/"):
        audit_wheel(path, registry)
    with pytest.raises(UsageError, match="No such file"):
        audit_wheel(tmp_path / "missing.whl", registry)


def test_of_other_sources_nothing_is_said(registry: Registry, tmp_path: Path) -> None:
    (name,) = Target.of(RELEASE).having(["K06"], registry).patches[-1].files
    found = audit_wheel(own(tmp_path, **{name: "# rewritten\n"}), registry)
    said = {one.fix.id: one for one in found.defects}
    assert said["K06"].has is Has.UNKNOWN
    assert name in said["K06"].why
    assert said["39907"].has is not Has.UNKNOWN


def test_what_a_patched_wheel_leaves_out_is_left(registry: Registry, tmp_path: Path) -> None:
    target = Target.of(RELEASE).lacking(["K06"], registry)
    source = own(tmp_path)
    wheel, _, _ = build_wheel(target, source, "00" * 32, registry, tmp_path / "dist")
    found = audit_wheel(wheel, registry)
    assert [one.fix.id for one in found.defects] == ["K06"]
    assert set(found.inside) == set(target.series.fix_ids)


def test_a_release_that_is_not_pinned_is_refused(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(NotLockedError, match=r"0\.99\.0, which is not pinned"):
        audit_wheel(own(tmp_path, "0.99.0"), registry)


def test_a_patched_wheel_of_a_release_that_is_not_pinned_is_refused(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a kvfix that is newer, or has pinned more."""
    target = Target.of(RELEASE)
    wheel, _, _ = build_wheel(target, own(tmp_path), "00" * 32, registry, tmp_path / "dist")
    monkeypatch.setattr(audit, "load_lock", dict)
    with pytest.raises(NotLockedError, match=rf"{RELEASE}, which is not pinned"):
        audit_wheel(wheel, registry)
