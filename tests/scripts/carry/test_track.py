"""`nox -s track` against an index on this machine: what is new, what is carried, what is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from scripts.project import ROOT
from tests.scripts import toys
from tests.scripts.carrying import WORKER, carrying
from tests.scripts.checkouts import Checkout, copied, sdist_bytes, wheel_bytes, wheel_name
from tests.scripts.conftest import LocalIndex
from tests.scripts.repos import git

STAYS = {**toys.FILES, WORKER: '"""More."""\n' + toys.FILES[WORKER]}
COLLIDES = {**STAYS, WORKER: STAYS[WORKER].replace("    return x + 9\n", "    return 9 + x\n")}

# Lint and the regression tests run for each release that lands, 10 s of one core.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = carrying(tmp_path_factory.mktemp("made"))
    shutil.copy(ROOT / ".gitignore", checkout.folder)
    git(checkout.folder, "init", "--quiet", "--initial-branch=main")
    git(checkout.folder, "add", "--all")
    git(checkout.folder, "commit", "--quiet", "-m", "all")
    return checkout


@pytest.fixture
def checkout(made: Checkout, tmp_path: Path) -> Checkout:
    return copied(made, tmp_path)


def offer(index: LocalIndex, release: str, texts: dict[str, str]) -> None:
    index.files[f"vllm-{release}.tar.gz"] = sdist_bytes(texts, release)
    index.files[wheel_name(release)] = wheel_bytes(texts, version=release)


def track(checkout: Checkout, index: LocalIndex, code: int) -> list[dict[str, str]]:
    """Run `track`, expect an exit code, and return the verdicts."""
    head, state = git(checkout.folder, "rev-parse", "HEAD"), "## main\n"
    result = checkout.run("track", timeout=600, PIP_INDEX_URL=index.url)
    assert "Traceback" not in result.stderr, result.stderr
    assert result.returncode == code, result.stdout + result.stderr
    assert git(checkout.folder, "rev-parse", "HEAD") == head
    assert git(checkout.folder, "status", "--porcelain", "--branch") == state
    assert not (checkout.folder / ".work" / "track").exists()
    rows: list[dict[str, str]] = json.loads((checkout.dist / "track.json").read_text())
    text = (checkout.dist / "track.md").read_text()
    assert all(f"## vLLM {row['release']}: {row['verdict']}" in text for row in rows)
    return rows


def test_nothing_is_new(checkout: Checkout, local_index: LocalIndex) -> None:
    for release in ("0.19.1", "0.20.2", "0.21.0"):
        offer(local_index, release, toys.FILES)
    local_index.files["vllm-0.21.1rc1.tar.gz"] = b"no final release"
    local_index.yanked["vllm-0.21.0.tar.gz"] = "broken"
    local_index.files["vllm-0.22.0-cp38-abi3-any.whl"] = b"without a source archive"
    assert track(checkout, local_index, 0) == []
    assert "Nothing to do" in (checkout.dist / "track.md").read_text()


def test_what_carries_is_a_commit_and_what_does_not_is_a_table(
    checkout: Checkout, local_index: LocalIndex
) -> None:
    offer(local_index, "0.20.3", STAYS)
    offer(local_index, "0.21.0", COLLIDES)
    offer(local_index, "0.22.0", COLLIDES)
    first, second = track(checkout, local_index, 31)  # and not the third, which builds on it
    assert (first["release"], first["verdict"], first["branch"]) == (
        "0.20.3",
        "carried",
        "carry/0.20.3",
    )
    changed = git(checkout.folder, "diff", "--name-only", "main", "carry/0.20.3").split()
    assert {"patches/upstream.lock", "pyproject.toml", "docs/fixes.md"} <= set(changed)
    assert "records/proofs/0.20.3.json" in changed
    assert not [name for name in changed if name.startswith((".nox", ".work", "dist"))]
    declared = git(checkout.folder, "show", "carry/0.20.3:pyproject.toml")
    assert 'releases = ["0.20.2", "0.20.3"]' in declared
    assert (
        git(checkout.folder, "log", "--format=%an", "-1", "carry/0.20.3") == "kvfix maintainers\n"
    )

    assert (second["release"], second["verdict"], second["branch"]) == (
        "0.21.0",
        "needs a person",
        "",
    )
    for words in ("fix 2 on vLLM 0.21.0: conflict", "return 9 + x", "work9"):
        assert words in second["said"]
    assert str(checkout.folder) not in second["said"]

    del local_index.files["vllm-0.21.0.tar.gz"], local_index.files["vllm-0.22.0.tar.gz"]
    (again,) = track(checkout, local_index, 32)
    assert again["said"].startswith("It was carried before")


def test_no_index_is_no_verdict(checkout: Checkout) -> None:
    result = checkout.run("track")
    assert result.returncode == 19
    assert not checkout.dist.exists()


def test_a_source_that_fails_is_no_verdict(checkout: Checkout, local_index: LocalIndex) -> None:
    offer(local_index, "0.20.2", toys.FILES)
    dead = "http://127.0.0.1:9/simple"
    result = checkout.run("track", PIP_INDEX_URL=dead, PIP_EXTRA_INDEX_URL=local_index.url)
    assert result.returncode == 19
    assert dead in result.stderr
    assert not checkout.dist.exists()


def test_no_git_checkout(checkout: Checkout) -> None:
    shutil.rmtree(checkout.folder / ".git")
    result = checkout.run("track")
    assert result.returncode == 2
    assert "no git checkout" in result.stderr
