"""What a receive of KV costs over real NIXL agents, the question whether P held it included."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from scripts.bench.pairs import Times, measure_pairs
from scripts.patchset.target import Target
from scripts.project import ROOT
from scripts.prove.environment import Environment

_PAIRS = 5
_LIMIT = 1.03
_RECEIVES = {
    "large": {
        "1 64": "a receive of 64 blocks of 2 MiB",
        "8 64": "8 receives at once, of 64 blocks of 2 MiB each",
    },
    "small": {
        "1 1": "a receive of 1 block of 8 KiB",
        "1 64": "a receive of 64 blocks of 8 KiB",
        "64 1": "64 receives at once, of 1 block of 8 KiB each",
        "64 64": "64 receives at once, of 64 blocks of 8 KiB each",
    },
}
"""What `tests.programs.transfers` is asked: receives at once, and blocks of each. They are as large
as those of a model of 8 billion parameters, or so small that little more is left than what the
engine does."""


@dataclass(frozen=True)
class TransfersReport:
    """How long it takes until D's scheduler knows that KV is there.

    Attributes:
        turns: how often each was measured, in all pairs of processes together.
        patched_over_stock: by receives, the median ratio of times; transfers per second are in the
            same ratio, turned over.
        stock_microseconds: by the same, the time on stock, so that ratios have a scale.
    """

    release: str
    turns: int
    patched_over_stock: dict[str, float]
    stock_microseconds: dict[str, float]

    def rows(self) -> dict[str, str]:
        """Return what was measured, for a table."""
        return {
            f"{receives}, patched / stock": f"{ratio:.3f} of {self.stock_microseconds[receives]} µs"
            for receives, ratio in self.patched_over_stock.items()
        }

    @property
    def is_within_limits(self) -> bool:
        """Whether nothing costs more than kvfix promises."""
        return all(ratio <= _LIMIT for ratio in self.patched_over_stock.values())


def measure_transfers(release: str, turns: int) -> TransfersReport:
    """Measure receives between a P and a D that are both stock, or both patched.

    Args:
        release: of vLLM.
        turns: of each pair of deployments.
    """
    environment = Environment(release).make()
    environment.install(environment.stock)
    folder = ROOT / ".nox" / f"bench-transfers-{release}"
    try:
        shadow = environment.shadow(folder, Target.of(release).patches)
        times: dict[str, Times] = {}
        for blocks, receives in _RECEIVES.items():
            program = ("tests.programs.transfers", blocks)
            taken = measure_pairs(
                environment, shadow, program, list(receives), pairs=_PAIRS, turns=turns
            )
            times.update((what, taken[asked]) for asked, what in receives.items())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return TransfersReport(
        release=release,
        turns=turns * _PAIRS,
        patched_over_stock={what: each.ratio for what, each in times.items()},
        stock_microseconds={what: each.stock_microseconds for what, each in times.items()},
    )
