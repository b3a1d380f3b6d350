"""The patch set, read as text: each patch applies, says what the registry says, adds only hooks."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from scripts.checks.typecheck import typecheck
from scripts.commits.patches import commit_hooks, patch_text, release_repository
from scripts.patchset.documents import documents
from scripts.patchset.hooks import logic_in_hooks
from scripts.patchset.overlay import overlay_files, scope_of, stamp_all, uses
from scripts.patchset.patch import Patch, apply_patches
from scripts.patchset.registry import Registry, load_registry
from scripts.patchset.series import Series, listed_patch, load_series, patch_names, releases_by_line
from scripts.project import OVERLAY, PATCHES, REPORTS, ROOT
from scripts.system.console import out
from scripts.system.errors import KvfixError
from scripts.upstream.tree import read_source
from scripts.upstream_tests import later


def patch_set_faults() -> Iterator[str]:
    """Yield everything that is wrong with patches, registry and documents."""
    try:
        registry = load_registry()
        releases = releases_by_line()
    except KvfixError as error:
        yield error.found
        return
    names = [path.parent.name for path in sorted(PATCHES.glob("*/series"))]
    if unreadable := [fault for line in names for fault in _unreadable(line)]:
        yield from unreadable
        return
    lines = [load_series(line) for line in names]
    used: set[str] = set()
    for series in lines:
        yield from _listing(series.line)
        if unknown := [p.name for p in series.patches if p.fix_id not in registry.fixes]:
            yield f"{series.line}: {', '.join(unknown)}: no such fix in fixes.toml"
            continue
        yield from _messages(series, registry)
        yield from _coverage(series, registry, releases.get(series.line, []))
        if not releases.get(series.line):
            yield f"{series.line}: no release of the lock belongs to this line"
            continue
        for release in releases[series.line]:
            yield from _application(series, registry, release)
        yield from _reexport(series, registry, releases[series.line][-1])
        used |= overlay_files(series.patches).keys()
    yield from later.registry_faults(registry)
    yield from (
        f"{path.relative_to(ROOT)}: no hook of any line reaches this module"
        for path in sorted(OVERLAY.rglob("*.py"))
        if path.relative_to(ROOT).as_posix() not in used
    )
    yield from _modules({r: s.patches for s in lines for r in releases.get(s.line, [])})
    yield from _documents(registry)
    _report(lines)


def _unreadable(line: str) -> Iterator[str]:
    for name in patch_names(line):
        try:
            listed_patch(line, name)
        except KvfixError as error:
            yield error.found


def _listing(line: str) -> Iterator[str]:
    names = patch_names(line)
    yield from (f"{line}/series lists {n} twice" for n in sorted({*names}) if names.count(n) > 1)
    found = {path.name for path in (PATCHES / line).iterdir()} - {"series"}
    yield from (f"{line}/{name} is not in {line}/series" for name in sorted(found - {*names}))


def _messages(series: Series, registry: Registry) -> Iterator[str]:
    seen: dict[str, str] = {}
    for patch in series.patches:
        fix = registry.fixes[patch.fix_id]
        where = f"{series.line}/{patch.name}"
        if patch.name != fix.file_name:
            yield f"{where}: fixes.toml calls it {fix.file_name}"
        if fix.id in seen:
            yield f"{where}: {seen[fix.id]} is for fix {fix.id} as well"
        seen[fix.id] = patch.name
        if patch.subject != f"[PATCH] [kvfix {fix.id}] {fix.title}":
            yield f"{where}: the subject is not the one of fixes.toml"
        if patch.trailers != registry.trailers(fix):
            yield f"{where}: its trailers are not those of fixes.toml"


def _coverage(series: Series, registry: Registry, releases: list[str]) -> Iterator[str]:
    for fix in registry.fixes.values():
        affected = [release for release in releases if fix.affects(release)]
        unpatched = [release for release in affected if fix.unpatched_on(release)]
        missing = [release for release in affected if release not in unpatched]
        if missing and fix.id not in series.fix_ids:
            yield f"{series.line}: fix {fix.id} applies to {missing[0]} and has no patch"
        if fix.id in series.fix_ids and not affected:
            yield f"{series.line}: fix {fix.id} applies to no release of the line"
        if fix.id in series.fix_ids and unpatched:
            yield f"{series.line}: fix {fix.id} is unpatched on {unpatched[0]} and has a patch"


def _application(series: Series, registry: Registry, release: str) -> Iterator[str]:
    texts: dict[str, str] = {}
    for patch in series.patches:
        try:
            alone = series.only([patch.fix_id], registry)
            apply_patches(alone, lambda path: read_source(release, path))
            before = {path: texts.get(path) or read_source(release, path) for path in patch.files}
            after, _ = apply_patches([patch], before.__getitem__)
        except KvfixError as error:
            yield f"{series.line} on {release}: {error.found}"
            continue
        texts |= after
        for path, text in after.items():
            for number, line in logic_in_hooks(before[path], text):
                yield f"{series.line}/{patch.name} on {release}: {path}:{number}: no hook: {line}"
    stamped = stamp_all(texts, series.patches)
    for path, text in stamped.items():
        top = "".join(text.splitlines(keepends=True)[:8])
        missing = [p.fix_id for p in series.patches if path in p.files and p.fix_id not in top]
        if missing:
            yield f"{release}: {path}: no notice near its top names {', '.join(missing)}"
    yield from typecheck(release, stamped, overlay_files(series.patches))


def _reexport(series: Series, registry: Registry, release: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        repository = release_repository(release, Path(folder, release), registry)
        try:
            commits = commit_hooks(repository, "HEAD", series.patches, registry)
        except KvfixError:
            return  # already listed, release by release
        for patch, commit in zip(series.patches, commits, strict=True):
            path = PATCHES / series.line / patch.name
            if path.read_text(encoding="utf-8") != patch_text(repository, commit):
                yield (
                    f"{series.line}/{patch.name}: exported again it has other bytes; "
                    "run: nox -s edit -- --restamp"
                )


def _modules(patches: Mapping[str, Sequence[Patch]]) -> Iterator[str]:
    """Each module says for which releases it is, rightly, and has its test file."""
    for path, needed in uses(patches).items():
        name = path.relative_to(ROOT)
        scope = scope_of(path)
        if scope is None:
            yield (
                f"{name}: its first line does not say which releases it is for, "
                "as in: Up to 0.22.1: what it holds"
            )
        elif wrong := [
            release for release in patches if scope.holds(release) != (release in needed)
        ]:
            yield (
                f"{name}: its first line says {scope.words!r}, but on {', '.join(wrong)} hooks "
                f"{'reach it' if wrong[0] in needed else 'do not reach it'}; "
                "run: nox -s edit -- --restamp"
            )
        mirror = path.relative_to(OVERLAY)
        test = ROOT / "tests" / "overlay" / mirror.with_name(f"test_{mirror.name}")
        if not test.is_file():
            yield f"{name}: has no {test.relative_to(ROOT)}"


def _documents(registry: Registry) -> Iterator[str]:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for fix_id in registry.fixes:
        if not re.search(rf"\b{fix_id}\b", changelog):
            yield f"CHANGELOG.md does not name fix {fix_id}"
    for path, text in documents(registry).items():
        if path.is_relative_to(OVERLAY):
            continue  # said with its reason in `_modules`
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            name = path.relative_to(ROOT)
            yield f"{name}: is not what the registry says; run: nox -s edit -- --restamp"


def _report(lines: list[Series]) -> None:
    """Say how thin the hooks are: lines added to upstream's files against lines of overlay."""
    counts = {s.line: {p.fix_id: p.added_lines for p in s.patches} for s in lines}
    overlay = sum(len(p.read_bytes().splitlines()) for p in OVERLAY.rglob("*.py"))
    table = Table("fix", *counts, title=f"lines added in hooks (overlay: {overlay} lines)")
    for fix_id in dict.fromkeys(fix_id for hooks in counts.values() for fix_id in hooks):
        table.add_row(fix_id, *(str(hooks.get(fix_id, "-")) for hooks in counts.values()))
    table.add_row("all", *(str(sum(hooks.values())) for hooks in counts.values()))
    out.print(table)
    REPORTS.mkdir(exist_ok=True)
    report = {"hook_lines": counts, "overlay_lines": overlay}
    (REPORTS / "lint.json").write_text(json.dumps(report, indent=2) + "\n")
