"""Fixtures of the P/D deployment. `nox -s pd` gives the options; see scripts/pd/.

What a test module takes:

- `side`: the wheel under test; `sides`: both, by name, for a fleet that is half rolled.
- `start`: starts one more server for this test, `start("D", transfer={}, core=1)`, and ends it
  with the test. Give the model with `model=`, anything of `Server` otherwise.
- `pd`: the deployment that all tests share. When a test gets it, P and D are up and P holds no
  block; it may do with them what it likes, including kill them.
- `p_short`: a P of its own whose leases end after `SHORT_LEASE_S`, for the D of `pd`.
- `plain`: the greedy tokens of a plain server of the stock wheel, for each of `PROMPTS`.
- `prompts`: an endless iterator over `PROMPTS`. Take each prompt from it: when one comes again, no
  server has it in its prefix cache any more.
- `note`: `note(name=value)` puts a measured figure into the report.

A test that shows defects names their fixes: `@pytest.mark.shows("41269", "K05")`. It has to fail on
the stock wheel of every release that one of them affects, by an assertion of its own file, and to
pass on the patched one. A server that does not come up is an error on either side. A test without
that mark has to pass on both. `@pytest.mark.patched_only` leaves a test out of the stock side.
`@pytest.mark.program("x")` leaves it out of both where there is no program x, and
`@pytest.mark.since("0.28.0")` on earlier releases, and `@pytest.mark.until("0.28.0")` on later
ones, with a line that says so.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.pd.client import body, tokens_of
from tests.pd.deployment import (
    PROMPTS,
    SHORT_LEASE_S,
    TOKENS,
    Deployment,
    Note,
    Plain,
    Start,
    leases_of,
)
from tests.pd.model import make_model
from tests.pd.server import Server, Side, release


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add where the two sides lie, which one is under test, and where logs go."""
    group = parser.getgroup("pd")
    for name in ("stock", "patched"):
        group.addoption(f"--pd-{name}", type=Path, help=f"folder with the {name} wheel's content")
    group.addoption("--pd-side", choices=("stock", "patched"), default="patched")
    group.addoption("--pd-work", type=Path, help="folder for models")
    group.addoption("--pd-logs", type=Path, help="folder for the servers' logs")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    config.addinivalue_line("markers", "shows(*fixes): fails where these fixes are missing")
    config.addinivalue_line("markers", "patched_only: not for the stock side")
    config.addinivalue_line("markers", "program(name): only where it is on the path")
    config.addinivalue_line("markers", "since(release): from this release on")
    config.addinivalue_line("markers", "until(release): up to this release")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tell the report what each test shows, and leave out what is not for this side."""
    for item in items:
        for mark in item.iter_markers("shows"):
            item.user_properties.append(("shows", mark.args))
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    left_out = []
    for item in items:
        missing = [*_missing(item)]
        for what in missing:
            terminal.write_line(f"left out, {what}: {item.nodeid}")
        on_stock = config.option.pd_side == "stock"
        if missing or (on_stock and item.get_closest_marker("patched_only")):
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _missing(item: pytest.Item) -> Iterator[str]:
    """Say why a test cannot be run here."""
    for (program,) in (mark.args for mark in item.iter_markers("program")):
        if not shutil.which(program):
            yield f"as there is no {program} on the path"
    for (first,) in (mark.args for mark in item.iter_markers("since")):
        if release < Version(first):
            yield f"before {first}"
    for (last,) in (mark.args for mark in item.iter_markers("until")):
        if release > Version(last):
            yield f"after {last}"


@pytest.fixture(scope="session")
def sides(pytestconfig: pytest.Config) -> dict[str, Side]:
    return {name: Side(name, pytestconfig.getoption(f"pd_{name}")) for name in ("stock", "patched")}


@pytest.fixture(scope="session")
def side(pytestconfig: pytest.Config, sides: dict[str, Side]) -> Side:
    return sides[pytestconfig.option.pd_side]


@pytest.fixture(scope="session")
def model(pytestconfig: pytest.Config) -> Path:
    return make_model(pytestconfig.option.pd_work / "llama")


@pytest.fixture(scope="session")
def logs(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Return a function that gives each server a log of its own."""
    counts: dict[str, int] = {}

    def log(name: str) -> Path:
        counts[name] = counts.get(name, 0) + 1
        folder: Path = pytestconfig.option.pd_logs
        return folder / f"{name}-{counts[name]}.log"

    return log


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    def write(**figures: object) -> None:
        for name, value in figures.items():
            record_property(name, value)

    return write


@pytest.fixture
def start(side: Side, model: Path, logs: Callable[[str], Path]) -> Iterator[Start]:
    with ExitStack() as stack:

        def one(name: str, **options: object) -> Server:
            given = {"side": side, "model": model, **options}
            return stack.enter_context(Server(name=name, log=logs(name), **given))  # type: ignore[arg-type]

        yield one


@pytest.fixture(scope="session")
def plain(
    pytestconfig: pytest.Config, sides: dict[str, Side], model: Path, logs: Callable[[str], Path]
) -> Plain:
    """Ask a plain server of the stock wheel; a later run with the same inputs reads its answers."""
    stock = sides["stock"]
    given = [stock.wheel, (model / "model.safetensors").read_bytes().hex(), *PROMPTS]
    key = hashlib.sha256("\n".join(given).encode()).hexdigest()
    kept: Path = pytestconfig.option.pd_work / f"plain-{key[:16]}.json"
    if not kept.is_file():
        with Server(stock, "plain", model, logs("plain")) as server:
            server.wait_ready()
            asked = body(list(PROMPTS), TOKENS)
            answer = server.post("/v1/completions", asked, timeout=600.0).raise_for_status()
        part = kept.with_suffix(".part")
        part.write_text(json.dumps(tokens_of(answer.json())))
        part.replace(kept)
    return dict(zip(PROMPTS, json.loads(kept.read_text()), strict=True))


@pytest.fixture(scope="session")
def prompts() -> Iterator[str]:
    return cycle(PROMPTS)


@pytest.fixture(scope="session")
def shared(
    plain: Plain, side: Side, model: Path, logs: Callable[[str], Path]
) -> Iterator[Deployment]:
    """The deployment of the session; `plain` has had the machine for itself before."""
    deployment = Deployment(side, model, logs)
    yield deployment
    deployment.stop()


@pytest.fixture
def pd(shared: Deployment) -> Deployment:
    return shared.ready()


@pytest.fixture
def p_short(start: Start) -> Server:
    return start("P-short-lease", **leases_of(SHORT_LEASE_S)).wait_ready()
