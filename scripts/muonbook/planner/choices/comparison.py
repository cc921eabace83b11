"""Which Muon: a world planned by every algorithm, each beside AdamW laid out alike on the same grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distmuon.optim.newton_schulz import flops
from muonbook.planner.algorithms import ALGORITHMS, Algorithm
from muonbook.planner.world_plan import WorldPlan, WorldSetting, short


@dataclass(frozen=True)
class Compared:
    """An algorithm in a world, and AdamW in it."""

    algorithm: Algorithm
    muon: WorldPlan
    adamw: WorldPlan

    @property
    def over_adamw(self) -> float:
        return self.muon.step_seconds / self.adamw.step_seconds

    @property
    def newton_schulz_share(self) -> float:
        """Which share of a step's seconds Newton–Schulz takes; every bucket waits for its slowest rank."""
        return self.muon.seconds["Newton–Schulz"] / self.muon.step_seconds

    @property
    def repeats(self) -> float:
        """How many ranks orthogonalize the same matrix, on average, weighted by operations."""
        setting = self.muon.setting
        once = sum(flops(weight.shape) for weight in setting.shape.weights() if weight.muon)
        return setting.degrees.ranks * self.muon.flops[0] / once

    def as_dict(self) -> dict[str, Any]:
        """Return it for a results file: Muon's plan, and how it stands to AdamW's."""
        stands = {"over_adamw": short(self.over_adamw), "repeats": short(self.repeats)}
        return {"algorithm": self.algorithm.title} | stands | self.muon.as_dict()


def compared(setting: WorldSetting) -> list[Compared]:
    """Plan a world by every algorithm of `ALGORITHMS`, whichever `setting` names."""
    worlds = ((each, setting.by(each), setting.by(each.adamw)) for each in ALGORITHMS.values())
    return [Compared(each, WorldPlan(muon), WorldPlan(adamw)) for each, muon, adamw in worlds]
