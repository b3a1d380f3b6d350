"""What would become of each fix on a release, by its text and by what is on record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from packaging.version import Version

from scripts.carry.merge import Carried, How, Source, Status, carry
from scripts.carry.state import Result
from scripts.patchset.registry import Fix, Registry
from scripts.patchset.series import Series, carried_releases
from scripts.prove.stock import Stock
from scripts.system.errors import NotCarriedError
from scripts.upstream.history import Upstream


def nearest(release: str, source: str | None = None) -> str:
    """Return the release whose fixes are carried to `release`.

    It is the newest with the same first two numbers, else the next one below, else the one above.

    Args:
        release: A pinned release.
        source: A release that is to be taken instead.

    Raises:
        NotCarriedError: The fixes were not carried to `source`, or to none at all.
    """
    carried = carried_releases()
    if source is None and carried:
        number = Version(release)
        own = [one for one in carried if Version(one).release[:2] == number.release[:2]]
        below = [one for one in carried if Version(one) < number]
        source = (own or below or carried[:1])[-1]
    if source is None or source not in carried:
        raise NotCarriedError(
            f"no fixes were carried to {source or 'any release'}",
            expected=f"one of {', '.join(carried) or '(there is none)'}",
            next_step=f"nox -s rebase -- {release}",
        )
    return source


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
    """What would become of each patch, and the new texts, by path, of all that were carried."""

    results: list[Result]
    texts: dict[str, str]


def try_all(
    releases: Upstream,
    series: Series,
    release: str,
    registry: Registry,
    said: Mapping[str, Stock],
) -> Trial:
    """Return what would become of each patch of `series` on `release`; nothing is written.

    A fix that needs a person counts as left out for those after it.

    Args:
        releases: Where both releases are.
        series: What is carried.
        release: The release that they are carried to.
        registry: What is known of the fixes.
        said: What tests have said of the stock release, by fix.
    """
    repository = releases.repository
    source = series.release
    stock, target = releases.tag(source), releases.tag(release)
    texts: dict[str, str] = {}
    before = Source(lambda path: repository.read(stock, path) or "")
    results = []

    @cache
    def stock_of_target(path: str) -> str | None:
        return repository.read(target, path)

    def ours(path: str) -> str | None:
        return texts[path] if path in texts else stock_of_target(path)

    for patch in series.patches:
        fix = registry.fix(patch.fix_id)
        result = without_carrying(fix, release, said[fix.id])
        if result is None:
            one = carry(patch, before.before(patch), ours, repository, target)
            hints = (*mentions(releases, fix, source, release), *remarks(one))
            status = Status.PARTLY if said[fix.id] is Stock.MIXED else one.status
            result = Result(fix.id, status, said[fix.id], hints)
            if not status.stops:
                texts |= one.texts
        before.add(patch, carried=result.status in _IN_TREE)
        results.append(result)
    return Trial(results, texts)


_IN_TREE = (Status.CARRIED, Status.OFFSETS, Status.MERGED, Status.RESOLVED)
