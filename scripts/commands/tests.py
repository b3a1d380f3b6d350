"""The part of `nox -s tests` that needs vLLM: tests/overlay on the installed patched wheel.

Takes what pytest takes: `nox -s tests -- tests/overlay -k handshake`.
"""

from __future__ import annotations

import shlex
import sys

from scripts.project import ROOT, project
from scripts.prove.environment import Environment
from scripts.prove.pytest import start_pytest
from scripts.system.console import entry
from scripts.system.errors import CheckFailedError
from scripts.wheel.build import patched_wheel


def main() -> None:
    """Build and install the patched wheel of the default release, and test it."""
    release = project().default_release
    environment = Environment(release).make()
    environment.install(patched_wheel(release))
    words = [str(ROOT / word) if word.startswith("tests/") else word for word in sys.argv[1:]]
    result = start_pytest(environment, words or [str(ROOT / "tests" / "overlay")], stream=True)
    if result.returncode:
        raise CheckFailedError(
            f"pytest exited with {result.returncode}",
            expected="every test passing",
            next_step="to stop at the first that fails: nox -s tests -- "
            f"{shlex.join(sys.argv[1:] or ['tests/overlay'])} -x",
        )


if __name__ == "__main__":
    entry(main)
