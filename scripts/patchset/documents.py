"""The tables of the README and of docs/fixes.md, made from the registry and the patches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from scripts.patchset.registry import Fix, Registry, Unpatched
from scripts.patchset.series import carried_releases, first_serving, patch_files
from scripts.project import ROOT

README = ROOT / "README.md"
FIXES = ROOT / "docs" / "fixes.md"
_MARKED = re.compile(r"(<!-- matrix.*?-->\n).*?(<!-- end of matrix -->\n)", re.DOTALL)


def documents(registry: Registry) -> dict[Path, str]:
    """Return what the README and docs/fixes.md have to say, by path."""
    held = {
        release: {
            fix.id
            for fix in registry.fixes.values()
            if fix.needed_on(release) and first_serving(patch_files(fix), release)
        }
        for release in carried_releases()
    }
    readme = README.read_text(encoding="utf-8")
    table = _table(registry, held)
    return {
        README: _MARKED.sub(lambda match: match[1] + table + match[2], readme),
        FIXES: _details(registry, held),
    }


def _table(registry: Registry, held: dict[str, set[str]]) -> str:
    rows = [
        f"| fix | without it | {' | '.join(held)} |",
        f"|---|---|{'---|' * len(held)}",
    ]
    for fix in registry.fixes.values():
        cells = " | ".join(_cell(fix, release, ids) for release, ids in held.items())
        rows.append(f"| [{fix.id}](docs/fixes.md#{fix.id.lower()}) | {_first(fix)} | {cells} |")
    return "\n".join(rows) + "\n"


def _cell(fix: Fix, release: str, held: set[str]) -> str:
    if fix.id in held:
        return "✓"
    return "●" if fix.unpatched_on(release) else "-"


def _first(fix: Fix) -> str:
    """Return the first sentence of the symptom: the log line or status that an operator sees."""
    return re.split(r"(?<=[^.]\.)\s", " ".join(fix.symptom.split()), maxsplit=1)[0].rstrip(".")


def _details(registry: Registry, held: dict[str, set[str]]) -> str:
    parts = [
        "# The fixes\n<!-- made by `nox -s edit -- --restamp` from patches/fixes.toml -->\n",
        "Look for your log line, HTTP status or metric below *Symptom*.\n",
    ]
    for fix in registry.fixes.values():
        releases = ", ".join(release for release, ids in held.items() if fix.id in ids)
        source = f"[{fix.upstream_pr}]({fix.upstream_url})" if fix.upstream_url else "none"
        needs = ", ".join(f"[{other}](#{other.lower()})" for other in fix.depends_on) or "nothing"
        parts.append(f"## {fix.id}\n**{fix.title[0].upper()}{fix.title[1:]}.**\n")
        for label in ("symptom", "cause", "change", "risk"):
            parts.append(f"*{label.capitalize()}.* {' '.join(getattr(fix, label).split())}\n")
        parts.append(
            f"Patched: {releases or 'none yet'}. Upstream: {source}"
            f"{f', fixed in {fix.fixed_in}' if fix.fixed_in else ''}. "
            f"Needs {needs}. Wire: {fix.wire_compat}.\n"
        )
        for one in fix.unpatched:
            parts.append(f"Open on {one.releases}, without a patch{_part(one)}: {one.reason}.\n")
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
