"""The first half of `nox -s bench`: what `apply` costs, beside what it replaces, in one run.

On the real wheel of the default release, with a warm cache and byte code, in turns (A B C D A B C
D ...), so that a drift of the machine's speed meets all four:

- apply: the command that `nox -s apply` runs;
- copy: `cp` and `sha256sum` of the same file, the least that any tool has to do;
- fast copy: the same with OpenSSL's sha256, for many a `sha256sum` does without the CPU's own;
- repack: `wheel unpack`, `patch -p1` for each patch, `wheel pack`.

Wall-clock medians; a ratio is the median of the ratios of each turn.
"""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.patchset.target import Target
from scripts.project import PATCHES, ROOT
from scripts.system.console import err
from scripts.system.errors import CheckFailedError, UsageError
from scripts.system.process import Usage, measure

_HASH = """\
import hashlib, sys
digest = hashlib.sha256()
with open(sys.argv[1], "rb", buffering=0) as file:
    while data := file.read(1 << 20):
        digest.update(data)
print(digest.hexdigest())
"""


@dataclass(frozen=True)
class ApplyReport:
    """What was measured: wall-clock seconds, ratios of them, megabytes."""

    release: str
    turns: int
    seconds: dict[str, float]
    repack_over_apply: float
    apply_over_copy: float
    apply_over_copy_cpu: float
    apply_over_fast_copy: float
    apply_peak_memory_mb: int

    def rows(self) -> dict[str, str]:
        """Return what was measured, for a table."""
        seconds = {f"{name}, {self.release}": f"{s:.2f} s" for name, s in self.seconds.items()}
        return {
            **seconds,
            "repack / apply": f"{self.repack_over_apply:.1f} (10 at least)",
            "apply / copy": f"{self.apply_over_copy:.2f} (1 at most)",
            "apply / copy, CPU time": f"{self.apply_over_copy_cpu:.2f}",
            "apply / fast copy": f"{self.apply_over_fast_copy:.2f} (4 at most)",
            "peak memory of apply": f"{self.apply_peak_memory_mb} MB (under 200)",
        }

    @property
    def is_within_limits(self) -> bool:
        """Whether `apply` is as fast and as small as kvfix promises."""
        return (
            self.repack_over_apply >= 10
            and self.apply_over_copy <= 1
            and self.apply_over_fast_copy <= 4
            and self.apply_peak_memory_mb < 200
        )


def measure_apply(release: str, turns: int) -> ApplyReport:
    """Measure the four in turns on the wheel of `release`.

    Raises:
        UsageError: A program that is measured is not there.
        CheckFailedError: A measured command failed.
    """
    tools = ("cp", "env", "patch", "sha256sum", "sh")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        raise UsageError(
            f"cannot compare: {', '.join(missing)} not found",
            expected=f"{', '.join(tools)} on the PATH",
            next_step="install what is missing, then: nox -s bench",
        )
    target = Target.of(release)
    wheel, _ = target.wheel_for()
    patches = [PATCHES / patch.name for patch in target.patches]
    with tempfile.TemporaryDirectory(dir=_same_file_system()) as folder:
        commands = _commands(wheel, release, patches, Path(folder))
        samples: dict[str, list[Usage]] = {name: [] for name in commands}
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
        "apply": "exec env -u PYTHONDONTWRITEBYTECODE "
        f"{python} -m scripts.commands.apply {release} --out {out_folder}",
        "copy": f"cp {source} {out_folder}/ && sha256sum {out_folder}/*.whl",
        "fast copy": f"cp {source} {out_folder}/ && "
        f"{python} -c {shlex.quote(_HASH)} {out_folder}/*.whl",
        "repack": (
            f"{python} -m wheel unpack -d {shlex.quote(str(unpacked))} {source} && "
            f"(cd {shlex.quote(str(unpacked))}/* && {patching}) && "
            f"{python} -m wheel pack -d {out_folder} {shlex.quote(str(unpacked))}/*"
        ),
    }


def _measure(command: str, folder: Path) -> Usage:
    """Run `command` with empty output folders."""
    for name in ("out", "unpacked"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    os.sync()  # `apply` waits for the disk, and shall not for what the one before it has left
    usage = measure(command, cwd=ROOT)
    if usage.exit_code:
        raise CheckFailedError(
            f"exit code {usage.exit_code}",
            expected="every measured command to work",
            next_step=f"run it by hand: {command}",
        )
    return usage


def _report(release: str, samples: dict[str, list[Usage]]) -> ApplyReport:
    def ratio(
        over: str, under: str, of: Callable[[Usage], float] = lambda usage: usage.seconds
    ) -> float:
        pairs = zip(samples[over], samples[under], strict=True)
        return round(statistics.median(of(a) / of(b) for a, b in pairs), 2)

    return ApplyReport(
        release=release,
        turns=len(samples["apply"]),
        seconds={
            name: round(statistics.median(usage.seconds for usage in values), 2)
            for name, values in samples.items()
        },
        repack_over_apply=ratio("repack", "apply"),
        apply_over_copy=ratio("apply", "copy"),
        apply_over_copy_cpu=ratio("apply", "copy", lambda usage: usage.cpu_seconds),
        apply_over_fast_copy=ratio("apply", "fast copy"),
        apply_peak_memory_mb=round(max(usage.peak_bytes for usage in samples["apply"]) / 1e6),
    )
