"""`nox -s verify -- WHEEL`: whether a patched wheel is the stock one with the series in it.

Three questions with one answer each. Does it differ from the stock wheel in exactly what the
series changes (`verify_against`)? Is the wheel what its RECORD says (`verify_record`)? Neither
trusts the code that writes wheels: members are hashed anew, and compared with the stock wheel's
compressed bytes where both lie. And is it, to the last field of the zip file, what `apply` would
write now (`first_difference`)? An installer may go by any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote

from scripts.patchset.registry import load_registry
from scripts.patchset.target import Target
from scripts.project import project
from scripts.system.console import err
from scripts.system.errors import (
    BrokenWheelError,
    CheckFailedError,
    HashMismatchError,
    NotLockedError,
    UsageError,
)
from scripts.system.files import sha256
from scripts.upstream.index import fetch
from scripts.upstream.lock import load_lock
from scripts.wheel.names import dist_info_folder, is_patched, patched_version, states_choice
from scripts.wheel.plan import plan_wheel
from scripts.wheel.reader import WheelReader
from scripts.wheel.record import verify_record
from scripts.wheel.sbom import SBOM_PATH, Sbom, read_sbom
from scripts.wheel.writer import first_difference, is_dropped, renamed
from scripts.wheel.zip import Member

ExpectedMembers = Callable[[WheelReader, Sbom], tuple[Mapping[str, bytes], Mapping[str, bytes]]]
"""From a stock wheel and what the patched one says of itself: what it must have replaced, by
path in the stock wheel, and added, by path in the patched one."""


def verify_against(
    stock: WheelReader,
    patched: WheelReader,
    *,
    changed: Mapping[str, bytes],
    added: Mapping[str, bytes],
) -> list[str]:
    """Return all places where `patched` is not `stock` with exactly these changes.

    Args:
        stock: The wheel that was patched.
        patched: The result.
        changed: Content of the changed files by their path in `stock`. RECORD, which follows
            from all others, is not among them: `verify_record` reads it.
        added: Content of the new files by their path in `patched`.
    """
    folder = dist_info_folder(patched.distribution, patched.version)
    faults = []
    if patched.dist_info != folder:
        faults.append(f"{patched.dist_info}: the folder should be called {folder}")
    expected_name = stock.file_name.with_version(patched.version)
    if str(expected_name) != patched.path.name:
        faults.append(f"{patched.path.name}: the file should be called {expected_name}")

    record = f"{stock.dist_info}/RECORD"
    kept = {
        renamed(stock, name, patched.dist_info): name
        for name in stock.members
        if not is_dropped(stock, name)
    }
    wanted = kept.keys() | added.keys()
    faults += [f"{name}: is missing" for name in wanted - patched.members.keys()]
    faults += [f"{name}: should not be there" for name in patched.members.keys() - wanted]
    for name in patched.members.keys() & wanted:
        source = kept.get(name)
        if source == record:
            continue
        if source is None:
            faults += _content_faults(patched, name, added[name])
        elif source in changed:
            faults += _content_faults(patched, name, changed[source])
            faults += _mode_faults(stock.members[source], patched.members[name])
        else:
            faults += _copy_faults(stock, source, patched, name)
    return sorted(faults)


def _content_faults(wheel: WheelReader, name: str, expected: bytes) -> list[str]:
    try:
        found = wheel.read(name)
    except BrokenWheelError as error:
        return [error.found]
    return [] if found == expected else [f"{name}: its content is not what the series makes of it"]


def _mode_faults(source: Member, copy: Member) -> list[str]:
    before, after = source.info.external_attr >> 16, copy.info.external_attr >> 16
    if before in (0, after):  # 0: zipped where there are no permission bits
        return []
    return [f"{copy.name}: has the mode {after:o}, in the stock wheel it is {before:o}"]


def _copy_faults(stock: WheelReader, source: str, patched: WheelReader, name: str) -> list[str]:
    old, new = stock.members[source], patched.members[name]
    fields = ("CRC", "file_size", "compress_size", "compress_type", "external_attr", "date_time")
    if any(getattr(old.info, field) != getattr(new.info, field) for field in fields):
        return [f"{name}: differs from the stock wheel, and no fix changes it"]
    pieces = zip(
        stock.chunks(old.data, old.data_end), patched.chunks(new.data, new.data_end), strict=True
    )
    if any(bytes(one) != bytes(other) for one, other in pieces):  # views compare slowly
        return [f"{name}: its compressed bytes are not those of the stock wheel"]
    return []


def _sizes(
    stock: WheelReader,
    patched: WheelReader,
    changed: Mapping[str, bytes],
    added: Mapping[str, bytes],
) -> dict[str, int]:
    """Return the size that each file of `patched` should have, but for RECORD, by its path."""
    sizes = {name: member.info.file_size for name, member in stock.members.items()}
    sizes.update((name, len(data)) for name, data in changed.items())
    renamed_sizes = {renamed(stock, name, patched.dist_info): size for name, size in sizes.items()}
    return renamed_sizes | {name: len(data) for name, data in added.items()}


def _bytes_fault(patched: WheelReader, at: int) -> str:
    where = (name for name, member in patched.members.items() if member.start <= at < member.end)
    return f"{next(where, 'the directory')}: byte {at} of the file is not what apply writes"


def stock_wheel(sbom: Sbom, given: Path | None) -> Path:
    """Return the wheel that a patched one was made from, by the hash that its SBOM states.

    Args:
        sbom: What the patched wheel says about itself.
        given: The file, for a build that is not pinned; None to look it up in the lock.

    Raises:
        HashMismatchError: `given` is another file.
        NotLockedError: No pinned wheel has that hash.
        UsageError: `given` cannot be read.
    """
    if given is not None:
        try:
            found = sha256(given)
        except OSError as error:
            raise UsageError(
                f"cannot read {given}: {error.strerror}",
                expected="the wheel that the patched one was made from",
                next_step="name a file that exists and that you may read",
            ) from error
        if found != sbom.ancestor_sha256:
            raise HashMismatchError(
                f"{given} has the sha256 {found}",
                expected=f"{sbom.ancestor_sha256}, which the patched wheel names as its source",
                next_step="give the wheel that it was made from: --stock FILE",
            )
        return given
    for release in load_lock().values():
        for file in release.wheels:
            if file.sha256 == sbom.ancestor_sha256:
                return fetch(file, distribution=sbom.ancestor_name)
    raise NotLockedError(
        f"no pinned wheel has the sha256 {sbom.ancestor_sha256}, which this one was made from",
        expected="a wheel that patches/upstream.lock names",
        next_step="for a build of your own, give it: --stock FILE",
    )


def verify(path: Path, given: Path | None, expected_members: ExpectedMembers) -> Sbom:
    """Check the patched wheel at `path` in full and return what it says about itself.

    Raises:
        CheckFailedError: It has faults; they are printed.
        BrokenWheelError: It is no sound wheel, or has no SBOM of kvfix.
        UsageError: It is no patched wheel, or cannot be read.
        HashMismatchError: The stock wheel that is given is not the one it was made from.
        NotLockedError: None is given, and none that is pinned is the one.
    """
    with WheelReader(path) as patched:
        if not is_patched(patched.version):
            raise UsageError(
                f"{path.name} is no patched wheel",
                expected="one that apply made: its version ends in +kvfix.<patch set>",
                next_step="give the file that apply names; to make one: nox -s apply",
            )
        sbom = read_sbom(patched.read(f"{patched.dist_info}/{SBOM_PATH}"))
        with WheelReader(stock_wheel(sbom, given)) as stock:
            changed, added = expected_members(stock, sbom)
            faults = verify_against(stock, patched, changed=changed, added=added)
            at = first_difference(
                stock, path, dist_info=patched.dist_info, replaced=changed, added=added
            )
            sizes = _sizes(stock, patched, changed, added)
        # What has another size than it should is a fault already, and may inflate to anything.
        faults += verify_record(
            patched,
            [n for n in patched.names if patched.members[n].info.file_size == sizes.get(n)],
        )
        if at is not None and not faults:
            faults.append(_bytes_fault(patched, at))
        says = (sbom.name, sbom.version)
        if says != (patched.distribution, str(patched.version)):
            faults.append(f"{SBOM_PATH}: speaks of {says[0]} {says[1]}")
    chosen = states_choice(patched.version)
    for fault in faults:
        err.print(fault, markup=False)
    if faults:
        raise CheckFailedError(
            f"{path.name} has {len(faults)} fault(s)",
            expected=f"{sbom.ancestor_name} {sbom.ancestor_version} with the series in it, no more",
            next_step=f"do not deploy it; build it again: nox -s apply -- {sbom.release}"
            + (f" --only {','.join(fix.id for fix in sbom.fixes)}" if chosen else "")
            + (f" --wheel {quote(str(given))}" if given else ""),
        )
    return sbom


def made_by_series(stock: WheelReader, sbom: Sbom) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return what the series of this checkout replaces in `stock` and adds to it.

    Raises:
        UsageError: The patched wheel carries another patch set than this checkout.
    """
    registry = load_registry()
    whole = Target.named(sbom.release, registry)
    inside = {fix.id for fix in sbom.fixes}.intersection(whole.series.fix_ids)
    target = whole.having(inside, registry)
    version = str(patched_version(stock.version, project().version, target.choice))
    if sbom.version != version:
        raise UsageError(
            f"the wheel is {sbom.version}, this checkout makes {version}",
            expected="the checkout that the wheel was made with",
            next_step="check out the tag of that patch set, then verify again",
        )
    plan = plan_wheel(stock, sbom.ancestor_sha256, target, registry)
    return plan.replaced, plan.added
