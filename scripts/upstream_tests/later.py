"""Forward tests: what upstream later wrote about a defect, run on the releases that kvfix patches.

`patches/fixes.toml` lists the test functions by fix (`[[fix.forward-test]]`); `write` cuts them
out of the pinned later sdist (`scripts.upstream_tests.cut`) into a tests tree of the release, where
its own helpers are. Each has to fail on stock, in the way that the table says, and to pass on
patched; or the table says why it passes on stock, and then it shows no more than that nothing
broke.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from packaging.version import Version

from scripts.patchset.registry import LaterTest, Registry
from scripts.project import ROOT, project
from scripts.prove.outcomes import Outcome
from scripts.system.errors import KvfixError
from scripts.upstream.tree import release_tree
from scripts.upstream_tests.compare import said
from scripts.upstream_tests.cut import Cut, Wanted

ADAPTERS = ROOT / "tests" / "programs" / "forward_adapters.py"
"""Our fixtures that stand between a later test and an earlier release whose interface differs."""


@dataclass(frozen=True)
class ForwardTest:
    """One later test on one earlier release.

    Attributes:
        fix: Id of the fix that it is about.
        release: The first release whose sdist holds it in this form.
        test: Its node id there.
        discriminates: Whether it has to fail on stock.
        reason: How the message of the failure on stock begins; or why there is none.
    """

    fix: str
    release: str
    test: str
    discriminates: bool
    reason: str

    def fault(self, stock: Outcome, patched: Outcome) -> str:
        """Say what is wrong with how the test ended on the two sides; empty if nothing is."""
        if patched.result != "passed":
            return f"{patched.result} on patched: {patched.message}"
        if not self.discriminates:
            said = f"{stock.result} on stock, where the registry says that it passes"
            return "" if stock.result == "passed" else f"{said}: {stock.message}"
        if stock.result != "failed":
            return f"{stock.result} on stock, so it proves nothing"
        if not stock.message.startswith(self.reason):
            return f"fails on stock otherwise than with {self.reason!r}: {stock.message}"
        return ""


@dataclass
class _File:
    """The tests that come from one file of one later release."""

    release: str
    path: str
    tests: dict[Wanted, None] = field(default_factory=dict)  # in the order of the registry

    @property
    def target(self) -> str:
        """Where they are written; beside the file that they come from, for its helpers."""
        path = PurePosixPath(self.path)
        name = path.stem.removeprefix("test_")
        return str(path.with_name(f"test_forward_{self.release.replace('.', '_')}_{name}.py"))

    def text(self, base: str) -> str:
        """Return the file for release `base`."""
        later, earlier = release_tree(self.release), release_tree(base)
        return Cut(later, earlier, self.path, adapters="tests.forward_adapters").text(self.tests)


def write(release: str, registry: Registry, folder: Path) -> dict[str, ForwardTest]:
    """Cut every forward test of `release` into its tests tree.

    Args:
        release: The earlier release, whose tests tree it is.
        registry: Where the tests are listed.
        folder: The `tests` folder of the release's sdist, laid out where no `vllm` lies beside
            it. Files `test_forward_*.py` are added beside those that the later tests come from.

    Returns:
        By pytest node id, relative to the parent of `folder`. An id without parameters stands for
        all of a test's. Name the ids on pytest's command line: not all parameters of each test
        are listed. `owner` tells which entry an outcome belongs to.

    Raises:
        RegistryError: A listed test does not exist, or needs what `release` does not have.
    """
    files, listed = _plan(release, registry)
    shutil.copyfile(ADAPTERS, folder / ADAPTERS.name)
    for file in files:
        target = folder.parent / file.target
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.text(release), encoding="utf-8")
    return dict(listed)


def owner(node: str, listed: dict[str, ForwardTest]) -> ForwardTest | None:
    """Return the forward test that the outcome of `node` belongs to, if it does to one."""
    return listed.get(node) or listed.get(node.partition("[")[0])


def registry_faults(registry: Registry) -> Iterator[str]:
    """Yield what is wrong with the registry's forward tests, as far as files can tell."""
    for fix in registry.fixes.values():
        for later in fix.forward_tests:
            if not any(_runs_on(later, release) for release in project().releases):
                yield f"fix {fix.id}: {later.test} of {later.release} runs on no release"
    for release in project().releases:
        files, listed = _plan(release, registry)
        ids = [node for node, _ in listed]
        for node in sorted({node for node in ids if ids.count(node) > 1}):
            yield f"{release}: forward test {node} is listed twice"
        for file in files:
            try:
                file.text(release)
            except KvfixError as error:
                yield f"{release}: forward tests of {file.release}: {error.found}"


def _runs_on(later: LaterTest, release: str) -> bool:
    return later.runs_on(release) and Version(release) < Version(later.release)


def _plan(release: str, registry: Registry) -> tuple[list[_File], list[tuple[str, ForwardTest]]]:
    files: dict[tuple[str, str], _File] = {}
    listed: list[tuple[str, ForwardTest]] = []
    for fix in registry.fixes.values():
        for later in (one for one in fix.forward_tests if _runs_on(one, release)):
            path, _, name = later.test.partition("::")
            file = files.setdefault((later.release, path), _File(later.release, path))
            file.tests[Wanted(name, later.adapters)] = None
            reason = later.fails_with or later.passes_on_stock
            test = ForwardTest(fix.id, later.release, later.test, bool(later.fails_with), reason)
            # A function within a function stands on its own once it is cut.
            node = name if name.startswith("Test") else name.rpartition("::")[2]
            for suffix in [f"[{one}]" for one in later.parameters] or [""]:
                listed.append((f"{file.target}::{node}{suffix}", test))
    return list(files.values()), listed


_Sides = Mapping[str, Mapping[str, Outcome]]
_ABSENT = Outcome("absent")


def results_by_test(listed: dict[str, ForwardTest], outcomes: _Sides) -> dict[str, dict[str, str]]:
    """Return for each test that ran where it comes from and what came of it on each side."""
    found: dict[str, dict[str, str]] = {}
    for node in sorted({node for of_side in outcomes.values() for node in of_side}):
        one = owner(node, listed)
        if one is None:
            continue
        results = {side: of_side.get(node, _ABSENT) for side, of_side in outcomes.items()}
        found[node] = {
            "fix": one.fix,
            "from": one.release,
            "test": one.test,
            **({} if one.discriminates else {"does not discriminate": one.reason}),
            **{side: outcome.result for side, outcome in results.items()},
        }
        bad = [outcome for outcome in results.values() if outcome.result in ("failed", "error")]
        if bad:
            found[node]["said"] = said(bad[0])
    return found


def outcome_faults(
    listed: dict[str, ForwardTest], outcomes: _Sides, *, whole: bool
) -> Iterator[str]:
    """Yield what a test of a later release should have done on one of the sides, and did not.

    Args:
        listed: The tests of later releases.
        outcomes: By side, "stock" and "patched", and node id.
        whole: Whether all of them were to run.
    """
    stock, patched = outcomes["stock"], outcomes["patched"]
    ran = {node: owner(node, listed) for node in sorted(stock.keys() | patched.keys())}
    for node, one in ran.items():
        if one is not None:
            fault = one.fault(stock.get(node, _ABSENT), patched.get(node, _ABSENT))
            if fault:
                yield f"{one.fix}: {node} (of {one.release}) {fault}"
    for node, one in listed.items() if whole else ():
        if not any(other == node or other.partition("[")[0] == node for other in ran):
            yield f"{one.fix}: {node} (of {one.release}) did not run"
