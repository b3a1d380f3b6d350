"""The part of `nox -s tests` that needs vLLM: tests/overlay on the installed patched wheel.

    nox -s tests                                       the tools' tests, then these
    nox -s tests -- tests/overlay -k handshake         takes what pytest takes
    nox -s tests -- --release 0.33.0 [tests/overlay -k handshake]   on another release

Without words for pytest all files are run, by several processes, which are forks of one that has
imported torch and transformers (tests/programs/forks.py).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts.project import ROOT, project, supported_release
from scripts.prove.environment import Environment
from scripts.prove.forks import run_in_forks
from scripts.prove.pytest import in_fork, start_pytest
from scripts.system.console import entry, err, out, parser_of
from scripts.system.errors import CheckFailedError
from scripts.wheel.build import patched_wheel

OVERLAY_TESTS = ROOT / "tests" / "overlay"
SHARES = 2 * (os.cpu_count() or 1)
"""Each process imports vLLM, 8 s of a core; fewer would wait with nobody to take over."""
_LIMIT = 1800.0  # seconds for a process, which needs half a minute; one that hangs is killed then


def main() -> None:
    """Build and install the patched wheel of a release, and test it."""
    release, words = arguments(sys.argv[1:])
    environment = Environment(release).make()
    environment.install(patched_wheel(release))
    if words:
        codes = [start_pytest(environment, words, stream=True).returncode]
    else:
        codes = _run_all(environment)
    if any(codes):
        again = sys.argv[1:] if words else [*sys.argv[1:], "tests/overlay"]
        raise CheckFailedError(
            f"pytest exited with {next(filter(None, codes))}",
            expected="every test passing",
            next_step=f"to stop at the first that fails: nox -s tests -- {shlex.join(again)} -x",
        )


def arguments(words: list[str]) -> tuple[str, list[str]]:
    """Return the release that is meant, and what is pytest's."""
    parser = parser_of("tests", __doc__)
    parser.allow_abbrev = False  # what looks like ours may be pytest's
    parser.add_argument("--release", default=project().default_release)
    options, rest = parser.parse_known_args(words)
    paths = [str(ROOT / word) if word.startswith("tests/") else word for word in rest]
    return supported_release(options.release), paths


def _run_all(environment: Environment) -> list[int]:
    """Run every file and return the exit codes; what the processes say is printed in turn."""
    shares = split(OVERLAY_TESTS.rglob("test_*.py"), SHARES)
    err.print(f"{environment.release}: tests/overlay in {len(shares)} processes ...")
    results = run_in_forks(environment, [in_fork(share) for share in shares], timeout=_LIMIT)
    for result in results:
        out.print(result.stdout + result.stderr, markup=False, end="")
    return [result.returncode for result in results]


def split(files: Iterable[Path], count: int) -> list[list[str]]:
    """Return the files in at most `count` shares of about the same length.

    What a file costs is guessed by its length; each goes to the share that has least by then.
    """
    sizes = {str(file): file.stat().st_size for file in files}
    shares: list[list[str]] = [[] for _ in range(min(count, len(sizes)))]
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        min(shares, key=lambda share: sum(map(sizes.__getitem__, share))).append(file)
    return shares


if __name__ == "__main__":
    entry(main)
