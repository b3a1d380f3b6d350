"""`nox -s fuzz`: hostile wheels, patches and registries, and kills, against the tools themselves.

    nox -s fuzz                                  10,000 wheels, 5,000 patches, 2,000 registries,
                                                 200 kills: three minutes
    nox -s fuzz -- --wheels 500 --patches 0      fewer
    nox -s fuzz -- --seed 7 --first 1234 --wheels 1 --patches 0 --registries 0 --kills 0
                                                 one case again

The cases, and the rules that none may break, are those of `tests/scripts/hostile/`. A case that
breaks one is kept below reports/fuzz/, and the session fails.
"""

from __future__ import annotations

import json
import secrets
import sys
from typing import Any

from rich.table import Table

from scripts.project import REPORTS, ROOT
from scripts.system.console import at_least, entry, err, out, parser_of
from scripts.system.errors import CheckFailedError
from scripts.system.process import run

_COUNTS = {"wheels": 10_000, "patches": 5_000, "registries": 2_000, "kills": 200}
_FOLDER = REPORTS / "fuzz"


def main() -> None:
    """Run the cases, and print what came of them."""
    parser = parser_of("fuzz", __doc__)
    for kind, count in _COUNTS.items():
        parser.add_argument(f"--{kind}", type=at_least(0), default=count, metavar="N")
    parser.add_argument("--seed", default=secrets.token_hex(4))
    parser.add_argument(
        "--first", type=at_least(0), default=0, metavar="N", help="number of the first"
    )
    options = parser.parse_args()
    _FOLDER.mkdir(parents=True, exist_ok=True)
    err.print(f"seed {options.seed}")
    table = Table(
        "", "cases", "how they ended", "slowest", "peak memory", "rules broken", title="fuzz"
    )
    broken: list[dict[str, Any]] = []
    for kind in _COUNTS:
        if count := getattr(options, kind):
            result = _run(kind, count, options.seed, options.first)
            broken += result["broken"]
            ends = sorted(result["outcomes"].items(), key=lambda item: -item[1])
            table.add_row(
                kind,
                str(result["cases"]),
                "\n".join(f"{number:6}  {end}" for end, number in ends),
                f"{result['slowest']:.1f} s",
                f"{result['peak_mb']:.0f} MB" if result["peak_mb"] else "-",
                str(len(result["broken"])),
            )
    out.print(table)
    for one in broken:
        err.print(f"✗ {one['rule']}, {one['saved'] or one['case']}: {one['detail']}", markup=False)
    if broken:
        raise CheckFailedError(
            f"{len(broken)} cases break a rule, with seed {options.seed}",
            expected="each refused with an error that says why, or taken, and nothing left behind",
            next_step=f"mend it, then the same cases: nox -s fuzz -- --seed {options.seed}",
        )


def _run(kind: str, count: int, seed: str, first: int) -> dict[str, Any]:
    path = _FOLDER / f"{kind}.json"
    run(
        [
            *(sys.executable, "-m", "tests.scripts.hostile", kind, str(count)),
            *("--seed", seed, "--first", str(first), "--save", _FOLDER, "--result", path),
        ],
        cwd=ROOT,
        stream=True,
    )
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


if __name__ == "__main__":
    entry(main)
