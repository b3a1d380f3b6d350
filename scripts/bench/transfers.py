"""What a receive of KV costs over real NIXL agents, the question whether P held it included."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from scripts.bench.pairs import measure_pairs
from scripts.patchset.target import Target
from scripts.project import ROOT
from scripts.prove.environment import Environment

_PAIRS = 5
_LIMIT = 1.03
_RECEIVES = {
    "1 1": "a receive of 1 block",
    "1 64": "a receive of 64 blocks",
    "64 1": "64 receives at once, of 1 block each",
    "64 64": "64 receives at once, of 64 blocks each",
}
"""What `tests.programs.transfers` is asked: receives at once, and blocks of each."""


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
        program = ("tests.programs.transfers",)
        times = measure_pairs(
            environment, shadow, program, list(_RECEIVES), pairs=_PAIRS, turns=turns
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return TransfersReport(
        release=release,
        turns=turns * _PAIRS,
        patched_over_stock={what: times[asked].ratio for asked, what in _RECEIVES.items()},
        stock_microseconds={
            what: times[asked].stock_microseconds for asked, what in _RECEIVES.items()
        },
    )
