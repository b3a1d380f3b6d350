"""`nox -s upstream_tests`: upstream's own tests, stock against patched, without a GPU.

    nox -s upstream_tests                        the recommended tests of the default release
    nox -s upstream_tests -- 0.22.0              a release that was not carried to: stock alone
    nox -s upstream_tests -- 0.20.2 -k handshake what pytest's -k selects of them
    nox -s upstream_tests -- 0.20.2 tests/v1/kv_connector/unit   files or folders instead
    nox -s upstream_tests -- 0.20.2 --affected   every test file that imports what we change
    nox -s upstream_tests -- 0.20.2 --resume     go on after Ctrl-C

It also runs the tests that later releases have for our fixes (fixes.toml, forward-test). The
report goes to reports/, or below .work/ for anything but the recommended tests.
"""

from __future__ import annotations

import argparse
import resource
import time

from packaging.version import InvalidVersion, Version

from scripts.project import REPORTS, project
from scripts.system.console import entry, err, out, parser_of
from scripts.system.errors import CheckFailedError, UsageError
from scripts.upstream.lock import locked_release
from scripts.upstream_tests.report import table, write
from scripts.upstream_tests.session import report_on
from scripts.upstream_tests.side import WORK, alone


def main() -> None:
    """Run what the command line asks for."""
    began = time.monotonic()
    options = _arguments()
    release = _release(options.release)
    with alone(release):
        report = report_on(options, release)
    out.print(table(report))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    out.print(f"took {time.monotonic() - began:.0f} s; {cpu:.0f} s on all cores together")
    for path in write(report, REPORTS if report.whole else WORK / release):
        out.print(f"wrote {path}", markup=False)
    for fault in report.faults:
        err.print(f"✗ {fault}", markup=False)
    if report.faults:
        raise CheckFailedError(
            f"{len(report.faults)} faults",
            expected="what passes on stock passes on patched, and later tests tell the two apart",
            next_step="see the report; -k runs what is named above on both sides again",
        )


def _arguments() -> argparse.Namespace:
    parser = parser_of("upstream_tests", __doc__)
    parser.add_argument("release", nargs="?", default=project().default_release)
    parser.add_argument("path", nargs="*", help="test files or folders of the release")
    parser.add_argument("-k", dest="expression", default="", metavar="EXPR", help="as pytest's")
    parser.add_argument(
        "--affected",
        nargs="?",
        type=int,
        const=1,
        metavar="STEPS",
        help="test files that import a file of the series by way of at most STEPS imports (1)",
    )
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run has done")
    return parser.parse_args()


def _release(text: str) -> str:
    """Return the pinned release that `text` names, whether or not the fixes were carried to it."""
    try:
        return locked_release(str(Version(text))).release
    except InvalidVersion:
        raise UsageError(
            f"{text!r} is no version",
            expected="a release first, then paths",
            next_step="nox -s upstream_tests -- 0.20.2 tests/v1/kv_connector/unit",
        ) from None


if __name__ == "__main__":
    entry(main)
