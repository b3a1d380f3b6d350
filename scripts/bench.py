"""`nox -s bench`: what `apply` costs, measured beside what it replaces, in one run.

On the real wheel of the default release, with a warm cache, in turns (A C B A C B ...), so that a
drift of the machine's speed meets all three:

- apply: the command that `nox -s apply` runs;
- repack: `wheel unpack`, `patch -p1` for each patch, `wheel pack`;
- copy: `cp` and `sha256sum` of the same file, the least that any tool has to do.

Wall-clock medians; the ratio is the median of the ratios of each turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from scripts.errors import CheckFailedError, UsageError
from scripts.index import fetch
from scripts.lock import locked_release
from scripts.project import PATCHES, REPORTS, ROOT, project
from scripts.series import patch_names
from scripts.terminal import entry, err, out


@dataclass(frozen=True)
class Report:
    """What was measured: wall-clock seconds, ratios of them, megabytes."""

    release: str
    turns: int
    seconds: dict[str, float]
    repack_over_apply: float
    apply_over_copy: float
    apply_peak_memory_mb: int

    @property
    def is_within_limits(self) -> bool:
        """Whether `apply` is as fast and as small as kvfix promises."""
        return (
            self.repack_over_apply >= 10
            and self.apply_over_copy <= 3
            and self.apply_peak_memory_mb < 200
        )


def main() -> None:
    """Measure, print, write reports/bench.json."""
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="measured turns, 5 at least")
    turns = parser.parse_args().turns
    tools = ("cp", "patch", "sha256sum", "sh")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing or turns < 5:
        raise UsageError(
            f"cannot compare: {', '.join(missing)} not found" if missing else f"{turns} turns",
            expected=f"{', '.join(tools)} on the PATH, and 5 turns or more",
            next_step="install what is missing, then: nox -s bench",
        )
    release = project().default_release
    locked = locked_release(release)
    wheel = fetch(locked.wheel_for(platform.machine()))
    patches = [PATCHES / locked.line / name for name in patch_names(locked.line)]
    samples: dict[str, list[tuple[float, float]]] = {"apply": [], "copy": [], "repack": []}
    with tempfile.TemporaryDirectory(dir=_same_file_system()) as folder:
        commands = _commands(wheel, release, patches, Path(folder))
        _measure(commands["apply"], Path(folder))  # warms file cache and byte code
        for turn in range(turns):
            err.print(f"turn {turn + 1} of {turns} ...")
            for name, command in commands.items():
                samples[name].append(_measure(command, Path(folder)))
    report = _report(release, samples)
    REPORTS.mkdir(exist_ok=True)
    (REPORTS / "bench.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    out.print(_table(report))
    if not report.is_within_limits:
        raise CheckFailedError(
            "apply misses a limit",
            expected="at least 10 times as fast as repack, at most 3 times copy, under 200 MB",
            next_step="run it again on a quiet machine: nox -s bench -- --turns 11",
        )


def _same_file_system() -> Path:
    folder = ROOT / ".work"
    folder.mkdir(exist_ok=True)
    return folder


def _commands(wheel: Path, release: str, patches: list[Path], folder: Path) -> dict[str, str]:
    python, out_folder = shlex.quote(sys.executable), shlex.quote(str(folder / "out"))
    source, unpacked = shlex.quote(str(wheel)), folder / "unpacked"
    patching = " && ".join(f"patch -s -p1 < {shlex.quote(str(patch))}" for patch in patches)
    return {
        "apply": f"exec {python} -m scripts.apply {release} --out {out_folder}",
        "copy": f"cp {source} {out_folder}/ && sha256sum {out_folder}/*.whl",
        "repack": (
            f"{python} -m wheel unpack -d {shlex.quote(str(unpacked))} {source} && "
            f"(cd {shlex.quote(str(unpacked))}/* && {patching}) && "
            f"{python} -m wheel pack -d {out_folder} {shlex.quote(str(unpacked))}/*"
        ),
    }


def _measure(command: str, folder: Path) -> tuple[float, float]:
    """Run `command` with empty output folders; return wall-clock seconds and peak memory in MB."""
    for name in ("out", "unpacked"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    start = time.perf_counter()
    with subprocess.Popen(["sh", "-c", command], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise CheckFailedError(
            f"exit code {process.returncode}",
            expected="every measured command to work",
            next_step=f"run it by hand: {command}",
        )
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return seconds, usage.ru_maxrss * unit / 1e6


def _report(release: str, samples: dict[str, list[tuple[float, float]]]) -> Report:
    def ratio(over: str, under: str) -> float:
        pairs = zip(samples[over], samples[under], strict=True)
        return round(statistics.median(a[0] / b[0] for a, b in pairs), 2)

    return Report(
        release=release,
        turns=len(samples["apply"]),
        seconds={
            name: round(statistics.median(seconds for seconds, _ in values), 2)
            for name, values in samples.items()
        },
        repack_over_apply=ratio("repack", "apply"),
        apply_over_copy=ratio("apply", "copy"),
        apply_peak_memory_mb=round(max(memory for _, memory in samples["apply"])),
    )


def _table(report: Report) -> Table:
    table = Table("", "", title=f"vLLM {report.release}, medians of {report.turns} turns")
    for name, seconds in report.seconds.items():
        table.add_row(name, f"{seconds:.2f} s")
    table.add_row("repack / apply", f"{report.repack_over_apply:.1f} (10 at least)")
    table.add_row("apply / copy", f"{report.apply_over_copy:.2f} (3 at most)")
    table.add_row("peak memory of apply", f"{report.apply_peak_memory_mb} MB (under 200)")
    return table


if __name__ == "__main__":
    entry(main)
