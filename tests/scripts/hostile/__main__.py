"""`python -m tests.scripts.hostile`: hostile cases of one kind, in batches; `nox -s fuzz` runs it.

Each batch has a process of its own, so that memory that one takes is seen, and ends with it. The
result goes to a file, as JSON; progress to standard error.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.scripts import checkouts, toys
from tests.scripts.hostile.batch import KINDS, Batch, Broken

_BATCH = 250  # cases
_ROOT = Path(__file__).resolve().parents[3]


def run_batch(
    checkout: checkouts.Checkout, kind: str, seed: str, first: int, count: int, save: Path
) -> Batch:
    """Run some cases with the tools of `checkout`; where the process dies, a rule is broken."""
    with tempfile.TemporaryDirectory() as work:
        words = (
            ["kills", seed, str(count), work]
            if kind == "kills"
            else ["batch", kind, seed, str(first), str(count), work, str(save)]
        )
        done = subprocess.run(
            [sys.executable, "-m", f"tests.scripts.hostile.{words[0]}", *words[1:]],
            cwd=work,
            env=checkout.environment(
                PYTHONPATH=f"{checkout.folder}{os.pathsep}{_ROOT}",
                PYTHONDONTWRITEBYTECODE="1",
                TMPDIR=work,
                HOME=work,
            ),
            stdout=subprocess.PIPE,
            stderr=None if kind == "kills" else subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode:
        detail = f"the process ended with {done.returncode}: {(done.stderr or '')[-3000:]}"
        return Batch(count, broken=[Broken(first, "traceback", detail)])
    said = json.loads(done.stdout.splitlines()[-1])
    said["outcomes"] = Counter(said["outcomes"])
    said["broken"] = [Broken(**one) for one in said["broken"]]
    return Batch(**said)


def pin_two(checkout: checkouts.Checkout) -> None:
    """Pin two releases that take a moment to be stored as git."""
    noise = base64.b64encode(checkouts.noise(1_000_000)).decode()
    sdists = {
        release: {
            f"vllm-{release}.tar.gz": checkouts.sdist_bytes(
                {**toys.FILES, "vllm/data.txt": f"{release}\n{noise}"}, release
            )
        }
        for release in ("0.20.1", "0.20.2")
    }
    sdists["0.20.2"][checkouts.wheel_name()] = checkouts.wheel_bytes(toys.FILES)
    checkout.lock(sdists)


def add(total: Batch, more: Batch) -> None:
    """Count `more` in."""
    total.cases += more.cases
    total.outcomes += more.outcomes
    total.slowest = max(total.slowest, more.slowest)
    total.peak_mb = max(total.peak_mb, more.peak_mb)
    total.broken += more.broken


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[*KINDS, "kills"])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--save", type=Path, required=True, help="where broken cases go")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    options.save.mkdir(parents=True, exist_ok=True)
    total = Batch()
    with tempfile.TemporaryDirectory() as folder:
        checkout = checkouts.small(Path(folder))
        end, size = options.first + options.count, _BATCH
        if options.kind == "kills":
            pin_two(checkout)
            size = options.count
        for first in range(options.first, end, size):
            count = min(size, end - first)
            add(total, run_batch(checkout, options.kind, options.seed, first, count, options.save))
            print(
                f"{options.kind}: {total.cases} of {options.count}, {len(total.broken)} broken ...",
                file=sys.stderr,
                flush=True,
            )
    result = {**vars(total), "broken": [vars(one) for one in total.broken]}
    options.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
