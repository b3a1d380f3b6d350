"""What a scanner reads: an OSV record for each fix, and an OpenVEX document of patched builds.

Both say what the matrix says, and nothing of releases that nobody looked at. OSV is about stock
vLLM: its ranges are those of the releases that have the defect. A patched wheel lies in them too,
for 0.20.2+kvfix.0.1.0 comes after 0.20.2 and before 0.21.0; what became of the defect there is said
by the OpenVEX document, for the fixes that have `security` in the registry.

The same commit gives the same bytes: there is no clock and no random number in either.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from packaging.version import Version

from scripts.patchset.choice import ALWAYS
from scripts.patchset.registry import Fix, Registry
from scripts.patchset.series import carried_releases
from scripts.project import REPORTS, ROOT, project
from scripts.prove.status import HAVING, Cell, State
from scripts.system.files import replacing
from scripts.system.git import Repository
from scripts.wheel.names import patched_version

OSV = REPORTS / "osv"
OPENVEX = REPORTS / "openvex.json"

OSV_SCHEMA = "1.7.0"
OPENVEX_CONTEXT = "https://openvex.dev/ns/v0.2.0"
PREFIX = "KVFIX"
"""Of the ids. OSV's schema knows the databases by their prefixes, and this is none of them."""

SOURCES = ("patches", "records/proofs", "vllm_overlay", "tests", "scripts", "pyproject.toml")
"""What the cells are made from."""

_ID = uuid.uuid5(uuid.NAMESPACE_URL, "pkg:pypi/vllm-kvfix").urn
_NOT_THERE = (State.NOT_AFFECTED, State.UPSTREAM)

Cells = Mapping[str, Mapping[str, Cell]]  # release → fix → cell


@dataclass(frozen=True)
class Edition:
    """Which state of the repository is told of.

    Attributes:
        modified: When its sources were last committed, as `2026-01-31T12:00:00Z`.
        number: How many commits they had, counted from 1.
    """

    modified: str
    number: int


def edition(folder: Path = ROOT) -> Edition | None:
    """Return what the history of `folder` says; None where it has none, or not all of it.

    Raises:
        GitError: Git is not there, or the repository is broken.
    """
    if not (folder / ".git").exists():
        return None
    repository = Repository(folder)
    if repository.run("rev-parse", "--is-shallow-repository").strip() == "true":
        return None
    times = repository.run("log", "--format=%ct", "--", *SOURCES).split()
    if not times:
        return None
    # A commit may be older than the one before it, by a clock that was wrong or a rebase.
    at = datetime.fromtimestamp(max(map(int, times)), timezone.utc)
    return Edition(at.strftime("%Y-%m-%dT%H:%M:%SZ"), len(times))


def write_advisories(cells: Cells, registry: Registry, told: Edition) -> list[Path]:
    """Write `reports/osv/<id>.json` and `reports/openvex.json`; remove what says nothing any more.

    Returns:
        Where they are: OpenVEX has no document without a statement.
    """
    records = osv_records(cells, registry, told.modified)
    documents = {OSV / f"{name}.json": record for name, record in records.items()}
    vex = openvex(cells, registry, carried_releases(), told)
    if vex["statements"]:
        documents[OPENVEX] = vex
    OSV.mkdir(parents=True, exist_ok=True)
    for path in (*OSV.glob(f"{PREFIX}-*.json"), OPENVEX):
        if path not in documents:
            path.unlink(missing_ok=True)
    for path, document in documents.items():
        with replacing(path) as file:
            file.write((json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    return [OSV, OPENVEX] if OPENVEX in documents else [OSV]


def osv_id(fix: Fix) -> str:
    """Return the id of the record of `fix`."""
    return f"{PREFIX}-{fix.id}"


def osv_records(cells: Cells, registry: Registry, modified: str) -> dict[str, dict[str, Any]]:
    """Return the record of each fix whose defect some release has, by its id.

    `ALWAYS` has none: what it is about comes with patched engines, and no stock one has it.

    Args:
        cells: The matrix, oldest release first.
        registry: The fixes.
        modified: When what is told was last changed, UTC.
    """
    return {
        osv_id(fix): _record(
            fix, {release: row[fix.id] for release, row in cells.items()}, modified
        )
        for fix in registry.fixes.values()
        if fix.id != ALWAYS and any(row[fix.id].state in HAVING for row in cells.values())
    }


def _record(fix: Fix, row: Mapping[str, Cell], modified: str) -> dict[str, Any]:
    events = ranges({release: cell.state for release, cell in row.items()})
    record: dict[str, Any] = {
        "schema_version": OSV_SCHEMA,
        "id": osv_id(fix),
        "modified": modified,
        "summary": fix.headline,
        "details": f"{_line(fix.symptom)}\n\n{_line(fix.cause)}",
        "affected": [
            {
                "package": {"ecosystem": "PyPI", "name": "vllm", "purl": "pkg:pypi/vllm"},
                "ranges": [{"type": "ECOSYSTEM", "events": list(each)} for each in events],
                "versions": [release for release, cell in row.items() if cell.state in HAVING],
            }
        ],
        "database_specific": {
            "fix": fix.id,
            "title": fix.title,
            "security": fix.security,
            "releases": {
                release: {"state": cell.state.value, "proven": cell.proven}
                for release, cell in row.items()
            },
        },
    }
    if fix.upstream_url:
        kind = "FIX" if fix.upstream_status == "Backport" else "REPORT"
        record["references"] = [{"type": kind, "url": fix.upstream_url}]
    return record


def ranges(states: Mapping[str, State]) -> list[tuple[dict[str, str], ...]]:
    """Return the events of each range of releases that have a defect.

    A range ends with `fixed` where the next release is known not to have the defect, and with
    `last_affected` where nothing is known of it. The last one stays open where the newest release
    has the defect: no later one is known to be without it. OSV's schema lets no range have both
    ends, so each has its own events.

    Args:
        states: Where the fix stands, by release, oldest first.
    """
    found: list[tuple[dict[str, str], ...]] = []
    first = last = ""
    for release, state in states.items():
        if state in HAVING:
            first, last = first or release, release
        elif first:
            end = {"fixed": release} if state in _NOT_THERE else {"last_affected": last}
            found.append(({"introduced": first}, end))
            first = ""
    if first:
        found.append(({"introduced": first},))
    return found


def openvex(
    cells: Cells, registry: Registry, carried: Sequence[str], told: Edition
) -> dict[str, Any]:
    """Return the document on the patched wheels of the releases that are `carried`.

    Args:
        cells: The matrix.
        registry: The fixes.
        carried: The releases for which a patched wheel can be built.
        told: The state of the repository that the cells are of.
    """
    statements = [
        statement
        for fix in registry.fixes.values()
        if fix.security
        for statement in _statements(fix, cells, carried)
    ]
    return {
        "@context": OPENVEX_CONTEXT,
        "@id": _ID,
        "author": registry.author,
        "timestamp": told.modified,
        "version": told.number,
        "statements": statements,
    }


def _statements(fix: Fix, cells: Cells, carried: Sequence[str]) -> list[dict[str, Any]]:
    """Return a statement for each thing that can be said of some builds."""
    groups: dict[str, tuple[dict[str, str], list[str]]] = {}
    for release in sorted(carried, key=Version):
        said = _verdict(fix, release, cells[release][fix.id])
        groups.setdefault(json.dumps(said), (said, []))[1].append(release)
    return [
        {
            "vulnerability": {
                "name": osv_id(fix),
                "description": f"{fix.headline}. A client can {fix.security}",
            },
            "products": [_product(release) for release in releases],
            **said,
        }
        for said, releases in groups.values()
    ]


def _verdict(fix: Fix, release: str, cell: Cell) -> dict[str, str]:
    """Return the status of the patched build of `release`, and what OpenVEX asks for beside it.

    What the tests have not shown of today's code is neither fixed nor absent: it is looked into.
    """
    if cell.state is State.OPEN:
        why = fix.unpatched_on(release) or "there is no patch yet"
        return {"status": "affected", "action_statement": f"No patch there: {why}."}
    if cell.state is State.UNPROVEN or not cell.proven:
        note = f"Not shown of today's code: {cell.state.value}"
        return {"status": "under_investigation", "status_notes": note}
    if cell.state in _NOT_THERE:
        return {"status": "not_affected", "justification": "vulnerable_code_not_present"}
    left = [one.reason for one in fix.unpatched if one.tests and one.holds(release)]
    actions = [*(f"A part has no patch there: {why}." for why in left), fix.security_action]
    if action := " ".join(filter(None, actions)):
        return {"status": "affected", "action_statement": action}
    return {"status": "fixed"}


def _product(release: str) -> dict[str, Any]:
    # Imported here, as in scripts/wheel/sbom.py: few commands need it.
    from packageurl import PackageURL

    version = str(patched_version(Version(release), project().version))
    purl = PackageURL(type="pypi", name="vllm", version=version).to_string()
    return {"@id": purl, "identifiers": {"purl": purl}}


def _line(text: str) -> str:
    return " ".join(text.split())
