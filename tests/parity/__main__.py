"""One side of `nox -s parity`: runs scenarios on the vLLM that is imported.

    python -m tests.parity --out FILE [-k NAME] [--affected FIX...] [--wire FOLDER SIDE OTHER]

Writes a line of JSON for each scenario as it ends: its `name`, the fixes that it `shows`, one of
`observed`, `left_out` (a reason) and `crashed` (where), and how many `seconds` of CPU it took. The
process may die in one; what ended before is on file. Exits with 3 where no name has NAME in it.
"""

from __future__ import annotations

from tests.support import vllm_cpu

vllm_cpu.prepare()

import argparse  # noqa: E402 - the platform has to be settled first
import asyncio  # noqa: E402
import importlib  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Collection  # noqa: E402
from pathlib import Path  # noqa: E402
from types import FrameType  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

import vllm  # noqa: E402

from tests.parity import wire_folder  # noqa: E402
from tests.parity.scenario import SCENARIOS, LeftOutError, Scenario, shown_on  # noqa: E402

MODULES = (
    "endpoints",
    "clients",
    "servicer",
    "retries",
    "connectors",
    "groups",
    "engines",
    "plugins",
    "wire",
)
"""In this order; what both sides wait for each other in comes last."""

LIMIT = 90  # seconds for one scenario; a build that hangs is unlike one that does not
TOGETHER = 900  # seconds for one in which the sides meet: the other may come later


def main() -> None:
    """Run what the command line names, or everything."""
    options = _arguments()
    for module in options.modules:
        importlib.import_module(f"tests.parity.{module}")
    chosen = [scenario for name, scenario in SCENARIOS.items() if options.name in name]
    if not chosen:
        print(*dict.fromkeys(name.partition("[")[0] for name in SCENARIOS))
        sys.exit(3)
    if options.wire:
        folder, mine, other = options.wire
        wire_folder.settle(Path(folder), mine, other)
    signal.signal(signal.SIGALRM, _late)
    with options.out.open("w", encoding="utf-8") as file:
        for scenario in chosen:  # a later row with the name counts
            begun = {"name": scenario.name, "crashed": "the process ended before it was over"}
            file.write(json.dumps({**begun, "seconds": 0.0}) + "\n")
        for scenario in chosen:
            outcome = _outcome(scenario, options.affected)
            shows = [key.split()[0] for key in scenario.shows]
            row = {"name": scenario.name, "shows": shows, **outcome}
            file.write(json.dumps(row, sort_keys=True) + "\n")
            file.flush()
    os._exit(0)  # threads that wait for a peer that hangs would keep the process


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("-k", dest="name", default="")
    parser.add_argument("--affected", nargs="*", default=[], metavar="FIX")
    parser.add_argument("--wire", nargs=3, metavar=("FOLDER", "SIDE", "OTHER"))
    parser.add_argument("--modules", nargs="*", default=MODULES)
    return parser.parse_args()


def _outcome(scenario: Scenario, affected: Collection[str]) -> dict[str, Any]:
    if reason := shown_on(scenario, vllm.__version__, affected):
        return {"left_out": reason, "seconds": 0.0}
    began = time.process_time()
    signal.alarm(TOGETHER if scenario.exchanges else LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            observed = scenario.run()
            if inspect.iscoroutine(observed):
                observed = asyncio.run(observed)
        json.dumps(observed)
        outcome = {"observed": observed}
    except LeftOutError as reason:
        outcome = {"left_out": str(reason)}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an engine that ends raises SystemExit
        outcome = {"crashed": "".join(traceback.format_exception(error))[-3000:]}
    finally:
        signal.alarm(0)
    return outcome | {"seconds": round(time.process_time() - began, 2)}


def _late(signum: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError("the scenario takes too long")


if __name__ == "__main__":
    main()
