"""The registry: every fix once, in `patches/fixes.toml`.

What is common to all patches of a fix stands here and nowhere else: the commit message of each
commit, with its trailers, is made from it (`message`), and so are the README's matrix and the
wheel's provenance. And it says which of the releases that are carried get the fix (`needed_on`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from scripts.project import PATCHES, parse_toml
from scripts.system.errors import RegistryError

REGISTRY = PATCHES / "fixes.toml"
WIRE = ("none", "compatible: ", "breaks: ")
STATUSES = ("Backport", "Pending", "Submitted", "Inappropriate")
HEADLINE = 60
"""Characters that a headline may have: it is a row of the README's matrix."""

_ID = re.compile(r"[A-Z]?[0-9]+")
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")  # it becomes part of a folder's name
_PARAGRAPHS = {"symptom", "cause", "change", "risk"}
_PERSON = re.compile(r"[^<>\n]+ <[^<>\s]*>")
_PULL_REQUEST = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)#(?P<number>\d+)")


@dataclass(frozen=True)
class UpstreamTest:
    """A test of some releases' own that rightly fails once the fix is in, and why."""

    releases: str  # a PEP 440 specifier
    test: str
    reason: str


@dataclass(frozen=True)
class Spared:
    """Tests of ours that pass on the stock of some releases which need the fix, and why.

    They have another part of the defect: upstream has mended this one, or not yet brought it in.
    """

    releases: str  # a PEP 440 specifier
    tests: Sequence[str]
    reason: str


@dataclass(frozen=True)
class Unpatched:
    """Releases that have the defect and, on purpose, get no patch, and why.

    With `tests`, that holds only for what these of our tests are about; the rest has its patch.
    With `closed_by`, the patch of that fix closes the defect there, and nothing is left open.
    """

    releases: str  # a PEP 440 specifier
    reason: str
    tests: Sequence[str] = ()
    closed_by: str = ""

    def holds(self, release: str) -> bool:
        """Whether `release` is one of them."""
        return _includes(self.releases, release)


@dataclass(frozen=True)
class LaterTest:
    """A test that upstream wrote about the defect, later, and that runs on earlier releases.

    Attributes:
        release: The first release whose sdist holds it in this form.
        test: `path::name` in that sdist; `path::TestX::name`, or `path::test_x::name` for a
            function within a function, which upstream never runs.
        on: The earlier releases it runs on, a PEP 440 specifier.
        fails_with: How the first line of its failure on stock begins.
        passes_on_stock: Why it does not fail there, in place of `fails_with`.
        parameters: The ids of the parameters that are meant; empty for all.
        adapters: Fixtures of tests/programs/forward_adapters.py that it needs on these releases.
    """

    release: str
    test: str
    on: str
    fails_with: str = ""
    passes_on_stock: str = ""
    parameters: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()

    def runs_on(self, release: str) -> bool:
        """Whether it is meant to run on `release`."""
        return _includes(self.on, release)

    @classmethod
    def read(cls, table: dict[str, Any]) -> LaterTest:
        """Return what the `[[fix.forward-test]]` table `table` says.

        Raises:
            TypeError: A key is missing or unknown, or a value has the wrong form.
        """
        values = {key.replace("-", "_"): value for key, value in table.items()}
        for key in ("parameters", "adapters"):
            values[key] = tuple(_texts(key, values.get(key, [])))
        _texts("forward-test", [value for value in values.values() if not isinstance(value, tuple)])
        test = cls(**values)
        if bool(test.fails_with) == bool(test.passes_on_stock):
            raise TypeError(f"{test.test}: exactly one of fails-with and passes-on-stock")
        if "::" not in test.test:
            raise TypeError(f"{test.test}: names no function")
        try:
            Version(test.release)
            _includes(test.on, test.release)
        except ValueError as error:
            raise TypeError(f"{test.test}: {error}") from error
        return test


def _texts(key: str, values: object) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{key}: text and lists are mixed up")
    return values


_Row = TypeVar("_Row", UpstreamTest, Spared, Unpatched)


def _rows(kind: type[_Row], key: str, tables: object) -> list[_Row]:
    """Return what the `[[fix.<key>]]` tables `tables` say.

    Raises:
        TypeError: A key is missing or unknown, or a value has the wrong form.
    """
    rows = []
    for hyphenated in _tables(key, tables):
        table = {name.replace("-", "_"): value for name, value in hyphenated.items()}
        lists = [name for name in ("tests",) if name in table]
        for name in lists:
            _texts(name, table[name])
        _texts(key, [value for name, value in table.items() if name not in lists])
        row = kind(**table)
        try:
            _includes(row.releases, "0")
        except ValueError as error:
            raise TypeError(f"{key}: {error}") from error
        rows.append(row)
    return rows


def _tables(key: str, tables: object) -> list[dict[str, Any]]:
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise TypeError(f"{key} is no list of tables")
    return tables


@dataclass(frozen=True)
class Fix:
    """One defect and what is true once it is fixed.

    `headline` says in at most `HEADLINE` characters what happens without it; the README shows it.
    `applies_to` is a PEP 440 specifier over vLLM releases: those that have the defect.
    `fixed_in` is the first release that does not, or empty while none is proven.
    `wire_compat` says what changes between engines: `none`, `compatible: ` and what stock peers
    skip, or `breaks: ` and what they would misread; only then may the handshake's hash change.
    `tests` are pytest node ids that fail on an affected stock release and pass on a patched one.
    `security` goes on after "A client can", and is empty where the defect is no matter of security;
    `security_action` is what the operator of a patched build still has to do against that.
    """

    id: str
    slug: str
    headline: str
    title: str
    kind: str
    upstream_pr: str
    upstream_status: str
    applies_to: str
    fixed_in: str
    remove_when: str
    wire_compat: str
    tests: tuple[str, ...]
    depends_on: tuple[str, ...]
    symptom: str
    cause: str
    change: str
    risk: str
    upstream_tests: tuple[UpstreamTest, ...] = ()
    spared: tuple[Spared, ...] = ()
    unpatched: tuple[Unpatched, ...] = ()
    forward_tests: tuple[LaterTest, ...] = ()
    security: str = ""
    security_action: str = ""

    @property
    def name(self) -> str:
        """Name of the folder below `patches/` that holds its patches."""
        return f"{self.id}-{self.slug}"

    @property
    def upstream_url(self) -> str:
        """Page of the upstream pull request; empty where there is none."""
        match = _PULL_REQUEST.fullmatch(self.upstream_pr)
        return f"https://github.com/{match['repo']}/pull/{match['number']}" if match else ""

    def affects(self, release: str) -> bool:
        """Whether `release` has the defect, as far as the registry knows."""
        return _includes(self.applies_to, release)

    def spared_on(self, release: str) -> tuple[str, ...]:
        """Return those of our tests that pass on the stock of `release`, affected or not."""
        return tuple(
            test for one in self.spared if _includes(one.releases, release) for test in one.tests
        )

    def unpatched_on(self, release: str) -> str:
        """Return why `release`, which has the defect, gets no patch; empty where it gets one."""
        row = self._row_on(release)
        return row.reason if row else ""

    def needed_on(self, release: str) -> bool:
        """Whether `release`, once it is carried, gets a patch."""
        return self.affects(release) and not self._row_on(release)

    def closed_by(self, release: str) -> str:
        """Return the id of the fix whose patch closes the defect on `release`; empty for none."""
        if self.needed_on(release):
            return self.id
        row = self._row_on(release)
        return row.closed_by if row else ""

    def _row_on(self, release: str) -> Unpatched | None:
        """Return what says that `release`, which has the defect, gets no patch."""
        whole = (one for one in self.unpatched if not one.tests)
        rows = (one for one in whole if one.holds(release))
        return next(rows, None) if self.affects(release) else None

    def left_open_on(self, release: str) -> tuple[str, ...]:
        """Return those of our tests that say nothing of `release`, which has a patch otherwise."""
        return tuple(test for one in self.unpatched if one.holds(release) for test in one.tests)


@dataclass(frozen=True)
class Registry:
    """All fixes in the order in which they are applied, and who signs them off."""

    author: str
    fixes: dict[str, Fix]

    def fix(self, fix_id: str) -> Fix:
        """Return the fix that is called `fix_id`.

        Raises:
            RegistryError: There is none.
        """
        if fix_id not in self.fixes:
            raise RegistryError(
                f"{REGISTRY.name} has no fix {fix_id}, and a patch is for it",
                expected="a [[fix]] table for each patch",
                next_step=f"add it to patches/{REGISTRY.name}, then: nox -s lint",
            )
        return self.fixes[fix_id]

    def with_dependencies(self, ids: set[str]) -> set[str]:
        """Return `ids` and everything they depend on, directly or not."""
        closed: set[str] = set()
        pending = list(ids)
        while pending:
            fix_id = pending.pop()
            if fix_id not in closed:
                closed.add(fix_id)
                pending.extend(self.fixes[fix_id].depends_on)
        return closed

    def trailers(self, fix: Fix) -> tuple[tuple[str, str], ...]:
        """Return the trailers of `fix`, in order."""
        return (
            ("Fix", fix.id),
            ("Upstream-PR", fix.upstream_pr or "none"),
            ("Upstream-Status", fix.upstream_status),
            ("Applies-To", fix.applies_to),
            ("Fixed-In", fix.fixed_in or "unproven"),
            ("Remove-When", fix.remove_when),
            ("Wire-Compat", fix.wire_compat),
            *(("Test", test) for test in fix.tests),
            *(("Depends-On", other) for other in fix.depends_on),
            ("Signed-off-by", self.author),
        )

    def message(self, fix: Fix) -> str:
        """Return the commit message of `fix`: subject, symptom to risk, trailers."""
        paragraphs = [f"[kvfix {fix.id}] {fix.title}"]
        for label in ("symptom", "cause", "change", "risk"):
            words = f"{label.capitalize()}: {' '.join(getattr(fix, label).split())}"
            # Not broken at hyphens: an operator greps for `--kv-transfer-config` as it stands.
            paragraphs.append(
                textwrap.fill(words, 72, break_long_words=False, break_on_hyphens=False)
            )
        paragraphs.append("\n".join(f"{key}: {value}" for key, value in self.trailers(fix)))
        return "\n\n".join(paragraphs) + "\n"


def load_registry(path: Path = REGISTRY) -> Registry:
    """Read the registry.

    Raises:
        RegistryError: It contradicts itself; all contradictions are named at once.
    """
    author, fixes = _parsed(path.name, path.read_bytes())
    return Registry(author, dict(fixes))


@lru_cache(maxsize=4)  # each release's series asks for it
def _parsed(name: str, data: bytes) -> tuple[str, dict[str, Fix]]:
    faults: list[str] = []
    fixes: dict[str, Fix] = {}
    try:
        document = parse_toml(data)
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        document = {"author": "nobody <>"}
        faults.append(f"it is no TOML: {error}")
    author = document.get("author")
    if not isinstance(author, str) or not _PERSON.fullmatch(author) or not author.isprintable():
        faults.append("author is not of the form Name <address>")
    try:
        tables = _tables("fix", document.get("fix", []))
    except TypeError as error:
        tables = []
        faults.append(str(error))
    for table in tables:
        fix = _fix(table, faults)
        if fix is None:
            continue
        if fix.id in fixes:
            faults.append(f"fix {fix.id} stands twice")
        if any(other not in fixes for other in fix.depends_on):
            faults.append(f"fix {fix.id} depends on a fix that does not stand before it")
        if any(one.closed_by and one.closed_by not in fixes for one in fix.unpatched):
            faults.append(f"fix {fix.id} is closed by a fix that does not stand before it")
        fixes[fix.id] = fix
    if faults:
        raise RegistryError(
            f"{name}: " + "; ".join(faults),
            expected="one complete [[fix]] table for each fix, dependencies first",
            next_step=f"correct {name}, then: nox -s lint",
        )
    return str(author), fixes


def _includes(specifier: str, release: str) -> bool:
    return SpecifierSet(specifier).contains(release, prereleases=True)


@cache
def _kinds() -> dict[str, Any]:
    return get_type_hints(Fix)


def _fix(table: dict[str, Any], faults: list[str]) -> Fix | None:
    values = {key.replace("-", "_"): value for key, value in table.items()}
    name = values.get("id", "without an id")
    kinds = _kinds()
    try:
        if not _is_shown(table):
            raise TypeError("a text has characters that cannot be shown")
        values["upstream_tests"] = _rows(
            UpstreamTest, "upstream-test", values.pop("upstream_test", [])
        )
        values["spared"] = _rows(Spared, "spared", values.get("spared", []))
        values["unpatched"] = _rows(Unpatched, "unpatched", values.get("unpatched", []))
        later = _tables("forward-test", values.pop("forward_test", []))
        values["forward_tests"] = [LaterTest.read(one) for one in later]
        wrong = [
            field
            for field, value in values.items()
            if field in kinds and not isinstance(value, list if get_args(kinds[field]) else str)
        ]
        if wrong:
            raise TypeError(f"{', '.join(wrong)}: text and lists are mixed up")
        for field in {"tests", "depends_on"} & values.keys():
            _texts(field, values[field])
        lists = {field: tuple(values[field]) for field in values if isinstance(values[field], list)}
        fix = Fix(**{**values, **lists})
    except TypeError as error:
        faults.append(f"fix {name}: {error}")
        return None
    texts = {field for field, kind in kinds.items() if kind is str}
    empty = {"upstream_pr", "fixed_in", "security", "security_action"}
    faults += [f"fix {name}: {f} is empty" for f in sorted(texts - empty) if not getattr(fix, f)]
    # They become trailers, which end with their line.
    lines = {field: getattr(fix, field) for field in sorted(texts - _PARAGRAPHS)}
    lines.update((f"tests[{n}]", test) for n, test in enumerate(fix.tests))
    faults += [f"fix {name}: {f} is not one line" for f, line in lines.items() if "\n" in line]
    if not _ID.fullmatch(fix.id):
        faults.append(f"fix {name}: id is no number with, at most, a capital letter before it")
    if not _SLUG.fullmatch(fix.slug):
        faults.append(f"fix {name}: slug is not of small letters, digits and hyphens")
    if len(fix.headline) > HEADLINE:
        faults.append(f"fix {name}: headline has more than {HEADLINE} characters")
    if fix.upstream_status not in STATUSES:
        faults.append(f"fix {name}: upstream-status is none of {', '.join(STATUSES)}")
    if fix.wire_compat != WIRE[0] and not fix.wire_compat.startswith(WIRE[1:]):
        faults.append(f"fix {name}: wire-compat is not `none`, `compatible: …` or `breaks: …`")
    if fix.security_action and not fix.security:
        faults.append(f"fix {name}: security-action without security")
    if fix.upstream_pr and not fix.upstream_url:
        faults.append(f"fix {name}: upstream-pr is not of the form owner/repository#number")
    try:
        fix.affects("0")
    except ValueError:  # InvalidSpecifier, or more digits than an int takes
        faults.append(f"fix {name}: applies-to is no PEP 440 specifier")
    return fix


def _is_shown(value: object) -> bool:
    """Whether all texts in a table can be shown: they go to terminals, messages and pages."""
    if isinstance(value, dict):
        return all(map(_is_shown, (*value.keys(), *value.values())))
    if isinstance(value, list):
        return all(map(_is_shown, value))
    return not isinstance(value, str) or value.replace("\n", "").isprintable()
