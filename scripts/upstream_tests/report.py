"""What `nox -s upstream_tests` says: a table, JSON, Markdown for a CI job page, and JUnit XML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as Xml

from rich.table import Table

from scripts.project import project
from scripts.prove.outcomes import Outcome, Outcomes
from scripts.system.files import replacing
from scripts.upstream_tests.compare import Change, is_named, reason, said
from scripts.upstream_tests.side import Side

_QUIET = (Change.STILL_PASSING, Change.SKIPPED_IN_BOTH)  # reported by their names only


@dataclass(frozen=True)
class Report:
    """What one run has found.

    Attributes:
        release: The vLLM release whose tests ran.
        selection: Which of them, in words.
        whole: Whether these are all the recommended ones.
        left_out: Tests of the selected files that were not run, and why.
        sides: Stock, and patched where the fixes were carried to the release.
        outcomes: By side and test id; forward tests among them.
        changes: What became of each test of the release's own; empty for stock alone.
        names: The tests that rightly fail with a fix, and why.
        forward: What `upstream_forward` says of each test of later releases.
        faults: What must not be.
    """

    release: str
    selection: str
    whole: bool
    left_out: Mapping[str, str]
    sides: tuple[Side, ...]
    outcomes: Mapping[str, Outcomes]
    changes: Mapping[str, Change]
    names: Mapping[str, str]
    forward: Mapping[str, dict[str, str]] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    def own(self, side: str) -> Outcomes:
        """Return the outcomes of the release's own tests on one side."""
        return {t: one for t, one in self.outcomes[side].items() if t not in self.forward}

    def counts(self) -> dict[str, int]:
        """Return how many tests there are of each change, or of each result on stock alone."""
        if len(self.sides) == 1:
            results = [outcome.result for outcome in self.own("stock").values()]
            return {result: results.count(result) for result in sorted({*results})}
        changes = list(self.changes.values())
        counts = {change.value: changes.count(change) for change in Change}
        rightly = [test for test in self.changes if is_named(test, self.names)]
        failing = [self.changes[test] for test in rightly].count(Change.NEWLY_FAILING)
        return {**counts, "newly failing as fixes.toml says": failing}

    def notable(self) -> dict[str, dict[str, str]]:
        """Return what there is to say of each test that does not simply pass or skip."""
        notes: dict[str, dict[str, str]] = {}
        for test in sorted({t for side in self.sides for t in self.own(side.name)}):
            change = self.changes.get(test)
            both = {side.name: self.outcomes[side.name].get(test) for side in self.sides}
            bad = [one for one in both.values() if one and one.result in ("failed", "error")]
            if change in _QUIET or (change is None and not bad):
                continue
            note = {"change": change.value} if change else {}
            note |= {name: one.result if one else "absent" for name, one in both.items()}
            if bad:
                note |= {"reason": reason(bad[-1]), "said": said(bad[-1])}
            if is_named(test, self.names):
                note["named"] = next(self.names[n] for n in self.names if is_named(test, [n]))
            notes[test] = note
        return notes


def table(report: Report) -> Table:
    """Return the table for people."""
    sides = " against ".join(f"{side.name} {side.version}" for side in report.sides)
    shown = Table("tests", "number", title=f"vLLM {report.release}: {report.selection}, {sides}")
    for name, number in report.counts().items():
        shown.add_row(name, str(number))
    for name, number in _reasons(report).items():
        shown.add_row(f"  failing: {name}", str(number))
    for name, number in _forward_counts(report).items():
        shown.add_row(f"of later releases: {name}", str(number))
    return shown


def _reasons(report: Report) -> dict[str, int]:
    failing = [
        note["reason"]
        for note in report.notable().values()
        if "reason" in note and note.get("change", "") in ("", Change.FAILING_IN_BOTH.value)
    ]
    return {name: failing.count(name) for name in sorted({*failing})}


def _forward_counts(report: Report) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in report.forward.values():
        name = f"{one['stock']} on stock"
        if "patched" in one:
            name += f", {one['patched']} on patched"
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def write(report: Report, folder: Path) -> list[Path]:
    """Write all files of a report into `folder` and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"upstream-tests-{report.release}"
    texts = {f"{name}.json": _json(report), f"{name}.md": _markdown(report)}
    texts |= {f"{name}-{side.name}.xml": _junit(report, side) for side in report.sides}
    for file, text in texts.items():
        with replacing(folder / file) as target:
            target.write(text.encode())
    return [folder / file for file in texts]


def _json(report: Report) -> str:
    own = report.changes or {t: Change.STILL_PASSING for t, o in report.own("stock").items()
                             if o.result == "passed"}  # fmt: skip
    document = {
        "release": report.release,
        "patch_set": project().version,
        "selection": report.selection,
        "left_out": report.left_out,
        "wheels": {
            side.name: {"version": side.version, "file": side.wheel.name, "sha256": side.sha256}
            for side in report.sides
        },
        "counts": report.counts(),
        "failing": _reasons(report),
        "notable": report.notable(),
        "forward": report.forward,
        "faults": list(report.faults),
        "passing": sorted(t for t, change in own.items() if change is Change.STILL_PASSING),
        "skipped": {
            test: said(one)
            for test, one in sorted(report.own(report.sides[-1].name).items())
            if one.result == "skipped"
        },
    }
    return json.dumps(document, indent=1) + "\n"


def _markdown(report: Report) -> str:
    versions = " and ".join(f"{side.name} `{side.version}`" for side in report.sides)
    lines = [
        f"# Upstream's own tests, vLLM {report.release}",
        f"{report.selection[0].upper()}{report.selection[1:]}; {versions}; no GPU.",
        "",
        "| tests | number |",
        "|---|---|",
        *(f"| {name} | {number} |" for name, number in report.counts().items()),
        *(f"| failing: {name} | {number} |" for name, number in _reasons(report).items()),
    ]
    if report.faults:
        lines += ["", "## Faults", *(f"- {fault}" for fault in report.faults)]
    notable = report.notable()
    if notable:
        columns = [side.name for side in report.sides]
        lines += ["", "## Not simply passing", f"| test | {' | '.join(columns)} | what it says |"]
        lines.append(f"|---|{'---|' * len(columns)}---|")
        for test, note in notable.items():
            cells = [note[name] for name in columns]
            why = note.get("named") or f"{note.get('reason', '')}: {note.get('said', '')}"
            lines.append(f"| `{_short(test)}` | {' | '.join(cells)} | {_cell(why)} |")
    if report.forward:
        lines += ["", "## Tests of later releases", "| fix | test | from | stock | patched |"]
        lines.append("|---|---|---|---|---|")
        for test, one in report.forward.items():
            lines.append(
                f"| {one['fix']} | `{_short(test)}` | {one['from']} | {one['stock']} "
                f"{_cell(one.get('said', ''))} | {one.get('patched', '-')} |"
            )
    return "\n".join(lines) + "\n"


def _short(test: str) -> str:
    return test.rpartition("/")[2].replace("|", "\\|")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").strip(": ")


def _junit(report: Report, side: Side) -> str:
    """Return one side's outcomes as JUnit XML, as CI systems read it."""
    outcomes = report.outcomes[side.name]
    kinds = {"failed": "failures", "error": "errors", "skipped": "skipped"}
    results = [outcome.result for outcome in outcomes.values()]
    numbers = {attribute: str(results.count(result)) for result, attribute in kinds.items()}
    name = f"vLLM {side.version}, {side.name}"
    suite = Xml.Element("testsuite", {"name": name, "tests": str(len(results)), **numbers})
    for test, outcome in outcomes.items():
        path, _, name = test.partition("::")
        case = Xml.SubElement(
            suite, "testcase", classname=path.removesuffix(".py").replace("/", "."), name=name
        )
        _add_result(case, outcome)
    root = Xml.Element("testsuites")
    root.append(suite)
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_result(case: Xml.Element, outcome: Outcome) -> None:
    tag = {"failed": "failure", "error": "error", "skipped": "skipped"}.get(outcome.result)
    if tag:
        # What XML cannot hold: control characters, such as those of coloured output.
        message = "".join(c if c.isprintable() or c in "\n\t" else " " for c in outcome.message)
        element = Xml.SubElement(case, tag, message=message[:1000])
        element.text = outcome.place
