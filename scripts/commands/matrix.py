"""`nox -s matrix`: what CI runs the regressions on, as the JSON of a GitHub `strategy.matrix`.

Every supported release on one Python, the default release on each that is supported. Only the
JSON goes to standard output.
"""

from __future__ import annotations

import json

from packaging.version import Version

from scripts.project import project
from scripts.system.console import entry, parser_of

PYTHONS = ("3.10", "3.12", "3.13")  # of those that vLLM's wheels and kvfix support
_ONE = "3.12"


def matrix() -> dict[str, list[dict[str, str]]]:
    """Return `{"include": [{"release": …, "python": …}, …]}`, newest release first."""
    default = project().default_release
    return {
        "include": [
            {"release": release, "python": python}
            for release in sorted(project().releases, key=Version, reverse=True)
            for python in (PYTHONS if release == default else (_ONE,))
        ]
    }


def main() -> None:
    """Print the matrix."""
    parser_of("matrix", __doc__).parse_args()
    print(json.dumps(matrix()))


if __name__ == "__main__":
    entry(main)
