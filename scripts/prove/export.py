"""`nox -s export -- RELEASE --prove`: is the branch what it says, commit by commit, and built?

- At each commit the tests of its fix pass, and those of the next one still fail, so each commit
  imports and makes its own tests pass. All on files out of git, in an environment with the stock
  wheel.
- A fork that builds its wheel as upstream does, around the binaries of the official one, gets the
  Python files that `nox -s apply` writes, the overlay among them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.commits.clone import apply_to_tree
from scripts.commits.fixes import branch_name, commit_fixes
from scripts.commits.patches import release_repository
from scripts.patchset.overlay import PACKAGE
from scripts.patchset.patch import Patch
from scripts.patchset.registry import Fix, Registry
from scripts.patchset.target import Target
from scripts.project import REPORTS, ROOT, project
from scripts.prove.environment import Environment
from scripts.prove.key import tests_hash
from scripts.prove.outcomes import Outcome, is_of
from scripts.prove.pytest import run_pytest
from scripts.prove.record import of_fix
from scripts.system.console import err
from scripts.system.files import replace_text
from scripts.system.git import Repository, identity
from scripts.system.process import run
from scripts.upstream.tree import release_tree
from scripts.wheel.build import patched_wheel
from scripts.wheel.names import VERSION_MODULE
from scripts.wheel.reader import WheelReader

Row = dict[str, Any]

# What a build writes about itself.
_OF_THE_BUILD = {VERSION_MODULE, f"{PACKAGE}/provenance/build.py"}


def prove_export(release: str, patches: Sequence[Patch], registry: Registry) -> list[str]:
    """Run all that is said above, write `reports/export-<release>.json`, and return the faults."""
    path = REPORTS / f"export-{release}.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    work = ROOT / ".work"
    work.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="export-", dir=work) as folder:
        known, report["commits"] = report.get("commits", {}), {}
        for name, row in _flips(release, patches, registry, Path(folder, "commits"), known):
            report["commits"][name] = row
            replace_text(path, json.dumps(report, indent=2) + "\n")  # so that it can go on
        report["build"] = _build(release, patches, registry, Path(folder, "build"))
    replace_text(path, json.dumps(report, indent=2) + "\n")
    faults = [fault for row in report["commits"].values() for fault in row["faults"]]
    return faults + [f"the fork's own build: {line}" for line in report["build"]["differing"]]


def _flips(
    release: str,
    patches: Sequence[Patch],
    registry: Registry,
    folder: Path,
    known: Mapping[str, Row],
) -> Iterator[tuple[str, Row]]:
    """Yield what was seen at each commit; it is not run again where commit and tests are known."""
    repository = release_repository(release, folder, registry)
    (commits,), _ = commit_fixes(repository, f"v{release}", registry, [patches])
    fixes = [registry.fix(patch.fix_id) for patch in patches]
    environment = Environment(release).make()
    environment.install(environment.stock)
    for number, commit in enumerate((f"v{release}", *commits)):
        own, following = fixes[number - 1 : number], fixes[number : number + 1]
        name = own[0].id if own else "stock"
        hashes = [tests_hash(fix) for fix in (*own, *following)]
        key = " ".join([repository.run("rev-parse", f"{commit}^{{commit}}").strip(), *hashes])
        if known.get(name, {}).get("key") == key and not known[name]["faults"]:
            yield name, known[name]
            continue
        err.print(f"{release}: commit {number} of {len(commits)}, {name} ...")
        outcomes = _run(environment, repository, release, commit, [*own, *following])
        expected = [(of_fix(fix, release, outcomes), fix.id, "passed") for fix in own]
        for fix in following if following and following[0].affects(release) else ():
            spared = fix.spared_on(release)  # these pass on stock as well
            failing = {
                node: outcome
                for node, outcome in of_fix(fix, release, outcomes).items()
                if not any(is_of(node, test) for test in spared)
            }
            expected.append((failing, fix.id, "failed"))
        yield (
            name,
            {
                "key": key,
                "seen": [f"{fix_id}: {len(nodes)} {result}" for nodes, fix_id, result in expected],
                "faults": [
                    f"commit of {name}: {fault}"
                    for nodes, fix_id, result in expected
                    for fault in _unlike(fix_id, nodes, result)
                ],
            },
        )


def _run(
    environment: Environment,
    repository: Repository,
    release: str,
    commit: str,
    fixes: Sequence[Fix],
) -> dict[str, Outcome]:
    names = repository.run("diff", "--name-only", f"v{release}", commit).splitlines()
    changed = {
        name: (repository.read(commit, name) or "").encode("utf-8", "surrogateescape")
        for name in names
    }
    folder = ROOT / ".nox" / f"commit-{release}"
    paths = sorted({test.partition("::")[0] for fix in fixes for test in fix.tests})
    try:
        return run_pytest(environment, paths, shadow=environment.shadow_of(folder, changed))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unlike(fix_id: str, outcomes: dict[str, Outcome], result: str) -> Iterator[str]:
    if not outcomes:
        yield f"no test of {fix_id} ran"
    for node, outcome in outcomes.items():
        if outcome.result != result:
            yield f"{node} {outcome.result}, expected {result} ({outcome.message})"


def _build(release: str, patches: Sequence[Patch], registry: Registry, folder: Path) -> Row:
    """Build the fork, and return how its Python files differ from ours, and how many do not."""
    err.print(f"{release}: the wheel that a fork builds around the official binaries ...")
    shutil.copytree(release_tree(release), folder)
    fork, branch = Repository.init(folder), branch_name(release)
    fork.run("add", "--all", "--force")
    who = identity(registry.author, "2026-01-01T00:00:00+00:00")
    fork.run("commit", "--quiet", "-m", f"vLLM {release}", env=who)
    apply_to_tree(folder, branch, release, patches, registry)
    fork.run("switch", "--quiet", branch)
    wheel, _ = Target.of(release).wheel_for()
    uv = shutil.which("uv")
    builder = [uv, "build", "--wheel", "--out-dir"] if uv else [
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir",
    ]  # fmt: skip
    settings = {
        "SETUPTOOLS_SCM_PRETEND_VERSION": f"{release}+kvfix.{project().version}",
        "VLLM_PRECOMPILED_WHEEL_LOCATION": os.fspath(wheel),
        "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX": "1",
        "VLLM_TARGET_DEVICE": "cuda",  # a machine without a GPU builds for its CPU else
        "VLLM_USE_PRECOMPILED": "1",
    }
    run([*builder, folder.parent / "built", "."], cwd=folder, env=settings, timeout=3600)
    (built,) = (folder.parent / "built").glob("*.whl")
    differing, same = compare(patched_wheel(release), built)
    return {"same_python_files": same, "differing": differing}


def compare(ours: Path, theirs: Path) -> tuple[list[str], int]:
    """Compare the Python files of two wheels: what differs, and how many do not."""
    with WheelReader(ours) as one, WheelReader(theirs) as other:
        names, others = (
            {n for n in wheel.names if n.endswith(".py")} - _OF_THE_BUILD for wheel in (one, other)
        )
        differing = [f"{name} is in `apply`'s wheel only" for name in sorted(names - others)]
        differing += [f"{name} is in the fork's wheel only" for name in sorted(others - names)]
        both = sorted(names & others)
        unequal = [name for name in both if one.read(name) != other.read(name)]
    return [*differing, *(f"{name} has other bytes" for name in unequal)], len(both) - len(unequal)
