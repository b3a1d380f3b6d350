"""`nox -s push -- [RELEASE...]`: which defects a release has where P pushes, stock and patched.

Runs tests/push on the stock and on the patched files of each release from 0.24.0 on, side by side
in one environment. A test that names the releases on which kvfix mends its defect has to fail on
stock and pass on patched there. None may pass on stock and fail on patched. Of the others nobody
claims anything: what is seen goes on record (records/push.json), and with it into docs/push.md.
"""

from __future__ import annotations

from scripts.project import supported_release
from scripts.prove.push import PAGE, RECORD, all_shown, judge, observe, record, releases, write_page
from scripts.system.console import entry, err, parser_of
from scripts.system.errors import CheckFailedError, UsageError


def main() -> None:
    """Run the releases that the command line names, or all that have such a connector."""
    parser = parser_of("push", __doc__)
    parser.add_argument("release", nargs="*", help="from 0.24.0 on; all of these if none is named")
    named = [supported_release(one) for one in parser.parse_args().release]
    if without := [one for one in named if one not in releases()]:
        raise UsageError(
            f"vLLM {without[0]} has no connector that pushes",
            expected=f"some of {', '.join(releases())}",
            next_step=f"nox -s push -- {releases()[-1]}",
        )
    faults: list[str] = []
    failed: list[str] = []
    for release in named or releases():
        seen, wrong = judge(release, all_shown(), observe(release))
        faults += wrong
        failed += [release] if wrong else []
        record(release, seen)
        write_page()
        mended = sum(sides == {"stock": "failed", "patched": "passed"} for sides in seen.values())
        left = sum(sides["patched"] == "failed" for sides in seen.values())
        err.print(f"{release}: {len(seen)} tests: {mended} fail on stock alone, {left} on both")
    err.print(f"{RECORD.name}, {PAGE.name} written")
    for fault in faults:
        err.print(f"✗ {fault}", markup=False)
    if faults:
        raise CheckFailedError(
            "a test shows something else than it says, or nothing",
            expected="each with `mends` failing on stock and passing on patched where that says "
            "so, and none failing on patched alone",
            next_step="read tests/push and what is listed above, then: "
            f"nox -s push -- {' '.join(failed)}",
        )


if __name__ == "__main__":
    entry(main)
