"""What the mutants of a release say of the tests: who survived, and which of them may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from scripts.mutants.run import TOOLS, Row
from scripts.project import ROOT, read_toml
from scripts.system.errors import RegistryError

EQUIVALENT = ROOT / "tests" / "mutants.toml"
SHARE = 0.05
"""The part of the mutants that may survive without a reason of their own."""

_SURVIVED = ("survived", "not covered")
_KEYS = {"module", "function", "change", "why"}


@dataclass(frozen=True)
class Equivalent:
    """A mutant that no test can tell from the code, and why; `releases` is a PEP 440 specifier."""

    module: str
    function: str
    change: str
    why: str
    releases: str = ""

    def is_for(self, release: str) -> bool:
        """Whether it says something of `release`, or of the tools."""
        return release == TOOLS or SpecifierSet(self.releases).contains(release)


@dataclass
class Count:
    """The mutants of one module."""

    mutants: int = 0
    killed: int = 0
    hung: int = 0
    survived: int = 0
    not_covered: int = 0
    equivalent: int = 0


@dataclass(frozen=True)
class Verdict:
    """What came out of a run.

    Attributes:
        counts: By module; what ran on import counts nowhere.
        survivors: Those that are not named as equivalent.
        faults: What makes the session fail whatever the share.
    """

    counts: Mapping[str, Count]
    survivors: Sequence[Row]
    faults: Sequence[str]

    @property
    def total(self) -> Count:
        """All modules together."""
        total = Count()
        for count in self.counts.values():
            for name, value in vars(count).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    @property
    def share(self) -> float:
        """Which part of the mutants survived and is not named."""
        return len(self.survivors) / max(1, self.total.mutants)


def read_equivalents(path: Path = EQUIVALENT) -> list[Equivalent]:
    """Read which mutants are equivalent.

    Raises:
        RegistryError: A table has other keys, or names the same mutant as another.
    """
    tables = read_toml(path).get("equivalent", [])
    found: list[Equivalent] = []
    for table in tables:
        if not _KEYS <= table.keys() <= {*_KEYS, "releases"} or not table["why"].strip():
            raise RegistryError(
                f"{path}: a table has the keys {', '.join(sorted(table))}",
                expected=f"{', '.join(sorted(_KEYS))}, and releases where it is not for all",
                next_step="correct the table",
            )
        try:
            SpecifierSet(table.get("releases", ""))
        except InvalidSpecifier as error:
            raise RegistryError(
                f"{path}: {error}", expected="a PEP 440 specifier", next_step="correct it"
            ) from error
        found.append(Equivalent(**table))
    named = Counter((one.module, one.function, one.change, one.releases) for one in found)
    for (module, function, change, _), count in named.items():
        if count > 1:
            raise RegistryError(
                f"{path}: {module}, {function}: {change!r} is named {count} times",
                expected="each mutant once",
                next_step="remove the others",
            )
    return found


def judge(
    release: str, rows: Iterable[Row], equivalents: Iterable[Equivalent], *, whole: bool = True
) -> Verdict:
    """Say what the rows of a run come to; not `whole` is a run of some mutants only."""
    counts: dict[str, Count] = {}
    survivors: list[Row] = []
    named = {
        (one.module, one.function, one.change): one for one in equivalents if one.is_for(release)
    }
    faults: list[str] = []
    seen: dict[tuple[str, str, str], str] = {}
    modules = set()
    for row in rows:
        if "module" not in row:
            faults += [f"{test} fails without a mutant" for test in row.get("failing", ())]
            faults += [row["fault"]] if "fault" in row else ()
            continue
        modules.add(row["module"])
        count = counts.setdefault(row["module"], Count())
        key = (row["module"], row["function"], row["change"])
        seen[key] = row["verdict"]
        if row["verdict"] == "import":
            continue
        count.mutants += 1
        count.killed += row["verdict"] in ("killed", "hung")
        count.hung += row["verdict"] == "hung"
        count.survived += row["verdict"] == "survived"
        count.not_covered += row["verdict"] == "not covered"
        if row["verdict"] in _SURVIVED:
            if key in named:
                count.equivalent += 1
            else:
                survivors.append(row)
    faults += _stale(named, seen, modules) if whole else ()
    return Verdict(counts, survivors, faults)


def _stale(
    named: Mapping[tuple[str, str, str], Equivalent],
    seen: Mapping[tuple[str, str, str], str],
    modules: set[str],
) -> Iterator[str]:
    """Yield what is named as equivalent, of modules that were tried, and did not survive."""
    for key, one in named.items():
        if one.module in modules and seen.get(key) not in _SURVIVED:
            what = f"is {seen[key]}" if key in seen else "is no mutant any more"
            yield f"{EQUIVALENT.name}: {one.module}, {one.function}: {one.change!r} {what}"
