"""The patch set, read as text: each patch applies, is what it would be made, adds only hooks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.table import Table

from scripts.checks.imports import import_faults
from scripts.checks.typecheck import lay_out, typecheck
from scripts.commits.stored import stored
from scripts.patchset.documents import documents
from scripts.patchset.hooks import logic_in_hooks
from scripts.patchset.overlay import overlay_files, scope_of, stamp_all, uses
from scripts.patchset.patch import Patch, apply_patches, read_patch
from scripts.patchset.pins import PINS
from scripts.patchset.registry import REGISTRY, Registry, load_registry
from scripts.patchset.series import Series, carried_releases, patch_files, there_is
from scripts.project import OVERLAY, PATCHES, REPORTS, ROOT, project
from scripts.system.console import out
from scripts.system.errors import KvfixError
from scripts.upstream.lock import LOCK
from scripts.upstream.tree import read_source
from scripts.upstream_tests import later

_AT_A_TIME = max(1, min(4, os.cpu_count() or 1))  # mypy takes 1 GB for a release

_KEPT = re.compile(r'(?:(?:__dict__|vars\(\w+\))\.setdefault\(\s*|known\[)"(_\w+)"')
"""What a module keeps on an object of vLLM's; `known` is such an object's `__dict__`."""

_SET = re.compile(r"self\.(_\w+)\b[^=\n]*=[^=]")


def patch_set_faults() -> Iterator[str]:
    """Yield everything that is wrong with patches, registry and documents."""
    try:
        registry = load_registry()
        releases = carried_releases()
    except KvfixError as error:
        yield error.found
        return
    if unreadable := list(_unreadable(registry)):
        yield from unreadable
        return
    yield from (
        f"{release} is among the releases of pyproject.toml and not in upstream.lock"
        for release in project().releases
        if release not in releases
    )
    yield from _strays(registry)
    used: set[str] = set()
    every = []
    for release in releases:
        series, missing = there_is(registry, release)
        yield from missing
        used |= overlay_files(series.patches).keys()
        every.append(series)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for faults in pool.map(lambda series: [*_application(series, registry)], every):
            yield from faults
    yield from _files(registry, releases)
    yield from later.registry_faults(registry)
    yield from (
        f"{path.relative_to(ROOT)}: no hook of any release reaches this module"
        for path in sorted(OVERLAY.rglob("*.py"))
        if path.relative_to(ROOT).as_posix() not in used
    )
    yield from _kept_names(every)
    yield from _modules({series.release: series.patches for series in every})
    yield from _documents(registry)
    _report(every, registry)


def _unreadable(registry: Registry) -> Iterator[str]:
    for fix in registry.fixes.values():
        try:
            paths = patch_files(fix).values()
        except KvfixError as error:
            yield error.found
            continue
        for path in paths:
            try:
                read_patch(path)
            except KvfixError as error:
                yield error.found


def _strays(registry: Registry) -> Iterator[str]:
    """Yield what lies below `patches/` and would never be applied."""
    known = {path for fix in registry.fixes.values() for path in patch_files(fix).values()}
    for path in sorted(PATCHES.rglob("*")):
        if path.is_file() and path not in known | {REGISTRY, LOCK, PINS}:
            yield f"patches/{path.relative_to(PATCHES)}: is the patch of no fix of fixes.toml"


def _files(registry: Registry, releases: Sequence[str]) -> Iterator[str]:
    """Compare the files with what is made of them anew: heads, line numbers, and which there are.

    So each serves a release, none could be spared, and each has the bytes that git gives it.
    """
    made = stored(registry, releases)
    for fix in registry.fixes.values():
        for path in patch_files(fix).values():
            name = path.relative_to(PATCHES).as_posix()
            if name not in made:
                why = "serves no release that another file does not serve as well"
            elif path.read_bytes() != made.pop(name).encode():
                why = "made anew it has other bytes"
            else:
                continue
            yield f"{name}: {why}; run: nox -s edit -- --restamp"
    yield from (f"{name} is missing; run: nox -s edit -- --restamp" for name in made)


def _application(series: Series, registry: Registry) -> Iterator[str]:
    release = series.release
    texts: dict[str, str] = {}
    for patch in series.patches:
        try:
            alone = series.only([patch.fix_id], registry)
            apply_patches(alone, lambda path: read_source(release, path))
            before = {path: texts.get(path) or read_source(release, path) for path in patch.files}
            after, _ = apply_patches([patch], before.__getitem__)
        except KvfixError as error:
            yield f"{release}: {error.found}"
            continue
        texts |= after
        for path, text in after.items():
            for number, line in logic_in_hooks(before[path], text):
                yield f"{patch.name} on {release}: {path}:{number}: no hook: {line}"
    stamped = stamp_all(texts, series.patches)
    for path, text in stamped.items():
        top = "".join(text.splitlines(keepends=True)[:8])
        missing = [p.fix_id for p in series.patches if path in p.files and p.fix_id not in top]
        if missing:
            yield f"{release}: {path}: no notice near its top names {', '.join(missing)}"
    overlay = overlay_files(series.patches)
    tree = lay_out(release, stamped, overlay)
    yield from typecheck(release, tree, stamped, overlay)
    yield from (f"{release}: {fault}" for fault in import_faults(tree))


def _kept_names(every: Sequence[Series]) -> Iterator[str]:
    """What modules keep on vLLM's objects has names that nobody else uses for something else."""
    kept: dict[str, list[str]] = {}
    for path in sorted(OVERLAY.rglob("*.py")):
        for name in sorted(set(_KEPT.findall(path.read_text(encoding="utf-8")))):
            kept.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    for name, modules in kept.items():
        if len(modules) > 1:
            yield f"{' and '.join(modules)}: keep {name} on vLLM's objects, each its own"
    for series in every:
        for touched in sorted({name for patch in series.patches for name in patch.files}):
            own = set(_SET.findall(read_source(series.release, touched)))
            for name in sorted(own & kept.keys()):
                where = f"{touched} of {series.release}"
                yield f"{kept[name][0]}: keeps {name} on vLLM's objects, and so does {where}"


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


def _report(every: Sequence[Series], registry: Registry) -> None:
    """Say how thin the hooks are: lines added to upstream's files against lines of overlay."""
    counts = {s.release: {p.fix_id: p.added_lines for p in s.patches} for s in every}
    overlay = sum(len(p.read_bytes().splitlines()) for p in OVERLAY.rglob("*.py"))
    table = Table("fix", "releases", "lines", title=f"added in hooks (overlay: {overlay} lines)")
    for fix_id in registry.fixes:
        table.add_row(
            fix_id, *_extent([each[fix_id] for each in counts.values() if fix_id in each])
        )
    table.add_row("all", *_extent([sum(each.values()) for each in counts.values()]))
    out.print(table)
    REPORTS.mkdir(exist_ok=True)
    report = {"hook_lines": counts, "overlay_lines": overlay}
    (REPORTS / "lint.json").write_text(json.dumps(report, indent=2) + "\n")


def _extent(lines: Sequence[int]) -> tuple[str, str]:
    """Return on how many releases a fix is, and its lines there, least to most."""
    return str(len(lines)), " to ".join(
        map(str, sorted({min(lines), max(lines)}))
    ) if lines else "-"
