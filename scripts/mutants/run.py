"""Mutants of some modules against the tests that reach them, in the environment of the tests.

What is done there is the business of tests/programs/mutants: here it is chosen and started. Both
tools that were looked at do not fit. cosmic-ray starts a process for each mutant, and to import
vLLM takes ten seconds. mutmut forks, but leaves out every decorated function, and calls a mutant
through what it puts in front of a function when that is called: a hook's decorator was called long
before, when vLLM was imported.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.patchset.overlay import overlay_files, scope_of
from scripts.patchset.registry import load_registry
from scripts.patchset.series import Series, load_series
from scripts.project import REPORTS, ROOT
from scripts.prove.environment import Environment, stage
from scripts.prove.pytest import PLUGIN, pytest_arguments
from scripts.system.errors import CheckFailedError, UsageError
from scripts.system.process import run

TOOLS = "tools"
"""What stands for a release where the tools' core is meant."""

CORE = (
    "scripts/carry/merge.py",
    "scripts/patchset/overlay.py",
    "scripts/patchset/patch.py",
    "scripts/prove/record.py",
    "scripts/wheel/plan.py",
    "scripts/wheel/reader.py",
    "scripts/wheel/record.py",
    "scripts/wheel/writer.py",
    "scripts/wheel/zip.py",
)
"""The tools' core: what would quietly make another wheel, or another record, if it were wrong."""

Row = Mapping[str, Any]
"""What is written of a mutant; tests/programs/mutants/plugin.py says what it holds."""


@dataclass(frozen=True)
class Chosen:
    """Which mutants of the modules are tried.

    Attributes:
        only: Those that an earlier run has written so; empty for all.
        sample: How many of them, at random; 0 for all.
        seed: Of the sample.
    """

    only: Sequence[Row] = ()
    sample: int = 0
    seed: int = 0

    @property
    def all(self) -> bool:
        """Whether none is left out."""
        return not self.only and not self.sample


ALL = Chosen()

_INSTALLED = "tests/overlay/test_installed.py"
"""What asks the installed wheel who it is: here that is the stock one, or an earlier build."""

_PLUGIN = "tests.programs.mutants.plugin"
_FIRST = 3  # python -m pytest: it has to see the other plugins import what it mutates
_QUIETLY = ("-q", "-s", "--tb=native")  # nobody reads why a test failed
_LIMIT = 6 * 3600.0  # seconds for a release


def of_release(
    release: str,
    named: Sequence[str],
    workers: int,
    tests: Sequence[str] = (),
    chosen: Chosen = ALL,
) -> list[Row]:
    """Try the mutants of the overlay modules that `release` uses.

    Args:
        release: In its normal form.
        named: Parts of modules' paths; empty for all.
        workers: Processes at a time.
        tests: Files or folders in place of all that test the overlay.
        chosen: Which mutants.

    Raises:
        UsageError: No module has such a name.
        CheckFailedError: The tests could not be run.
    """
    series = load_series(release)
    modules = _named(overlay_modules(release, series), named, f"vLLM {release} uses")
    environment = Environment(release).make()
    folder = environment.folder.parent / f"mutants-{release}"
    try:
        shadow = environment.shadow(folder, series.patches)
        files = {_module(name): shadow / name for name in modules}
        paths = [ROOT / test for test in tests or that_test(release)]
        words = ("-p", PLUGIN, "--deselect", _INSTALLED)
        command = [str(environment.python), "-m", *pytest_arguments(*words)]
        variables = environment.variables(shadow)
        return rows_of(
            command, files, paths, workers, stage(), variables, rows_file(release), chosen=chosen
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def of_tools(
    named: Sequence[str], workers: int, tests: Sequence[str] = (), chosen: Chosen = ALL
) -> list[Row]:
    """Try the mutants of the tools' core, or of the modules below scripts/ that are `named`."""
    every = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "scripts").rglob("*.py"))]
    modules = _named(every, named, "below scripts/") if named else list(CORE)
    parts = sorted({f"tests/{Path(name).parent.as_posix()}" for name in modules})
    files = {_module(name): ROOT / name for name in modules}
    command = [sys.executable, "-m", *pytest_arguments()]
    paths = [ROOT / test for test in tests or parts]
    return rows_of(command, files, paths, workers, ROOT, {}, rows_file(TOOLS), chosen=chosen)


def rows_file(release: str) -> Path:
    """Return the file that gets a line of JSON for each mutant of a release, as it is tried."""
    return REPORTS / f"mutants-{release}.jsonl"


def overlay_modules(release: str, series: Series) -> list[str]:
    """Return the overlay modules that the hooks of a release need, by path."""
    found = []
    for name in sorted(overlay_files(series.patches)):
        scope = scope_of(ROOT / name)
        if scope is None or scope.holds(release):
            found.append(name)
    return found


def that_test(release: str) -> list[str]:
    """Return the files and folders that test the overlay on a release."""
    needed = [fix for fix in load_registry().fixes.values() if fix.affects(release)]
    return ["tests/overlay", *sorted({t.partition("::")[0] for fix in needed for t in fix.tests})]


def _named(modules: Iterable[str], named: Sequence[str], where: str) -> list[str]:
    modules = list(modules)
    for part in named:
        if not any(part in name for name in modules):
            raise UsageError(
                f"no module has {part!r} in its path",
                expected=f"a part of the path of a module that {where}: {', '.join(modules)}",
                next_step="name such a part, or none for all modules",
            )
    return [name for name in modules if not named or any(part in name for part in named)]


def _module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def rows_of(
    command: Sequence[str | Path],
    files: Mapping[str, Path],
    tests: Sequence[Path],
    workers: int,
    cwd: Path,
    variables: Mapping[str, str],
    out: Path,
    patience: float = 15.0,
    chosen: Chosen = ALL,
) -> list[Row]:
    """Try the mutants of some modules.

    Args:
        command: What runs pytest.
        files: The modules' files by the names they are imported by.
        tests: Files or folders.
        workers: Processes at a time.
        cwd: A folder from which `tests.programs` can be imported.
        variables: Those of the environment.
        out: The file that gets a row a line, as a mutant is tried.
        patience: Seconds that a test may take beyond ten times what it takes without a mutant.
        chosen: Which mutants.

    Raises:
        CheckFailedError: The tests could not be run.
    """
    out.parent.mkdir(exist_ok=True)
    out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "settings.json")
        modules = {name: str(path) for name, path in files.items()}
        said = {
            "modules": modules,
            "workers": workers,
            "patience": patience,
            "out": str(out),
            "only": [(row["module"], row["function"], row["change"]) for row in chosen.only],
            "sample": chosen.sample,
            "seed": chosen.seed,
        }
        settings.write_text(json.dumps(said), encoding="utf-8")
        own = {
            "KVFIX_MUTANTS": str(settings),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",  # a fork has none of the threads that wait for work
        }
        result = run(
            [*command[:_FIRST], "-p", _PLUGIN, *command[_FIRST:], *_QUIETLY, *tests],
            cwd=cwd,
            env={**variables, **own},
            timeout=_LIMIT,
            check=False,
        )
    rows = [json.loads(line) for line in _lines(out)]
    if result.returncode or not rows:
        raise CheckFailedError(
            f"pytest ended with {result.returncode}:\n{(result.stdout + result.stderr)[-3000:]}",
            expected="mutants",
            next_step=f"run the tests: python -m pytest {' '.join(map(str, tests))}",
        )
    return rows


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
