"""One side of a comparison: a vLLM wheel, upstream's tests of its release, and how they are run.

Both sides have the same interpreter and dependencies (`scripts.prove.environment`).
Each has its own copy of the tests, and its own wheel: installed into a folder that comes first on
the import path,
so the sides can run at the same time, and what is tested is what an installer makes of the wheel.
The environment's own vLLM is hidden on both sides. Nothing else is shared either: each side has its
own cache of vLLM's, each process its own side-channel port and folder for temporary files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.project import ROOT
from scripts.prove.environment import NO_GPU, Environment
from scripts.prove.outcomes import Outcome, Outcomes, outcomes_of
from scripts.system.errors import CheckFailedError, CommandError, UsageError
from scripts.system.files import replacing, sha256
from scripts.system.process import in_own_group, run
from scripts.upstream.tree import release_tree
from scripts.upstream_tests.models import write_models

if TYPE_CHECKING:
    from subprocess import Popen

WORK = ROOT / ".work" / "upstream"
PLUGINS = tuple(ROOT / "tests" / "support" / f"{name}.py" for name in ("vllm_cpu", "frozen"))
LIMIT = 120.0  # seconds for one test
_GRACE = 60.0  # seconds more without a word from pytest, after which it is past saving
_START = 900.0  # seconds until the first word: vLLM is imported, on a busy machine and uncompiled
_ENDED_WELL = (0, 1, 5)  # exit codes of pytest: all passed, some failed, none selected
_LIVES = 4  # processes for one job, where the interpreter dies


@dataclass(frozen=True)
class Job:
    """Some tests, run by one process.

    Attributes:
        tests: Files or node ids, relative to the side's folder.
        expression: What pytest's `-k` takes; empty for everything.
        run: Tells repetitions of a job apart.
    """

    tests: tuple[str, ...]
    expression: str = ""
    run: int = 0

    @property
    def files(self) -> tuple[str, ...]:
        """The test files, relative to the side's folder."""
        return tuple(dict.fromkeys(test.partition("::")[0] for test in self.tests))


@contextmanager
def alone(release: str) -> Iterator[None]:
    """Keep every other run on `release` out while the block runs; a run lays out its tests anew.

    Raises:
        UsageError: There is one. The lock goes with its process, whatever ends that.
    """
    folder = WORK / release
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another nox -s upstream_tests runs on {release}",
                expected="one at a time for a release",
                next_step="wait for it, or stop it: what it has done is kept for --resume",
            ) from None
        yield
    finally:
        os.close(descriptor)


class Side:
    """A wheel with the tests of its release.

    Attributes:
        name: "stock" or "patched".
        folder: Where tests are run; node ids are relative to it.
        version: What the wheel calls itself once it is installed.
    """

    def __init__(self, name: str, wheel: Path, environment: Environment) -> None:
        self.name = name
        self.wheel = wheel
        self.sha256 = sha256(wheel)
        self.version = ""
        self.folder = WORK / environment.release / name
        self._environment = environment
        self._inputs = hashlib.sha256()

    def prepare(self) -> Side:
        """Lay out the tests and install the wheel, unless both are there already.

        Raises:
            CheckFailedError: Another vLLM than this side's would be imported.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lay_out_tests()
        self._environment.install_into(self.folder / "site", self.sha256, self.wheel)
        write_models(self.folder / "models")
        folder = self.folder / "plugin"
        folder.mkdir(exist_ok=True)
        for plugin in PLUGINS:
            shutil.copyfile(plugin, folder / plugin.name)
        self.version = self._installed_version()
        texts = [plugin.read_text() for plugin in PLUGINS]
        for part in (self.sha256, *self._environment.contents(), *texts, LIMIT):
            self._inputs.update(f"{part}\0".encode())
        return self

    def _lay_out_tests(self) -> None:
        """Copy tests/ and pytest's settings: beside a vllm/ folder, that one would be imported."""
        source = release_tree(self._environment.release)
        shutil.rmtree(self.folder / "tests", ignore_errors=True)
        shutil.copytree(source / "tests", self.folder / "tests", copy_function=shutil.copyfile)
        shutil.copyfile(source / "pyproject.toml", self.folder / "pyproject.toml")

    def _installed_version(self) -> str:
        words = (
            "from importlib import metadata, util; print(metadata.version('vllm'), "
            "util.find_spec('vllm').origin)"
        )
        result = run(
            [self._environment.python, "-c", words], cwd=self.folder, env=self._variables()
        )
        version, origin = result.stdout.split()
        if not Path(origin).is_relative_to(self.folder / "site"):
            raise CheckFailedError(
                f"{self.name}: the vLLM that would be tested is {origin}",
                expected=f"the one of {self.wheel.name}, below {self.folder / 'site'}",
                next_step=f"delete {self.folder} and start again",
            )
        return version

    def _variables(self) -> dict[str, str]:
        paths = (self.folder / "site", self.folder / "plugin")
        return {
            **NO_GPU,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTEST_ADDOPTS": "",
            "PYTHONDONTWRITEBYTECODE": "",  # without byte code each start takes ten seconds more
            "HF_HOME": str(self.folder / "models"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(self.folder / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",  # one process for each core is what the runner starts
        }

    def saved(self, job: Job) -> Outcomes | None:
        """Return what an earlier run has found for this job with the same inputs."""
        try:
            text = self._record(job).read_text(encoding="utf-8")
        except OSError:
            return None
        return {test: Outcome(**one) for test, one in json.loads(text).items()}

    def forget(self) -> None:
        """Delete what earlier runs have found."""
        shutil.rmtree(self.folder / "done", ignore_errors=True)

    def _record(self, job: Job) -> Path:
        key = self._inputs.copy()
        for file in job.files:
            key.update((self.folder / file).read_bytes())
        key.update(repr(job).encode())
        return self.folder / "done" / f"{key.hexdigest()}.json"

    def run(
        self, job: Job, stop: threading.Event, on_test: Callable[[int], None] = lambda _: None
    ) -> Outcomes:
        """Run a job to its end and keep what it found.

        A test that hangs is cut by pytest-timeout at the side's limit. Where even that does not
        help, or where the interpreter dies, that test has failed and those behind it are run by
        another process.

        Args:
            job: What to run.
            stop: Once it is set, the process is killed and nothing is kept.
            on_test: Called with the number of tests that have ended since the last call.

        Raises:
            InterruptedError: `stop` was set.
        """
        outcomes = self._outcomes(job, stop, on_test)
        record = self._record(job)
        record.parent.mkdir(exist_ok=True)
        with replacing(record) as file:
            document = {test: asdict(outcome) for test, outcome in outcomes.items()}
            file.write(json.dumps(document).encode())
        return outcomes

    def _outcomes(
        self, job: Job, stop: threading.Event, on_test: Callable[[int], None]
    ) -> Outcomes:
        outcomes: Outcomes = {}
        tests = job.tests
        for _ in range(_LIVES):
            code = self._run_once(tests, job.expression, outcomes, stop, on_test)
            if code in _ENDED_WELL:
                return outcomes
            known = self.collect(job)
            rest = [test for test in known if test not in outcomes]
            if not known and len(job.files) > 1:  # one of the files is past importing
                for file in job.files:
                    own = tuple(test for test in job.tests if test.partition("::")[0] == file)
                    outcomes |= self._outcomes(Job(own, job.expression), stop, on_test)
                return outcomes
            if not rest:
                outcomes[tests[0]] = Outcome("error", "", f"{_death(code)} outside of any test")
                return outcomes
            outcomes[rest[0]] = Outcome("failed", "", f"{_death(code)} in this test")
            tests = tuple(rest[1:])
            if not tests:
                return outcomes
        reason = f"not run: the interpreter died {_LIVES} times in this job"
        return outcomes | {test: Outcome("error", "", reason) for test in tests}

    def _run_once(
        self,
        tests: Iterable[str],
        expression: str,
        outcomes: Outcomes,
        stop: threading.Event,
        on_test: Callable[[int], None],
    ) -> int:
        """Run pytest once, add what ended to `outcomes`, and return its exit code."""
        # Not below self.folder: sockets lie there, and their paths may have 107 characters.
        with tempfile.TemporaryDirectory(prefix="kvfix-", ignore_cleanup_errors=True) as folder:
            log = Path(folder, "log.jsonl")
            words = [f"--report-log={log}", *(["-k", expression] if expression else []), *tests]
            with Path(folder, "said").open("w") as said:
                variables = {**os.environ, **self._variables(), "TMPDIR": folder}
                words = self._pytest(*words)
                with in_own_group(words, cwd=self.folder, env=variables, output=said) as process:
                    code = _wait(process, log, stop, on_test)
            if log.is_file():
                outcomes.update(outcomes_of(log, self.folder))
        return code

    def collect(self, job: Job) -> list[str]:
        """Return the node ids of a job in the order in which they are run; none if it crashes."""
        words = ["--collect-only", *(["-k", job.expression] if job.expression else []), *job.tests]
        try:
            result = run(
                self._pytest(*words),
                cwd=self.folder,
                env=self._variables(),
                check=False,
                timeout=_START,
            )
        except CommandError:  # the time is up
            return []
        starts = tuple(f"{file}::" for file in job.files)
        return [line for line in result.stdout.splitlines() if line.startswith(starts)]

    def _pytest(self, *words: str) -> list[str]:
        plugins = [word for plugin in PLUGINS for word in ("-p", plugin.stem)]
        return [
            str(self._environment.python), "-m", "pytest", "-q", *plugins,
            "-p", "no:cacheprovider", "--rootdir", str(self.folder),
            "--continue-on-collection-errors", f"--timeout={LIMIT:g}", *words,
        ]  # fmt: skip


def _wait(
    process: Popen[bytes],
    log: Path,
    stop: threading.Event,
    on_test: Callable[[int], None],
) -> int:
    """Wait for pytest's end and return its exit code; kill it where it stalls or is stopped."""
    ended = 0
    heard = time.monotonic()
    while True:
        code = process.poll()
        now = log.read_bytes().count(b'"when": "teardown"') if log.is_file() else 0
        if now != ended:
            on_test(now - ended)
            ended, heard = now, time.monotonic()
        if code is not None:
            return code
        if time.monotonic() - heard > (LIMIT + _GRACE if ended else _START):
            return -signal.SIGKILL
        if stop.wait(0.3):
            raise InterruptedError


def _death(code: int) -> str:
    if code == -signal.SIGKILL:
        return "no sign of life, killed"
    if code < 0:
        return f"the interpreter died of {signal.Signals(-code).name}"
    return f"the interpreter ended with {code}"
