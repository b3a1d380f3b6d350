"""`nox -s soak -- [RELEASE]`: the receive's state machine for 100,000 steps on the patched worker.

The same machine first has to find the known race on the stock worker; a checker that finds
nothing there would be worth nothing. Takes the release with the newest code, unless one is named.
"""

from __future__ import annotations

from scripts.project import ROOT, project, supported_release
from scripts.prove.environment import Environment
from scripts.prove.pytest import start_pytest
from scripts.system.console import entry, err, parser_of
from scripts.system.errors import CheckFailedError
from scripts.wheel.build import patched_wheel

_TESTS = ROOT / "tests" / "soak" / "test_receive.py"
_SIDES = {
    "stock": "test_the_machine_finds_the_race_of_the_stock_worker",
    "patched": "test_the_patched_worker_keeps_every_promise",
}


def main() -> None:
    """Run both sides in one environment."""
    parser = parser_of("soak", __doc__)
    parser.add_argument("release", nargs="?", default=project().releases[-1])
    release = supported_release(parser.parse_args().release)
    environment = Environment(release).make()
    wheels = {"stock": environment.stock, "patched": patched_wheel(release)}
    failed = []
    for side, test in _SIDES.items():
        err.print(f"{release}: {side} ...")
        environment.install(wheels[side])
        result = start_pytest(environment, ["-s", f"{_TESTS}::{test}"], stream=True)
        if result.returncode:
            failed.append(side)
    if failed:
        raise CheckFailedError(
            f"{release}: the machine says otherwise of {' and '.join(failed)}",
            expected="the race found on stock, and nothing on patched",
            next_step="read the steps that it printed above",
        )


if __name__ == "__main__":
    entry(main)
