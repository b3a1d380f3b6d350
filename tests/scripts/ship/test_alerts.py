"""The alerts speak of metrics that there are and fire when they should; the page has every one."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest
import yaml

from scripts.patchset.series import carried_releases
from scripts.project import OVERLAY, ROOT, project
from scripts.system.process import run
from scripts.upstream.tree import read_source
from tests.scripts.ship.exported import NIXL, counted, missing, unknown_reasons

(GROUP,) = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())["groups"]
RULES: list[dict[str, Any]] = GROUP["rules"]
PAGE = (ROOT / "docs" / "operating.md").read_text()
SERIES = ROOT / "tests" / "scripts" / "ship" / "alerts.yaml"


@pytest.mark.parametrize("release", carried_releases())
def test_every_metric_is_one_of_the_release(release: str) -> None:
    assert {rule["alert"]: missing(rule["expr"], release) for rule in RULES} == {
        rule["alert"]: [] for rule in RULES
    }


def test_every_reason_is_counted() -> None:
    assert [reason for rule in RULES for reason in unknown_reasons(rule["expr"])] == []


def test_there_are_series_on_which_each_fires_and_such_on_which_it_does_not() -> None:
    said = [
        t for test in yaml.safe_load(SERIES.read_text())["tests"] for t in test["alert_rule_test"]
    ]
    for expected in (True, False):
        tried = {one["alertname"] for one in said if bool(one["exp_alerts"]) is expected}
        assert tried == {rule["alert"] for rule in RULES}


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool on the path")
def test_they_fire_on_these_series_alone() -> None:
    run(["promtool", "check", "rules", ROOT / "deploy" / "alerts.yaml"], timeout=60)
    run(["promtool", "test", "rules", SERIES], timeout=60)


def test_the_page_has_every_reason() -> None:
    rows = re.findall(r"^\| (K?\d+) \| (`.+?`) \|", PAGE, re.MULTILINE)
    said = [(fix, reason) for fix, cell in rows for reason in re.findall(r"`(\w+)`", cell)]
    assert len(said) > 8
    assert sorted(said) == sorted(counted())


def test_the_page_has_every_alert_and_no_other() -> None:
    assert re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE) == [rule["alert"] for rule in RULES]


def test_what_the_page_searches_for_is_logged() -> None:
    release = project().default_release
    stock = [read_source(release, f"{NIXL}/{name}.py") for name in ("worker", "scheduler")]
    ours = [path.read_text() for path in sorted(OVERLAY.rglob("*.py"))]
    # A message is broken over lines: string, line end, string.
    text = re.sub(r'"\s*\n\s*f?"', "", "\n".join([*stock, *ours]))
    table, _, rest = PAGE.partition("\n\nAnd in")
    cells = [row.split("|")[4] for row in table.splitlines() if row.startswith("| `")]
    said = [words for cell in cells for words in re.findall(r"`([^`]+)`", cell)]
    said += re.findall(r"`([^`]+)`", rest.partition("## ")[0])
    assert len(said) > 8
    missing = [w for w in said if w.removeprefix("NIXL transfer failure: ") not in text]
    assert missing == []
