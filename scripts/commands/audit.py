"""`nox -s audit -- RELEASE|WHEEL`: which defects of the registry a build of vLLM has.

    nox -s audit -- 0.23.0       the stock wheel of a release
    nox -s audit -- FILE.whl     any wheel: pinned, of your own, or patched

A release has a defect if the fix's tests were seen failing on its stock wheel; "likely" is what its
text says, or tests that have changed since they ran. Of a build of your own it is said as long as
the files that the fix changes are the release's. Writes reports/audit.json.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from scripts.patchset.registry import load_registry
from scripts.project import REPORTS, ROOT
from scripts.prove.audit import Audit, audit_release, audit_wheel
from scripts.system.console import entry, out, parser_of
from scripts.system.files import replacing
from scripts.upstream.lock import pinned_release

REPORT = REPORTS / "audit.json"


def main() -> None:
    """Audit what the command line names."""
    parser = parser_of("audit", __doc__)
    parser.add_argument("build", metavar="RELEASE|WHEEL")
    named, registry = parser.parse_args().build, load_registry()
    if named.endswith(".whl"):
        audit = audit_wheel(Path(named), registry)
    else:
        audit = audit_release(pinned_release(named), registry)
    _print(audit)
    _write(audit)
    out.print(f"wrote {REPORT.relative_to(ROOT)}", markup=False)


def _print(audit: Audit) -> None:
    table = Table("defect", "what it does", "", "how that is known", "kvfix", title=audit.name)
    for one in audit.defects:
        table.add_row(
            one.fix.id, escape(one.fix.headline), one.has.value, escape(one.why),
            "patched" if one.patched else "open",
        )  # fmt: skip
    out.print(table)
    if audit.inside:
        out.print(f"patched in it: {', '.join(audit.inside)}", markup=False)
    counts = Counter(one.has.value for one in audit.defects)
    said = ", ".join(f"{count} {has}" for has, count in counts.items()) or "none"
    out.print(f"{audit.name}, a build of {audit.release}: {said}", markup=False)


def _write(audit: Audit) -> None:
    document = {
        "build": audit.name,
        "release": audit.release,
        "fixes_inside": audit.inside,
        "defects": [
            {
                "id": one.fix.id,
                "headline": one.fix.headline,
                "has": one.has.value,
                "why": one.why,
                "patched": one.patched,
                "upstream": one.fix.upstream_url,
            }
            for one in audit.defects
        ],
    }
    REPORT.parent.mkdir(exist_ok=True)
    with replacing(REPORT) as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())


if __name__ == "__main__":
    entry(main)
