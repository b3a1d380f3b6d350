"""Does each release have what the overlay uses, and does each hook call what the overlay has?

A hook that applies while a name it needs has moved away fails only when the defect strikes. So
mypy reads the overlay and the hooks within the patched tree of every release. What upstream's
own lines do is not our business: faults are kept where they are in the overlay, or on an added
line.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from threading import Lock

from scripts.patchset.hooks import added_lines
from scripts.patchset.overlay import PACKAGE
from scripts.project import ROOT
from scripts.system.process import run
from scripts.upstream.tree import read_source, release_tree

_WORK = ROOT / ".work" / "typecheck"
_FAULT = re.compile(r"(?P<path>[^:]+):(?P<line>\d+): error: (?P<text>.+)")
# Up to 0.19.1 NIXL's connector is one module. The overlay takes types, and nothing else, from the
# modules that it has been split into since.
_CONNECTORS = "vllm/distributed/kv_transfer/kv_connector/v1"
_SPLIT_INTO = ("__init__", "connector", "metadata", "scheduler", "worker")
_CACHES = _WORK / "caches"
"""What mypy knows, in a folder for each release: two that write to one would spoil it."""
_AT_REST = "kvfix-at-rest"
"""In a cache that nobody writes to, and that was written to the end."""
_BEGINNING = Lock()

_CONFIGURATION = """\
[mypy]
python_version = 3.12
follow_imports = silent
ignore_missing_imports = True
check_untyped_defs = True
warn_unused_ignores = False
# Other people's packages are not installed here; a module of vLLM that is gone is a fault.
[mypy-vllm.*,vllm_overlay.*]
ignore_missing_imports = False
"""


def lay_out(release: str, texts: Mapping[str, str], overlay: Mapping[str, bytes]) -> Path:
    """Lay out the patched tree of `release`, of what Python there is, and return where it lies.

    Args:
        release: The release whose tree is patched.
        texts: New text of each file that the series changes, by path.
        overlay: The overlay files that come with it, by path.
    """
    tree = _WORK / release
    shutil.rmtree(tree, ignore_errors=True)
    _link(release_tree(release) / "vllm", tree / "vllm", {tree / path for path in texts})
    for path, data in {**{p: t.encode() for p, t in texts.items()}, **overlay}.items():
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    if (tree / _CONNECTORS / "nixl_connector.py").is_file():
        (tree / _CONNECTORS / "nixl").mkdir()
        view = f"from {_CONNECTORS.replace('/', '.')}.nixl_connector import *\n"
        for name in _SPLIT_INTO:
            (tree / _CONNECTORS / "nixl" / f"{name}.py").write_text(view)
    return tree


def typecheck(
    release: str, tree: Path, texts: Mapping[str, str], overlay: Mapping[str, bytes]
) -> list[str]:
    """Return the faults that mypy finds in the hooks and the overlay in `tree`, of `lay_out`."""
    configuration = tree / "mypy.ini"
    configuration.write_text(_CONFIGURATION)
    cache = _cache(release)
    for _ in range(2):
        result = run(
            [
                sys.executable, "-m", "mypy", "--config-file", configuration, "--show-traceback",
                "--cache-dir", cache, "--no-error-summary",
                *sorted(texts), *sorted(overlay),
            ],
            cwd=tree,
            check=False,
            timeout=900,
        )  # fmt: skip
        if "INTERNAL ERROR" not in result.stdout + result.stderr:
            break
        shutil.rmtree(cache, ignore_errors=True)  # a disk that was full may have spoilt it
    if result.returncode not in (0, 1) or result.stderr.strip():
        return [f"{release}: mypy did not run: {(result.stderr or result.stdout).strip()[-800:]}"]
    (cache / _AT_REST).touch()
    ours = {path: added_lines(read_source(release, path), text) for path, text in texts.items()}
    faults = []
    for match in map(_FAULT.match, result.stdout.splitlines()):
        if match is None:
            continue
        path, line = match["path"], int(match["line"])
        if path.startswith(f"{PACKAGE}/") or line in ours.get(path, ()):
            faults.append(f"{release}: {path}:{line}: {match['text']}")
    return faults


def _link(stock: Path, tree: Path, changed: Collection[Path]) -> None:
    """Lay out the release's folder without what is changed, of which the rest is not copied."""
    tree.mkdir(parents=True)
    for source in stock.iterdir():
        target = tree / source.name
        if any(target in path.parents for path in changed):
            _link(source, target, changed)
        elif target not in changed:
            target.symlink_to(source)


def _cache(release: str) -> Path:
    """Return mypy's cache for a release, which begins as that of one before it.

    Most of what it knows is the same there: a first run takes 6 s of a core for 10. One that was
    not written to the end (a lint that was stopped) begins anew.
    """
    cache = _CACHES / release
    with _BEGINNING:  # what is being copied is not written to
        if not (cache / _AT_REST).exists():
            shutil.rmtree(cache, ignore_errors=True)
            at_rest = [path.parent for path in _CACHES.glob(f"*/{_AT_REST}")]
            if at_rest:
                ignored = shutil.ignore_patterns(_AT_REST)  # a copy may be cut short
                shutil.copytree(max(at_rest), cache, ignore=ignored)
        cache.mkdir(parents=True, exist_ok=True)
        (cache / _AT_REST).unlink(missing_ok=True)
    return cache
