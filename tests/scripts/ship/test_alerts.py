"""The alerts speak of metrics that there are, and the page for operators of every alert."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from packaging.version import Version

from scripts.patchset.series import carried_releases
from scripts.project import OVERLAY, ROOT, project
from scripts.upstream.tree import read_source

(GROUP,) = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())["groups"]
RULES: list[dict[str, Any]] = GROUP["rules"]
PAGE = (ROOT / "docs" / "operating.md").read_text()

NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"


def metrics(release: str) -> str:
    """Return the sources of `release` that make its metrics."""
    split = Version(release) >= Version("0.20.0")
    stats = f"{NIXL}/stats.py" if split else f"{NIXL}_connector.py"
    return "".join(read_source(release, one) for one in (stats, "vllm/v1/metrics/loggers.py"))


@pytest.mark.parametrize("release", carried_releases())
def test_every_metric_is_one_of_the_release(release: str) -> None:
    text = metrics(release)
    for rule in RULES:
        if rule["alert"] == "KVReadAfterItsLease" and Version(release) < Version("0.32.0"):
            continue  # as the rule says
        for name in re.findall(r"vllm:\w+", rule["expr"]):
            assert f'"{name.removesuffix("_total")}"' in text, (rule["alert"], name)


def test_the_page_has_every_alert_and_no_other() -> None:
    assert re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE) == [rule["alert"] for rule in RULES]


def test_what_the_page_searches_for_is_logged() -> None:
    release = project().default_release
    stock = [read_source(release, f"{NIXL}/{name}.py") for name in ("worker", "scheduler")]
    ours = [path.read_text() for path in sorted(OVERLAY.rglob("*.py"))]
    # A message is broken over lines: string, line end, string.
    text = re.sub(r'"\s*\n\s*f?"', "", "\n".join([*stock, *ours]))
    table, _, rest = PAGE.partition("\n\nAnd in")
    cells = [row.split("|")[3] for row in table.splitlines() if row.startswith("| `")]
    said = [words for cell in cells for words in re.findall(r"`([^`]+)`", cell)]
    said += re.findall(r"`([^`]+)`", rest.partition("## ")[0])
    assert len(said) > 8
    missing = [w for w in said if w.removeprefix("NIXL transfer failure: ") not in text]
    assert missing == []
