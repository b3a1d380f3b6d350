"""`nox -s lock -- RELEASE...`: pin releases, or check their pins against the user's index."""

from __future__ import annotations

import argparse

from scripts.project import project
from scripts.system.console import entry
from scripts.upstream.pin import lock


def main() -> None:
    """Lock the releases of the command line, or all that `pyproject.toml` supports."""
    parser = argparse.ArgumentParser(
        prog="nox -s lock --", description="Pin releases, or check them."
    )
    parser.add_argument("releases", metavar="RELEASE", nargs="*")
    releases: list[str] = parser.parse_args().releases
    lock(releases or list(project().releases))


if __name__ == "__main__":
    entry(main)
