"""Play histories against the vLLM that is installed: `python -m tests.simulation --out FILE`.

One line of JSON for each thing that was found, the shrunk history with it, and one at the end with
what was played. `nox -s simulate` starts this in a release's environment.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support import vllm_cpu  # first: what follows imports vLLM

logging.disable(logging.CRITICAL)

from tests.simulation.engine import Shape  # noqa: E402
from tests.simulation.history import PROFILES, Played, described, play, play_random  # noqa: E402
from tests.simulation.long import Life, live  # noqa: E402
from tests.simulation.shrink import shrink  # noqa: E402
from tests.simulation.sizes import growing  # noqa: E402
from tests.simulation.timeline import timeline  # noqa: E402
from tests.simulation.world import Setting, Stage  # noqa: E402

assert vllm_cpu  # its import is what it is for


SHRINKING = 60_000
"""Steps that may go into making one history smaller; by steps, so that it ends as it did before."""


def main() -> None:
    """Play histories until there were enough steps, or what was looked for was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", choices=PROFILES, action="append", default=None)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--first", default="", help="end as soon as something like this is found")
    parser.add_argument("--history", help="play this one only, by the seed that was printed")
    parser.add_argument("--replay", type=Path, help="play what another side has found, by its file")
    parser.add_argument("--requests", type=int, help="one life of engines with so many, no others")
    parser.add_argument("--without", action="append", default=[], help="events it does not have")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        sys.exit("PYTHONHASHSEED has to be 0, or sets have another order in each run")
    names = options.profile or list(PROFILES)
    gc.collect()
    gc.freeze()
    if options.replay:
        _replay(options.replay, options.out)
        return
    if options.requests:
        _live(options.requests, options.seed, frozenset(options.without), options.out)
        return
    found: dict[str, int] = {}
    start, steps, histories = time.monotonic(), 0, 0
    stage = Stage()
    with stage.open(), options.out.open("w", encoding="utf-8") as out:
        while steps < options.steps:
            seed = options.history or f"{names[histories % len(names)]}/{options.seed}/{histories}"
            profile = PROFILES[seed.split("/")[0]]
            played = play_random(profile, stage, seed)
            histories += 1
            steps += played.world.steps
            if histories % 50 == 0:
                gc.collect()
            if played.found is not None:
                label = str(played.found)
                found[label] = found.get(label, 0) + 1
                if found[label] == 1:
                    row = _row(played, seed, steps, stage)
                    print(json.dumps(row), file=out, flush=True)
                if options.first and re.search(options.first, label):
                    break
            if options.history:
                break
        seconds = time.monotonic() - start
        end = {"steps": steps, "histories": histories, "seconds": round(seconds, 1), "found": found}
        print(json.dumps(end), file=out)


def _live(requests: int, seed: str, without: frozenset[str], target: Path) -> None:
    """Let engines serve requests, and write how large their tables are meanwhile."""
    start, stage = time.monotonic(), Stage()
    with stage.open(), target.open("w", encoding="utf-8") as out:

        def heard(life: Life) -> None:
            number, tables = list(life.samples.items())[-1]
            print(json.dumps({"requests": number, "sizes": tables}), file=out, flush=True)

        life = live(stage, requests, seed, without, heard)
        for label, lines in life.lines.items():
            shown = timeline(lines, ["router", "P0", "P1", "D0", "D1"], 40)
            print(json.dumps({"label": label, "timeline": shown}), file=out)
        end = {
            "steps": life.steps,
            "seconds": round(time.monotonic() - start, 1),
            "events": life.events,
            "ends": life.ends,
            "found": life.found,
            "growing": growing(list(life.samples.values())),
        }
        print(json.dumps(end), file=out)


def _replay(source: Path, target: Path) -> None:
    """Play the shrunk histories of a file, and write what each of them shows here."""
    stage = Stage()
    with stage.open(), target.open("w", encoding="utf-8") as out:
        for line in source.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "shrunk" not in row:
                continue
            roles = ("prefill", "decode")
            setting = Setting(*(tuple(map(_shape, row["engines"][role])) for role in roles))
            played = play(setting, stage, [tuple(event) for event in row["shrunk"]])
            label = None if played.found is None else str(played.found)
            print(json.dumps({"of": row["label"], "label": label}), file=out)


def _shape(fields: dict[str, Any]) -> Shape:
    return Shape(**{**fields, "groups": tuple(fields["groups"])})


def _row(played: Played, seed: str, steps: int, stage: Stage) -> dict[str, Any]:
    """What there is to say of a finding."""
    assert played.found is not None
    label = str(played.found)
    setting = played.world.setting
    shrunk, spent = played, 0

    def shows(events: list[Any]) -> bool:
        nonlocal shrunk, spent
        if spent > SHRINKING:
            return False
        tried = play(setting, stage, events)
        spent += tried.world.steps
        if str(tried.found) != label:
            return False
        shrunk = tried
        return True

    if shows(played.events):
        shrink(played.events, shows)
    columns = ["router", *(f"P{i}" for i in range(len(setting.prefill)))]
    columns += [f"D{i}" for i in range(len(setting.decode))]
    lines = [line for line in shrunk.world.lines if not _noise(line.words)][-80:]
    return {
        "label": label,
        "seed": seed,
        "steps": steps,
        "events": len(played.events),
        "shrunk": shrunk.events,
        "setting": described(setting),
        "engines": asdict(setting),
        "timeline": timeline(lines, columns, 40),
        "columns": columns,
        "lines": [asdict(line) for line in lines],
    }


def _noise(words: str) -> bool:
    return re.fullmatch(r"schedules (k\d+-\w+\[0:1\] ?)+|the model has run", words) is not None


if __name__ == "__main__":
    main()
