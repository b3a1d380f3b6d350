"""A clone has the files byte for byte, whatever its owner has set."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.project import ROOT
from tests.scripts.repos import commit, git


@pytest.mark.parametrize("settings", ["core.autocrlf=true", "core.eol=crlf", "core.autocrlf=input"])
def test_no_setting_changes_a_line_end(tmp_path: Path, settings: str) -> None:
    files = {
        ".gitattributes": (ROOT / ".gitattributes").read_bytes(),
        "patches/1-a-name/0.20.2.patch": b"-a\n+b\n",
        "scripts/it.py": b"a\nb\n",
        "both": b"a\r\nb\n",
    }
    commit(tmp_path / "it", files)
    git(tmp_path, "-c", settings, "clone", "--quiet", "it", "cloned")
    clone = tmp_path / "cloned"
    assert {name: (clone / name).read_bytes() for name in files} == files
    (clone / "both").touch()
    git(clone, "-c", settings, "add", "--all")
    assert git(clone, "-c", settings, "status", "--porcelain") == ""
