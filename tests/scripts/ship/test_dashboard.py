"""The dashboard: what Grafana knows, of metrics that there are, in PromQL that Prometheus reads."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.patchset.series import carried_releases
from scripts.project import ROOT
from scripts.system.process import run
from tests.scripts.ship.exported import missing, unknown_reasons

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
VARIABLES = [one["name"] for one in DASHBOARD["templating"]["list"]]


@pytest.mark.parametrize("release", carried_releases())
def test_every_metric_is_one_of_the_release(release: str) -> None:
    assert missing(" ".join(EXPRESSIONS), release) == []
    queries = [one["query"]["query"] for one in DASHBOARD["templating"]["list"][1:]]
    assert missing(" ".join(queries), release) == []


def test_every_reason_is_counted() -> None:
    assert [reason for each in EXPRESSIONS for reason in unknown_reasons(each)] == []


def test_it_shows_every_metric_of_the_alerts() -> None:
    alerts = (ROOT / "deploy" / "alerts.yaml").read_text()
    assert set(re.findall(r"vllm:\w+", alerts)) <= set(re.findall(r"vllm:\w+", str(EXPRESSIONS)))


def test_whoever_opens_it_chooses_where_to_look() -> None:
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval", "__range", "__all"} == set(VARIABLES)
    sources = [target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]]
    sources += [panel["datasource"]["uid"] for panel in PANELS]
    assert set(sources) == {"${datasource}"}


def test_no_panel_lies_over_another() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in DASHBOARD["panels"]
        for x, y in itertools.product(range(panel["gridPos"]["w"]), range(panel["gridPos"]["h"]))
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24


def unknown(ours: object, theirs: object, where: str = "") -> Iterator[str]:
    """Yield the places of what has not come back from Grafana's own types."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            if key in theirs:
                yield from unknown(value, theirs[key], f"{where}.{key}")
            else:
                yield f"{where}.{key}"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from unknown(*pair, f"{where}[{index}]")
    elif ours != theirs:
        yield where


def test_grafana_knows_every_field() -> None:
    """Read into the types of Grafana's own SDK, it comes out with all that went in."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="no Python 3.11")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    plugins.register_default_plugins()

    def lost(board: dict[str, Any]) -> list[str]:
        text = encoder.JSONEncoder().encode(models.Dashboard.from_json(board))
        return [*unknown(board, json.loads(text))]

    assert lost(DASHBOARD) == []
    assert lost({**DASHBOARD, "color": "red"}) == [".color"]  # it does look
    panel = {**PANELS[0], "axis": 1}
    assert lost({**DASHBOARD, "panels": [panel]}) == [".panels[0].axis"]


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool on the path")
def test_prometheus_reads_every_expression(tmp_path: Path) -> None:
    """As rules that record, with what Grafana puts in place of its variables."""
    place = {"$__rate_interval": "1m", "$__range": "1h", "$prefill": "p", "$decode": "d"}
    rules = []
    for number, expression in enumerate(EXPRESSIONS):
        for variable, value in place.items():
            expression = expression.replace(variable, value)
        rules.append({"record": f"panel:{number}", "expr": expression})
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    said = run(["promtool", "check", "rules", file], timeout=60).stdout
    assert f"{len(EXPRESSIONS)} rules found" in said
