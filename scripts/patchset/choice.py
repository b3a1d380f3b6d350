"""Which of a release's fixes a build shall have: all of them, or what somebody has chosen.

A fix brings what it depends on, and nothing may be left out that another one needs. `ALWAYS` is in
every build: what would tell a patched engine from a stock one of the same release.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable

from scripts.patchset.registry import Registry
from scripts.patchset.series import Series
from scripts.system.errors import UsageError

ALWAYS = "K00"


def fix_ids(text: str) -> list[str]:
    """Return the ids that a word of a command line names, for argparse: K01,K05.

    Raises:
        argparse.ArgumentTypeError: It names none.
    """
    ids = [part.strip().upper() for part in text.split(",") if part.strip()]
    if not ids:  # as of a variable that is not set
        raise argparse.ArgumentTypeError("it names no fix; docs/fixes.md says which there are")
    return ids


def only(series: Series, ids: Collection[str], registry: Registry) -> Series:
    """Return the patches of `ids`, of what they depend on, and of `ALWAYS`.

    Raises:
        UsageError: One of them is not a fix for the release.
    """
    _require_known(series, ids)
    always = {ALWAYS} & {*series.fix_ids}
    return Series(series.release, series.only({*ids, *always}, registry))


def without(series: Series, ids: Collection[str], registry: Registry) -> Series:
    """Return all patches but those of `ids`.

    Raises:
        UsageError: One of them is not a fix for the release, or is needed by one that stays.
    """
    _require_known(series, ids)
    if ALWAYS in ids:
        raise UsageError(
            f"{ALWAYS} cannot be left out: {registry.fix(ALWAYS).title}, and a patched version "
            "that is compared as it stands splits a fleet",
            expected="any other fix",
            next_step=f"leave {ALWAYS} out of what you name",
        )
    left = [fix_id for fix_id in series.fix_ids if fix_id not in ids]
    needing = [
        fix_id for fix_id in left if not registry.with_dependencies({fix_id}).isdisjoint(ids)
    ]
    if needing:
        without_both = [fix_id for fix_id in series.fix_ids if fix_id in {*ids, *needing}]
        raise UsageError(
            f"{', '.join(needing)} cannot stand without {', '.join(sorted(ids))}",
            expected="that nothing that stays depends on what is left out",
            next_step=f"leave them out as well: nox -s apply -- {series.release} "
            f"--without {','.join(without_both)}",
        )
    return Series(series.release, series.only(left, registry))


def label(chosen: Series, whole: Series, registry: Registry) -> str:
    """Return what a version says of `chosen`: empty for all, or as in `only.k01` or `without.k10`.

    The same choice has the same label, whichever way it was asked for: the one with fewer ids,
    where `only` leaves unnamed what the named ones bring.
    """
    left_out = [fix_id for fix_id in whole.fix_ids if fix_id not in chosen.fix_ids]
    if not left_out:
        return ""
    brought = {need for fix_id in chosen.fix_ids for need in registry.fix(fix_id).depends_on}
    named = [fix_id for fix_id in chosen.fix_ids if fix_id not in {*brought, ALWAYS}]
    words = ("without", left_out) if len(left_out) <= len(named) else ("only", named)
    return ".".join([words[0], *(words[1] or [ALWAYS])]).lower()


def _require_known(series: Series, ids: Iterable[str]) -> None:
    if unknown := sorted({*ids} - {*series.fix_ids}):
        raise UsageError(
            f"vLLM {series.release} gets no fix called {', '.join(unknown)}",
            expected=f"some of {', '.join(series.fix_ids)}",
            next_step=f"nox -s apply -- {series.release} --list",
        )
