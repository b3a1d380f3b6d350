"""The tables of the README, docs/fixes.md and docs/overlay.md, made from registry and patches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from packaging.version import Version

from scripts.patchset.overlay import Scope, needed_scope, scope_of, uses
from scripts.patchset.pins import load_pins
from scripts.patchset.registry import Registry, Unpatched
from scripts.patchset.series import carried_releases, there_is
from scripts.project import OVERLAY, ROOT

README = ROOT / "README.md"
FIXES = ROOT / "docs" / "fixes.md"
MODULES = ROOT / "docs" / "overlay.md"
_MARKED = re.compile(r"(<!-- (matrix|pins).*?-->\n).*?(<!-- end of \2 -->\n)", re.DOTALL)


def documents(registry: Registry) -> dict[Path, str]:
    """Return what is made has to say, by path: README, pages of docs/, first lines of modules.

    Of the overlay's modules only those that say something else.
    """
    patches = {release: there_is(registry, release)[0].patches for release in carried_releases()}
    needed = uses(patches)
    scopes = {
        path: (said, needed_scope(said, list(needed[path]), list(patches)))
        for path in needed
        if (said := scope_of(path)) is not None
    }
    held = {release: {patch.fix_id for patch in each} for release, each in patches.items()}
    readme = README.read_text(encoding="utf-8")
    tables = {"matrix": partial(_table, registry, held), "pins": partial(_pins, list(held))}
    return {
        README: _MARKED.sub(lambda match: match[1] + tables[match[2]]() + match[3], readme),
        FIXES: _details(registry, held),
        MODULES: _modules(registry, needed, {path: scope for path, (_, scope) in scopes.items()}),
        **{
            path: path.read_text(encoding="utf-8").replace(said.words, scope.words, 1)
            for path, (said, scope) in scopes.items()
            if said != scope
        },
    }


def _table(registry: Registry, held: dict[str, set[str]]) -> str:
    rows = ["| fix | without it | ✓ patched | ● open |", "|---|---|---|---|"]
    releases = list(held)
    for fix in registry.fixes.values():
        patched = [release for release, ids in held.items() if fix.closed_by(release) in ids]
        left = [one for one in releases if one not in patched and fix.unpatched_on(one)]
        cells = " | ".join(_extent(among, releases) for among in (patched, left))
        rows.append(f"| [{fix.id}](docs/fixes.md#{fix.id.lower()}) | {fix.headline} | {cells} |")
    return "\n".join(rows) + "\n"


def _pins(carried: Sequence[str]) -> str:
    rows = ["| vLLM | shipped by | |", "|---|---|---|"]
    for release, pins in load_pins().items():
        names = ", ".join(pin.link for pin in pins)
        rows.append(f"| {release} | {names} | {'✓' if release in carried else 'not yet'} |")
    return "\n".join(rows) + "\n"


def _details(registry: Registry, held: dict[str, set[str]]) -> str:
    parts = [
        "# The fixes\n<!-- made by `nox -s edit -- --restamp` from patches/fixes.toml -->\n",
        "Look for your log line, HTTP status or metric below *Symptom*. Fixes stand in the order "
        "in which they are applied. A number is that of upstream's pull request; K is ours.\n",
    ]
    for fix in registry.fixes.values():
        releases = [release for release, ids in held.items() if fix.id in ids]
        patched = f"Patched: {', '.join(releases)}. " if releases else ""
        source = f"[{fix.upstream_pr}]({fix.upstream_url})" if fix.upstream_url else "none"
        needs = ", ".join(f"[{other}](#{other.lower()})" for other in fix.depends_on) or "nothing"
        parts.append(f"## {fix.id}\n**{fix.title[0].upper()}{fix.title[1:]}.**\n")
        for label in ("symptom", "cause", "change", "risk"):
            parts.append(f"*{label.capitalize()}.* {' '.join(getattr(fix, label).split())}\n")
        parts.append(
            f"{patched}Upstream: {source}"
            f"{f', fixed in {fix.fixed_in}' if fix.fixed_in else ''}. "
            f"Needs {needs}. Wire: {fix.wire_compat}.\n"
        )
        for one in fix.unpatched:
            how = (
                f"Closed by [{one.closed_by}](#{one.closed_by.lower()})"
                if one.closed_by
                else "Open"
            )
            parts.append(f"{how} on {one.releases}, without a patch{_part(one)}: {one.reason}.\n")
        for spared in fix.spared:
            names = _names(spared.tests)
            parts.append(f"On {spared.releases} {spared.reason}: {names} pass on stock.\n")
        for test in fix.upstream_tests:
            parts.append(
                f"Upstream's own `{test.test}` ({test.releases}) fails with it: {test.reason}.\n"
            )
    return "\n".join(parts)


def _part(one: Unpatched) -> str:
    return f", what {_names(one.tests)} show" if one.tests else ""


def _names(tests: Iterable[str]) -> str:
    return ", ".join(f"`{test.rpartition('::')[2]}`" for test in tests)


def _modules(
    registry: Registry,
    needed: Mapping[Path, Mapping[str, Sequence[str]]],
    scopes: Mapping[Path, Scope],
) -> str:
    sections: dict[str, tuple[Scope, list[str]]] = {}
    for path, scope in scopes.items():
        if not needed[path]:
            continue  # lint says so
        name = path.relative_to(OVERLAY).as_posix()
        _, rows = sections.setdefault(scope.words, (scope, []))
        link = f"[{name}](../{path.relative_to(ROOT).as_posix()})"
        rows.append(f"| {link} | {scope.about.rstrip('.')} | {_needing(registry, needed[path])} |")
    parts = [
        "# The overlay\n<!-- made by `nox -s edit -- --restamp` from patches/ and the modules' "
        "first lines -->\n",
        "Which releases and which fixes a module of `vllm_overlay/` serves: those whose hooks "
        "import it, or import what imports it. `__init__`, `__main__` and `provenance` are in "
        "every build. Each module's tests are in its mirror below `tests/overlay/`.\n",
    ]
    for words, (_, rows) in sorted(sections.items(), key=lambda item: _order(item[1][0])):
        parts.append(f"## {words}\n| module | what it holds | fixes |\n|---|---|---|")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _order(scope: Scope) -> tuple[bool, Version, Version]:
    """All releases first, then by what they begin with, then by what they end with."""
    least, most = Version("0"), Version("9999")
    first = Version(scope.first) if scope.first else least
    last = Version(scope.last) if scope.last else most
    return (scope.first or scope.last) is not None, first, last


def _needing(registry: Registry, needed: Mapping[str, Sequence[str]]) -> str:
    """Name the fixes, each with its releases where those are not all of the module's."""
    releases = list(needed)
    named = []
    for fix_id in registry.fixes:
        among = [release for release in releases if fix_id in needed[release]]
        if among:
            where = "" if among == releases else f" ({_extent(among, releases)})"
            named.append(f"{fix_id}{where}")
    return ", ".join(named)


def _extent(among: Sequence[str], releases: Sequence[str]) -> str:
    """Say which of `releases` are `among` them."""
    if not among:
        return "-"
    start = releases.index(among[0])
    if among != releases[start : start + len(among)]:
        return ", ".join(among)
    if len(among) == len(releases):
        return "all"
    if len(among) == 1:
        return among[0]
    if start == 0:
        return f"up to {among[-1]}"
    if among[-1] == releases[-1]:
        return f"from {among[0]} on"
    return f"{among[0]} to {among[-1]}"
