"""The metrics that a patched server shows, as its sources name them, and how an expression does."""

from __future__ import annotations

import re

from packaging.version import Version

from scripts.project import OVERLAY
from scripts.upstream.tree import read_source

NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"

SINCE = {"vllm:nixl_num_notifications_after_expiry": "0.32.0"}
"""Metrics that alerts and dashboard show, and earlier releases do not have."""

_SUFFIXES = re.compile(r"_(total|bucket|sum|count)$")


def missing(expression: str, release: str) -> list[str]:
    """Return the metrics of a PromQL expression that `release` does not show, patched."""
    split = Version(release) >= Version("0.20.0")
    stats = f"{NIXL}/stats.py" if split else f"{NIXL}_connector.py"
    theirs = [read_source(release, one) for one in (stats, "vllm/v1/metrics/loggers.py")]
    text = "".join([*theirs, (OVERLAY / "v1/metrics/fixes.py").read_text()])
    names = {_SUFFIXES.sub("", name) for name in re.findall(r"vllm:\w+", expression)}
    here = {n for n in names if Version(release) >= Version(SINCE.get(n, "0"))}
    return sorted(name for name in here if f'"{name}"' not in text)


def counted() -> list[tuple[str, str]]:
    """Return what the fixes count, by fix and reason."""
    text = (OVERLAY / "distributed/kv_transfer/fix_counts.py").read_text()
    return re.findall(r'= "(K?\d+)", "(\w+)"', text)


def unknown_reasons(expression: str) -> list[str]:
    """Return what an expression looks for among the reasons, and no fix counts."""
    reasons = {reason for _, reason in counted()}
    asked = re.findall(r'reason=~?"([^"]+)"', expression)
    parts = [part for one in asked for part in one.replace("(push_)?", "").split("|")]
    return [part for part in parts if part not in reasons]
