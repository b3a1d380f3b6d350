"""The picture of `nox -s pd`: P's KV-cache usage while D refuses requests, stock and patched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLOURS = {"stock": "#b3261e", "patched": "#1a6b3c"}


def draw(release: str, figures: Mapping[str, Mapping[str, Any]], folder: Path) -> Path:
    """Write `pd-usage-<release>.svg` into `folder`; the same figures, the same bytes.

    Args:
        release: The vLLM release.
        figures: By side, what the scenario has measured: `usage`, pairs of seconds and usage from
            0 to 1; `last_refusal_s`; `refused`; `lease_s`.
        folder: Where the picture goes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "kvfix"}):
        chart, axes = pyplot.subplots(figsize=(7.2, 3.2), layout="constrained")
        for side, measured in figures.items():
            seconds, usage = zip(*measured["usage"], strict=True)
            percent = [100 * one for one in usage]
            axes.plot(seconds, percent, color=_COLOURS[side], label=side, linewidth=1.8)
            axes.axvline(
                measured["last_refusal_s"], color=_COLOURS[side], linestyle=":", linewidth=1
            )
        axes.spines[["top", "right"]].set_visible(False)
        one = next(iter(figures.values()))
        axes.set(
            xlabel="seconds (dotted: the last refusal)",
            ylabel="KV cache of P in use, %",
            title=f"{one['refused']} requests that D refuses, vLLM {release}",
            ylim=(-2, 102),
        )
        axes.legend(title=f"lease {one['lease_s']} s (default: 480)", frameon=False)
        path = folder / f"pd-usage-{release}.svg"
        folder.mkdir(parents=True, exist_ok=True)
        chart.savefig(path, metadata={"Date": None})
        pyplot.close(chart)
    return path
