"""`nox -s soak -- [RELEASE]`: what takes too long for `nox -s tests`, on stock and on patched.

    nox -s soak                               all parts, on the release with the newest code
    nox -s soak -- 0.20.2 --part strangers    one of them

- receive: the receive's state machine for 100,000 steps
- strangers: 10,000 requests that name 10,000 peers which do not answer
- hostile: 10,000 bodies, handshakes and notifications of hostile clients and peers; `--seed`

What a part finds on patched it first has to miss on stock: a check that finds nothing there would
be worth nothing. docs/security.md has the figures that are printed.
"""

from __future__ import annotations

import os

from scripts.project import ROOT, project, supported_release
from scripts.prove.environment import Environment
from scripts.prove.pytest import start_pytest
from scripts.system.console import entry, err, parser_of
from scripts.system.errors import CheckFailedError
from scripts.wheel.build import patched_wheel

_TESTS = ROOT / "tests" / "soak"
_PARTS = {part: _TESTS / f"test_{part}.py" for part in ("receive", "strangers", "hostile")}


def main() -> None:
    """Run both sides in one environment."""
    parser = parser_of("soak", __doc__)
    parser.add_argument("release", nargs="?", default=project().releases[-1])
    parser.add_argument("--part", choices=_PARTS, action="append")
    parser.add_argument("--seed", default="0", help="of the hostile cases")
    options = parser.parse_args()
    release = supported_release(options.release)
    os.environ["KVFIX_SEED"] = options.seed
    environment = Environment(release).make()
    wheels = {"stock": environment.stock, "patched": patched_wheel(release)}
    files = [str(_PARTS[part]) for part in options.part or _PARTS]
    failed = []
    for side in wheels:  # as the names of its tests say
        err.print(f"{release}: {side} ...")
        environment.install(wheels[side])
        if start_pytest(environment, ["-s", "-k", side, *files], stream=True).returncode:
            failed.append(side)
    if failed:
        raise CheckFailedError(
            f"{release}: {' and '.join(failed)} did otherwise than known",
            expected="what is wrong found on stock, and nothing on patched",
            next_step="read what it printed above",
        )


if __name__ == "__main__":
    entry(main)
