"""What operators see when something goes wrong: the counts of the fixes, and the alerts.

A real Prometheus reads both servers, with the rules of deploy/alerts.yaml, and answers the queries
of deploy/dashboard.json. PyPI has none; Debian's package of that name does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.pd.client import body, gone_p, prefill
from tests.pd.deployment import (
    SHORT_LEASE_S,
    Deployment,
    Note,
    Start,
    ask,
    wait_for_the_end_of_leases,
)
from tests.pd.machine import Group, free_ports
from tests.pd.server import Server
from tests.support.harness import HarnessError

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "alerts.yaml"
DASHBOARD = DEPLOY / "dashboard.json"
PLACES = {"$__rate_interval": "1m", "$__range": "5m", "$prefill": ".*", "$decode": ".*"}
"""What stands where Grafana has the dashboard's variables."""
PATIENCE_S = 60.0
"""For Prometheus to read the servers, evaluate its rules and say so; it does each once a second."""

Cause = Callable[[], None]


def counted(server: Server) -> dict[tuple[str, str], float]:
    """Return what the fixes have done on a server, by fix and reason, without what is 0."""
    found: dict[tuple[str, str], float] = {}
    for labels, value in server.samples("kv_transfer_fixes_total"):
        name = labels["fix"], labels["reason"]
        found[name] = found.get(name, 0.0) + value
    return {name: value for name, value in found.items() if value}


@pytest.fixture
def faults(p_short: Server, pd: Deployment, prompts: Iterator[str]) -> Cause:
    """Cause a fault of each kind that the alerts are about and that a client can see to."""

    def cause() -> None:
        late = next(prompts)
        offered = prefill(p_short, late)
        bad = {**prefill(p_short, next(prompts)), "remote_block_ids": [[1]]}
        assert ask(pd.d, "bad " + late, bad).status_code == 200
        assert ask(pd.d, "gone " + late, gone_p(offered, "alerts")).status_code == 200
        too_long = body(late, 10**6, kv_transfer_params=prefill(p_short, next(prompts)))
        assert pd.d.post("/v1/completions", too_long).status_code == 400
        wait_for_the_end_of_leases(p_short, SHORT_LEASE_S)
        assert ask(pd.d, late, offered).status_code == 200
        for server in (p_short, pd.d):
            server.blocks_held()  # a step, with which engines tell their servers

    return cause


@pytest.fixture
def prometheus(p_short: Server, pd: Deployment, tmp_path: Path) -> Iterator[httpx.Client]:
    """A Prometheus that reads both servers each second."""
    jobs = [
        {"job_name": name, "static_configs": [{"targets": [server.url.removeprefix("http://")]}]}
        for name, server in (("prefill", p_short), ("decode", pd.d))
    ]
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings = {"global": every, "rule_files": [str(ALERTS)], "scrape_configs": jobs}
    (tmp_path / "prometheus.json").write_text(json.dumps(settings))  # which is YAML
    address = f"127.0.0.1:{free_ports(1)[0]}"
    words = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.json'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address={address}",
    ]
    group = Group(words, {}, tmp_path / "prometheus.log")
    with httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
        try:
            _wait(lambda: _is_read(client), "that Prometheus reads both servers")
            yield client
        finally:
            group.stop()


def _is_read(prometheus: httpx.Client) -> bool:
    try:
        answer = prometheus.get("/api/v1/query", params={"query": "sum(up)"})
    except httpx.TransportError:
        return False
    result = answer.json()["data"]["result"] if answer.status_code == 200 else []
    return bool(result) and result[0]["value"][1] == "2"


def _firing(prometheus: httpx.Client) -> set[str]:
    alerts = prometheus.get("/api/v1/alerts").raise_for_status().json()["data"]["alerts"]
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def _shown(prometheus: httpx.Client) -> dict[str, int]:
    """Return how many series each panel of the dashboard shows."""
    shown: dict[str, int] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for variable, value in PLACES.items():
                query = query.replace(variable, value)
            answer = prometheus.get("/api/v1/query", params={"query": query}).raise_for_status()
            series = answer.json()["data"]["result"]
            shown[panel["title"]] = shown.get(panel["title"], 0) + len(series)
    return shown


def _wait(what: Callable[[], bool], wanted: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > deadline:
            raise HarnessError(f"nothing of it in {PATIENCE_S:.0f} s", wanted)
        time.sleep(0.5)


@pytest.mark.shows("K21")
def test_the_metrics_say_which_fix_has_acted(
    p_short: Server, pd: Deployment, faults: Cause, note: Note
) -> None:
    """Counts of workers, engine cores and API servers, each a process of its own."""
    before = counted(pd.d)
    faults()
    on_d, on_p = counted(pd.d), counted(p_short)
    note(
        on_d={" ".join(k): v for k, v in on_d.items()},
        on_p={" ".join(k): v for k, v in on_p.items()},
    )
    new = {name for name, value in on_d.items() if value > before.get(name, 0.0)}
    assert {
        ("K04", "params_refused"),
        ("K05", "rejection_passed_on"),
        ("K20", "read_refused"),
    } <= new
    assert ("K20", "lease_ended_unread") in on_p


@pytest.mark.shows("K21")
def test_the_metrics_of_several_api_servers_are_one_count(
    pd: Deployment, start: Start, prompts: Iterator[str], note: Note
) -> None:
    """Each API server counts, and an engine tells one of them: whichever answers has it all."""
    pd.d.stop()  # two cores are few
    d = start("D-of-two", transfer={}, core=0, arguments=("--api-server-count", "2")).wait_ready()
    times = 10
    for _ in range(times):  # connections fall to one API server or the other by chance
        prompt = next(prompts)
        offered = prefill(pd.p, prompt)
        too_long = body(prompt, 10**6, kv_transfer_params=offered)
        assert d.post("/v1/completions", too_long).status_code == 400
        no_port = {**prefill(pd.p, next(prompts)), "remote_port": "x"}
        assert ask(d, prompt, no_port).status_code == 400
        too_few = {**prefill(pd.p, next(prompts)), "remote_block_ids": [[1]]}
        assert ask(d, prompt, too_few).status_code == 200
    d.blocks_held()  # a step, with which the engine tells
    expected = {
        ("", "rejection_passed_on"): times,
        ("", "params_refused"): times,
        ("0", "params_refused"): times,
    }
    for _ in range(4):  # by either server
        assert {
            (labels["engine"], labels["reason"]): value
            for labels, value in d.samples("kv_transfer_fixes_total")
            if value
        } == expected
    note(counted={" ".join(name): value for name, value in expected.items()})


@pytest.mark.program("prometheus")
@pytest.mark.shows("K21")
def test_the_alerts_fire(prometheus: httpx.Client, faults: Cause, note: Note) -> None:
    wanted = {"KVParamsRefused", "KVReadsRefused", "KVReceivesFail"}
    quiet = _firing(prometheus)
    begin = time.monotonic()
    faults()
    while not wanted <= _firing(prometheus) and time.monotonic() - begin < 2 * PATIENCE_S:
        time.sleep(0.5)
    fired = _firing(prometheus)
    shown = _shown(prometheus)
    note(firing_before=sorted(quiet), firing=sorted(fired), after_s=round(time.monotonic() - begin))
    note(shown=shown)
    assert wanted <= fired
    assert not wanted & quiet
    assert {title for title, series in shown.items() if not series} <= {"Held for readers only"}
