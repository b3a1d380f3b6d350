from __future__ import annotations

from pathlib import Path

import pytest

from scripts.carry import landing
from scripts.carry.landing import declared, without_release
from scripts.patchset.registry import load_registry
from scripts.project import Project
from tests.scripts import toys
from tests.scripts.checkouts import registry_text


def test_a_release_is_declared_in_the_order_of_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Project("0.1.0", ("0.9.2", "0.10.1"), "0.9.2")
    monkeypatch.setattr(landing, "project", lambda: known)
    text = '[tool.kvfix]\nreleases = [\n  "0.9.2", "0.10.1",\n]\ndefault-release = "0.9.2"\n'
    assert declared(text, "0.10.0") == (
        '[tool.kvfix]\nreleases = ["0.9.2", "0.10.0", "0.10.1"]\ndefault-release = "0.9.2"\n'
    )
    assert declared(declared(text, "0.10.0"), "0.10.0") == declared(text, "0.10.0")


@pytest.mark.parametrize(
    ("release", "before", "after"),
    [
        ("0.22.0", (">=0.20", ""), (">=0.20,<0.22.0", "0.22.0")),
        # 0.22.0 may have been the first; nobody has tested it.
        ("0.22.1", (">=0.20", ""), (">=0.20,<0.22.1", "")),
        ("0.22.1", (">=0.20", "0.22.0"), (">=0.20,<0.22.1", "0.22.0")),
        ("0.19.0", ("<=0.21.0", ""), ("<=0.21.0,>0.19.0", "")),
        # On either side of it the defect is open.
        ("0.20.3", (">=0.20", ""), (">=0.20,!=0.20.3", "")),
        ("0.22.0", ("<=0.21.0", ""), ("<=0.21.0", "")),
        ("0.22.0", (">=0.22", ""), (">=0.22", "")),
    ],
)
def test_the_registry_learns_where_a_defect_ends(
    release: str,
    before: tuple[str, str],
    after: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(landing, "project", lambda: Project("0.1.0", ("0.20.2", "0.21.0"), ""))
    pinned = ("0.19.0", "0.20.2", "0.21.0", "0.22.0", "0.22.1")
    monkeypatch.setattr(landing, "load_lock", lambda: dict.fromkeys(pinned))
    fix = toys.fix("2", applies_to=before[0], fixed_in=before[1])
    path = tmp_path / "fixes.toml"
    path.write_text(registry_text(toys.registry(toys.fix("1"), fix, toys.fix("3"))))
    path.write_text(without_release(path.read_text(), fix, release))
    fixes = load_registry(path).fixes
    assert (fixes["2"].applies_to, fixes["2"].fixed_in) == after
    assert {fixes["1"].applies_to, fixes["3"].applies_to} == {"<=0.20.2"}
