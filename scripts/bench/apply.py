"""The first half of `nox -s bench`: what `apply` costs, beside what it replaces, in one run.

On the real wheel of the default release, with a warm cache, in turns (A C B A C B ...), so that a
drift of the machine's speed meets all three:

- apply: the command that `nox -s apply` runs;
- repack: `wheel unpack`, `patch -p1` for each patch, `wheel pack`;
- copy: `cp` and `sha256sum` of the same file, the least that any tool has to do.

Wall-clock medians; the ratio is the median of the ratios of each turn.
"""

from __future__ import annotations

import shlex
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.patchset.target import Target
from scripts.project import PATCHES, ROOT
from scripts.system.console import err
from scripts.system.errors import CheckFailedError, UsageError
from scripts.system.process import measure


@dataclass(frozen=True)
class ApplyReport:
    """What was measured: wall-clock seconds, ratios of them, megabytes."""

    release: str
    turns: int
    seconds: dict[str, float]
    repack_over_apply: float
    apply_over_copy: float
    apply_peak_memory_mb: int

    def rows(self) -> dict[str, str]:
        """Return what was measured, for a table."""
        seconds = {f"{name}, {self.release}": f"{s:.2f} s" for name, s in self.seconds.items()}
        return {
            **seconds,
            "repack / apply": f"{self.repack_over_apply:.1f} (10 at least)",
            "apply / copy": f"{self.apply_over_copy:.2f} (3 at most)",
            "peak memory of apply": f"{self.apply_peak_memory_mb} MB (under 200)",
        }

    @property
    def is_within_limits(self) -> bool:
        """Whether `apply` is as fast and as small as kvfix promises."""
        return (
            self.repack_over_apply >= 10
            and self.apply_over_copy <= 3
            and self.apply_peak_memory_mb < 200
        )


def measure_apply(release: str, turns: int) -> ApplyReport:
    """Measure the three in turns on the wheel of `release`.

    Raises:
        UsageError: A program that is measured is not there.
        CheckFailedError: A measured command failed.
    """
    tools = ("cp", "patch", "sha256sum", "sh")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        raise UsageError(
            f"cannot compare: {', '.join(missing)} not found",
            expected=f"{', '.join(tools)} on the PATH",
            next_step="install what is missing, then: nox -s bench",
        )
    target = Target.of(release)
    wheel, _ = target.wheel_for()
    patches = [PATCHES / patch.name for patch in target.patches]
    samples: dict[str, list[tuple[float, float]]] = {"apply": [], "copy": [], "repack": []}
    with tempfile.TemporaryDirectory(dir=_same_file_system()) as folder:
        commands = _commands(wheel, release, patches, Path(folder))
        _measure(commands["apply"], Path(folder))  # warms file cache and byte code
        for turn in range(turns):
            err.print(f"apply, turn {turn + 1} of {turns} ...")
            for name, command in commands.items():
                samples[name].append(_measure(command, Path(folder)))
    return _report(release, samples)


def _same_file_system() -> Path:
    folder = ROOT / ".work"
    folder.mkdir(exist_ok=True)
    return folder


def _commands(wheel: Path, release: str, patches: list[Path], folder: Path) -> dict[str, str]:
    python, out_folder = shlex.quote(sys.executable), shlex.quote(str(folder / "out"))
    source, unpacked = shlex.quote(str(wheel)), folder / "unpacked"
    patching = " && ".join(f"patch -s -p1 < {shlex.quote(str(patch))}" for patch in patches)
    return {
        "apply": f"exec {python} -m scripts.commands.apply {release} --out {out_folder}",
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
    usage = measure(command, cwd=ROOT)
    if usage.exit_code:
        raise CheckFailedError(
            f"exit code {usage.exit_code}",
            expected="every measured command to work",
            next_step=f"run it by hand: {command}",
        )
    return usage.seconds, usage.peak_bytes / 1e6


def _report(release: str, samples: dict[str, list[tuple[float, float]]]) -> ApplyReport:
    def ratio(over: str, under: str) -> float:
        pairs = zip(samples[over], samples[under], strict=True)
        return round(statistics.median(a[0] / b[0] for a, b in pairs), 2)

    return ApplyReport(
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
