"""The installer in an image that is being built: what it changes lies in layers below."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.ship.installer import installer_bytes
from tests.scripts.ship.environments import bundle, stock_site

# In a mount namespace of its own, and on a file system in memory: overlayfs takes not every other.
SCRIPT = """
set -e
mount -t tmpfs none "$1"
cp -a "$2" "$1/stock"
cd "$1"
mkdir installed undone work1 work2 image
sums() { (cd image && find . -type f -exec sha256sum {} + | sort); }
mount -t overlay none -o "lowerdir=stock,upperdir=installed,workdir=work1,$5" image
sums > before
"$3" "$4" --target image
"$3" "$4" --target image --check
umount image
mount -t overlay none -o "lowerdir=installed:stock,upperdir=undone,workdir=work2,$5" image
"$3" "$4" --target image --undo
sums | diff before -
umount image
"""


def overlays(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the script where it may mount; with what it was said not to do, as engines have it."""
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", SCRIPT, "sh", folder, *words, "redirect_dir=off"],
        capture_output=True,
        text=True,
    )


def test_in_and_out_over_layers_that_are_read_only(tmp_path: Path) -> None:
    may = "mkdir l u w m && mount -t tmpfs none u && mkdir u/u u/w && mount -t overlay none"
    may += " -o lowerdir=l,upperdir=u/u,workdir=u/w,redirect_dir=off m"
    asked = subprocess.run(
        ["unshare", "--mount", "sh", "-c", may], cwd=tmp_path, capture_output=True
    )
    if asked.returncode:
        pytest.skip("needs a mount namespace with overlayfs")
    installer = tmp_path / "it.pyz"
    installer.write_bytes(installer_bytes(bundle()))
    site = stock_site(tmp_path)
    (tmp_path / "layers").mkdir()
    done = overlays(tmp_path / "layers", site, sys.executable, installer)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.partition(":")[0].partition(" ")[0] for line in done.stdout.splitlines()]
    assert said == ["vllm", "look", "patched", "stock"]
