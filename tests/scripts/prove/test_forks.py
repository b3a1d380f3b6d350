"""Runs in forks of one process do what fresh processes do, and end with what started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.project import ROOT
from scripts.prove import pytest as runs
from scripts.prove.environment import Environment, stage
from scripts.prove.forks import Fork, run_in_forks
from scripts.prove.outcomes import Outcome
from scripts.prove.pytest import Run, run_together
from scripts.system.errors import CommandError
from scripts.system.process import Finished

PROBE = """\
import json, os, sys
from importlib.metadata import version
import vllm
print(json.dumps({
    "name": __name__, "words": sys.argv[1:], "file": sys.argv[0], "path": sys.path,
    "variables": dict(os.environ), "vllm": vllm.SIDE, "pytest": version("pytest"),
    "tests": sorted(name for name in sys.modules if name.startswith("tests")),
}))
print("to the other stream", file=sys.stderr)
sys.exit(len(sys.argv) - 1)
"""


@pytest.fixture
def environment() -> Environment:
    """Return this interpreter in place of one with vLLM; torch and transformers are not there."""
    made = object.__new__(Environment)
    made.python = Path(sys.executable)
    return made


def side(folder: Path, name: str, **modules: str) -> Path:
    """Make a folder with a `vllm` that says which it is, and with more modules."""
    package = folder / name / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"SIDE = {name!r}\n")
    for module, code in modules.items():
        (package.parent / f"{module}.py").write_text(code)
    return package.parent


def test_a_fork_is_what_a_fresh_process_is(environment: Environment, tmp_path: Path) -> None:
    sides = [side(tmp_path, name, probe=PROBE) for name in ("stock", "patched", "alone")]
    asked = [Fork(["probe", *"abc"[:count]], one) for count, one in enumerate(sides)]
    ended = run_in_forks(environment, asked, timeout=60)
    for one, run, count in zip(sides, ended, range(3), strict=True):
        fresh = subprocess.run(
            [sys.executable, "-m", *asked[count].arguments],
            cwd=stage(),
            env=environment.variables(one),
            capture_output=True,
            text=True,
            check=False,
        )
        forked, other = json.loads(run.stdout), json.loads(fresh.stdout)
        assert forked["vllm"] == one.name
        # Its folder for temporary files goes, for it does not remove them itself.
        assert not Path(forked["variables"].pop("TMPDIR")).exists()
        other["variables"].pop("TMPDIR", None)
        assert forked == other
        assert run.stderr == fresh.stderr == "to the other stream\n"
        assert run.returncode == fresh.returncode == count


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("raise ValueError('no good')", 1),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import time; time.sleep(60)", -signal.SIGKILL),
        ("import sys; sys.exit('no good')", 1),
        ("import atexit; atexit.register(print, 'at exit')", 0),
        (
            "import threading, time\n"
            "def late(): time.sleep(0.2); print('at exit')\n"
            "threading.Thread(target=late).start()",
            0,
        ),
    ],
)
def test_how_a_run_ends(environment: Environment, tmp_path: Path, code: str, ended: int) -> None:
    one = side(tmp_path, "stock", program=code)
    runs = [Fork(["program"], one), Fork(["json.tool", "--help"], one)]
    first, second = run_in_forks(environment, runs, timeout=2)
    assert first.returncode == ended
    assert ("at exit" in first.stdout) == (ended == 0)
    assert ("no good" in first.stderr) == (ended == 1)
    assert second.returncode == 0
    assert "usage" in second.stdout


LISTENER = """\
import socket, sys, time
from pathlib import Path
me, other = map(Path, sys.argv[1:])
with socket.create_server(("127.0.0.1", int(me.name))) as listener:
    me.touch()
    while not other.exists():
        time.sleep(0.01)
    with socket.create_connection(("127.0.0.1", int(me.name)), timeout=5):
        print(listener.accept()[1][0])
    other.with_suffix(".done").touch()
    while not me.with_suffix(".done").exists():
        time.sleep(0.01)
"""


def test_two_forks_listen_at_one_port(environment: Environment, tmp_path: Path) -> None:
    asked = "from tests.programs import forks; raise SystemExit(not forks.can_isolate())"
    if subprocess.run([sys.executable, "-c", asked], cwd=ROOT, check=False).returncode:
        pytest.skip("this system gives forks no loopback of their own; they share one then")
    port = "5600"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    marks = [str(tmp_path / name / port) for name in ("a", "b")]
    one = side(tmp_path, "stock", program=LISTENER)
    runs = [Fork(["program", *marks], one), Fork(["program", *reversed(marks)], one)]
    ended = run_in_forks(environment, runs, timeout=30)
    assert [(run.returncode, run.stdout) for run in ended] == [(0, "127.0.0.1\n")] * 2


PARSING = """\
import ast, builtins, threading, time
compiling, most, compile = [], [], builtins.compile
def slow(*words, **more):
    compiling.append(1)
    most.append(len(compiling))
    time.sleep(0.05)
    compiling.pop()
    return compile(*words, **more)
builtins.compile = slow
threads = [threading.Thread(target=ast.parse, args=("a = 1",)) for _ in range(4)]
[one.start() for one in threads], [one.join() for one in threads]
print(len(most), max(most))
"""


def test_one_thread_at_a_time_parses_python(environment: Environment, tmp_path: Path) -> None:
    one = side(tmp_path, "stock", program=PARSING)
    (ended,) = run_in_forks(environment, [Fork(["program"], one)], timeout=60)
    assert (ended.stdout, ended.stderr) == ("4 1\n", "")


SLEEPER = (  # for which the process does not wait
    "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (SLEEPER, "2 thr"),
        ("import vllm", "'vllm'"),
    ],
)
def test_what_a_fork_would_not_have_like_a_fresh_process_is_refused(
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    said: str,
) -> None:
    one = side(tmp_path, "stock", torch=code)
    variables = environment.variables(one)
    monkeypatch.setattr(environment, "variables", lambda _: variables)
    with pytest.raises(CommandError, match="cannot fork") as caught:
        run_in_forks(environment, [Fork(["json.tool", "--help"])], timeout=60)
    assert said in caught.value.found


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_what_ends_the_tools_ends_all_runs(tmp_path: Path, end: signal.Signals) -> None:
    program = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    one = side(tmp_path, "stock", program=program)
    marks = [tmp_path / "first", tmp_path / "second"]
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from scripts.prove.environment import Environment\n"
        "from scripts.prove.forks import Fork, run_in_forks\n"
        "made = object.__new__(Environment)\n"
        "made.python = Path(sys.executable)\n"
        f"runs = [Fork(['program', mark], Path({str(one)!r})) for mark in sys.argv[1:]]\n"
        "run_in_forks(made, runs, timeout=60)\n"
    )
    tools = subprocess.Popen(
        [sys.executable, script, *map(str, marks)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    try:
        until(lambda: all(mark.is_file() and mark.read_text() for mark in marks))
        tools.send_signal(end)
        _, error = tools.communicate(timeout=30)
    finally:
        tools.kill()
    assert (b"KeyboardInterrupt" in error) == (end == signal.SIGINT)
    for mark in marks:
        until(lambda mark=mark: not alive(int(mark.read_text())))


def until(holds: object) -> None:
    assert callable(holds)
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it does not come to be"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_each_run_of_pytest_has_its_own_outcomes(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter([1, -9, 4])

    def ended(_: Environment, asked: list[Fork], *, timeout: float) -> list[Finished]:
        *sides, other = asked
        found = []
        for fork, code in zip(sides, codes, strict=False):
            words = list(fork.arguments)
            log = Path(words[words.index("--report-log") + 1])
            node = {"$report_type": "TestReport", "nodeid": "a::t", "when": "call"}
            if code != 4:
                log.write_text(json.dumps({**node, "outcome": "passed"}))
            found.append(Finished(words, code, f"said {fork.shadow}", ""))
        return [*found, Finished(list(other.arguments), 0, "other", "")]

    monkeypatch.setattr(runs, "run_in_forks", ended)
    wanted = {name: Run(["a"], tmp_path / name) for name in ("one", "killed", "empty")}
    outcomes, [other] = run_together(environment, wanted, Fork(["x"]))
    assert other.stdout == "other"
    assert outcomes["one"] == {"a::t": Outcome("passed")}
    assert outcomes["killed"].keys() == {"a::t", "a"}
    for name, code in (("killed", -9), ("empty", 4)):
        said = f"pytest ended with {code}: said {tmp_path / name}"
        assert outcomes[name]["a"] == Outcome("error", "", said, "harness")
