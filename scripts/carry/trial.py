"""What would become of each fix on a release, by its text and by what is on record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from packaging.version import Version

from scripts.carry.merge import CARRIED, Carried, How, Status
from scripts.carry.sides import Sides
from scripts.carry.state import Result
from scripts.patchset.registry import Fix, Registry
from scripts.patchset.series import Series, carried_releases
from scripts.prove.stock import Stock
from scripts.system.errors import NotCarriedError
from scripts.upstream.history import Upstream


def neighbours(release: str, source: str | None = None) -> list[str]:
    """Return the releases whose fixes may be carried to `release`: the nearest below and above.

    Args:
        release: A pinned release.
        source: The one release that is to be taken instead.

    Raises:
        NotCarriedError: The fixes were not carried to `source`, or to no other release at all.
    """
    carried = [one for one in carried_releases() if one != release]
    below = [one for one in carried if Version(one) < Version(release)]
    above = [one for one in carried if Version(one) > Version(release)]
    found = [*below[-1:], *above[:1]] if source is None else [source]
    if not found or source not in (None, *carried_releases()):
        raise NotCarriedError(
            f"no fixes were carried to {source or 'any other release'}",
            expected=f"one of {', '.join(carried) or '(there is none)'}",
            next_step=f"nox -s rebase -- {release}",
        )
    return found


def without_carrying(fix: Fix, release: str, stock: Stock) -> Result | None:
    """Return the result for a fix that `release` does not need, or is not to have; else None.

    Only tests that pass on the stock release show that; the registry's word counts as long as
    they do not contradict it, and the regression tests ask once more before anything lands.
    """
    if stock is Stock.PASSES:
        status = Status.UPSTREAM if fix.affects(release) else Status.NOT_AFFECTED
        return Result(fix.id, status, stock)
    if reason := fix.unpatched_on(release):
        return Result(fix.id, Status.SKIPPED, stock, (reason,))
    if not fix.affects(release) and stock in (Stock.UNKNOWN, Stock.NOT_RUN):
        hint = f"fixes.toml: applies to {fix.applies_to}"
        return Result(fix.id, Status.NOT_AFFECTED, stock, (hint,))
    return None


def mentions(releases: Upstream, fix: Fix, one: str, other: str) -> list[str]:
    """Return the commits between two releases, in either order, that name the fix's own."""
    return releases.mentions(fix.upstream_pr, *sorted((one, other), key=Version))


def remarks(one: Carried) -> Iterator[str]:
    """Yield what a person should know of hunks that were not carried as they are."""
    for hunk in one.hunks:
        if hunk.how not in (How.EXACT, How.MOVED) and "\n" not in hunk.said:
            yield f"{hunk.path}, hunk {hunk.number}: {hunk.said}"


@dataclass(frozen=True)
class Trial:
    """What would become of each fix, and the new texts, by path, of all that were carried.

    `hunks` counts what became of the hunks of those that were merged, whatever came out.
    """

    results: list[Result]
    texts: dict[str, str]
    hunks: Counter[How]

    @property
    def exact(self) -> int:
        """How many hunks apply exactly."""
        return self.hunks[How.EXACT] + self.hunks[How.MOVED]

    @property
    def carried(self) -> int:
        """How many fixes were carried."""
        return sum(result.status in CARRIED for result in self.results)


@dataclass(frozen=True)
class Start:
    """The series that fixes are carried from, the preferred one first.

    Attributes:
        series: One for each release.
        trials: What would become of all fixes from each alone; none where there is one only.
    """

    series: tuple[Series, ...]
    trials: tuple[Trial, ...] = ()

    @property
    def why(self) -> str:
        """Which release is preferred, and why."""
        first = f"from {self.series[0].release}"
        said = [
            f"from {series.release} {trial.exact} of {trial.hunks.total()} hunks apply exactly, "
            f"{trial.hunks[How.MERGED]} merge"
            for series, trial in zip(self.series, self.trials, strict=False)
        ]
        return f"{first}: {'; '.join(said)}" if said else first


def start_of(
    releases: Upstream,
    sources: Sequence[Series],
    release: str,
    registry: Registry,
    said: Mapping[str, Stock],
) -> Start:
    """Return where to start: more hunks of what is needed apply exactly, then more merge.

    Args:
        releases: Where all of these releases are.
        sources: What can be carried; the first is taken where both are as good.
        release: The release that fixes are carried to.
        registry: What is known of the fixes.
        said: What tests have said of the stock release, by fix.
    """
    if len(sources) == 1:
        return Start((*sources,))
    tried = [(one, try_all(releases, [one], release, registry, said)) for one in sources]
    tried.sort(key=lambda pair: (pair[1].exact, pair[1].hunks[How.MERGED]), reverse=True)
    return Start(tuple(series for series, _ in tried), tuple(trial for _, trial in tried))


def try_all(
    releases: Upstream,
    sources: Sequence[Series],
    release: str,
    registry: Registry,
    said: Mapping[str, Stock],
) -> Trial:
    """Return what would become of each fix of `sources` on `release`; nothing is written.

    A fix that needs a person counts as left out for those after it.

    Args:
        releases: Where all of these releases are.
        sources: What is carried, the preferred release first.
        release: The release that they are carried to.
        registry: What is known of the fixes.
        said: What tests have said of the stock release, by fix.
    """
    repository, target = releases.repository, releases.tag(release)
    texts: dict[str, str] = {}
    tags = {one.release: releases.tag(one.release) for one in sources}
    sides = Sides(sources, lambda one, path: repository.read(tags[one], path) or "")
    results = []
    hunks: Counter[How] = Counter()

    @cache
    def stock_of_target(path: str) -> str | None:
        return repository.read(target, path)

    def ours(path: str) -> str | None:
        return texts[path] if path in texts else stock_of_target(path)

    for fix in sides.fixes(registry):
        result = without_carrying(fix, release, said[fix.id])
        if result is None:
            source, one = sides.carry(fix, ours, repository, target, looking=False)
            result = judged(releases, fix, release, source, one, said[fix.id])
            hunks.update(hunk.how for hunk in one.hunks)
            if not result.status.stops:
                texts |= one.texts
        sides.add(fix, carried=result.status in (*CARRIED, Status.RESOLVED))
        results.append(result)
    return Trial(results, texts, hunks)


def judged(
    releases: Upstream, fix: Fix, release: str, source: str, one: Carried, stock: Stock
) -> Result:
    """Return the result for a fix that was carried by text, from `source`."""
    hints = (*mentions(releases, fix, source, release), *remarks(one))
    if stock is Stock.MIXED:
        hints = (f"by its text: {one.status.value}", *hints)
        return Result(fix.id, Status.PARTLY, stock, hints, source)
    return Result(fix.id, one.status, stock, hints, source)
