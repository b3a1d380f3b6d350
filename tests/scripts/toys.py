"""A small vLLM: its files, a registry and a series for it, and patches as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from scripts.patchset.patch import Patch, read_patch
from scripts.patchset.registry import Fix, Registry
from scripts.patchset.series import Series
from tests.scripts.repos import commit, git, stored, write

AUTHOR = "kvfix maintainers <maintainers@kvfix.invalid>"
WORKER = "vllm/worker.py"
STATE = "vllm/distributed/state.py"
HOOK = "vllm_overlay.distributed.kv_transfer.kv_transfer_state"
FEWER_PLUGINS = [
    word
    for name in ("anyio", "hypothesispytest", "xdist", "xdist.looponfail")
    for word in ("-p", f"no:{name}")
]
"""Words for pytest: no toy needs what takes most of its start, and hundreds of starts it is."""


def _functions(prefix: str) -> str:
    return "".join(f"def {prefix}{n}(x):\n    return x + {n}\n\n\n" for n in range(12))


FILES = {
    "vllm/__init__.py": "from vllm._version import __version__\n",
    WORKER: "# SPDX-License-Identifier: Apache-2.0\n# SPDX-FileCopyrightText: of the project\n"
    '"""Work."""\nimport os\n\n\n' + _functions("work"),
    STATE: '"""State."""\n\nimport sys\n\n\n' + _functions("state"),
    "vllm/distributed/__init__.py": "",
    "pyproject.toml": "[project]\nname = 'vllm'\n",
}


def changed(path: str, *pairs: tuple[str, str], files: Mapping[str, str] = FILES) -> str:
    """Return the text of a file with some passages, each there once, replaced."""
    text = files[path]
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


ONE = {
    STATE: changed(
        STATE,
        ("import sys\n", f"import sys\n\nfrom {HOOK} import _sync_engine_id_across_tp\n"),
        ("    return x + 7\n", "    _sync_engine_id_across_tp(x)\n    return x + 7\n"),
    ),
    WORKER: changed(WORKER, ("    return x + 2\n", "    return work1(x)\n")),
}
TWO = {WORKER: changed(WORKER, ("    return x + 9\n", "    return work1(x)\n"))}


def fix(fix_id: str, **changes: object) -> Fix:
    """Return an entry of a registry."""
    entry = Fix(
        id=fix_id,
        slug="a-name",
        headline=f"without {fix_id}",
        title=f"{fix_id} is right → for good",
        kind="backport",
        upstream_pr=f"vllm-project/vllm#{fix_id}",
        upstream_status="Backport",
        applies_to="<=0.20.2",
        fixed_in="0.21.0",
        remove_when=f"tests/regressions/test_{fix_id}.py passes on the stock release",
        wire_compat="none",
        tests=(f"tests/regressions/test_{fix_id}.py",),
        depends_on=(),
        symptom="The log says `Potentially invalid KV blocks`,\n  and that for long. " * 3,
        cause="A cause: with a colon.",
        change="What was set is heeded.",
        risk="None.",
    )
    return replace(entry, **changes)  # type: ignore[arg-type]


def registry(*fixes: Fix) -> Registry:
    """Return a registry of these fixes."""
    return Registry(AUTHOR, {one.id: one for one in fixes})


REGISTRY = registry(
    fix("1"),
    fix("2", depends_on=("1",), kind="companion", upstream_pr="", upstream_status="Pending"),
)


def patch(folder: Path, entry: Fix, after: Mapping[str, str]) -> Patch:
    """Return the patch of the small vLLM with the changed files `after`; it lies in `folder`."""
    source = folder / f"of-{entry.id}"
    commit(source, FILES, "before")
    commit(source, after, "after")
    name = f"{entry.name}/0.20.2.patch"
    write(folder, {name: stored(source, fix=entry.name)})
    return read_patch(folder / name)


def series(folder: Path, changes: Mapping[str, Mapping[str, str]] | None = None) -> Series:
    """Return the series of `REGISTRY`, or of other changes by the id of their fix."""
    changes = {"1": ONE, "2": TWO} if changes is None else changes
    made = (patch(folder, REGISTRY.fixes[name], after) for name, after in changes.items())
    return Series("0.20.2", tuple(made))


def clone_of_vllm(folder: Path) -> Path:
    """Make a repository with releases as tags, HEAD at v0.20.2, and return its folder."""
    commit(folder, {**FILES, WORKER: "nothing\n"}, "older")
    git(folder, "tag", "v0.20.1")
    commit(folder, FILES, "newer")
    git(folder, "tag", "v0.20.2")
    commit(folder, {WORKER: FILES[WORKER] + "# more\n"}, "newest")
    git(folder, "tag", "v0.21.0")
    git(folder, "switch", "--quiet", "--create", "ours", "v0.20.2")
    return folder
