"""What blocks cost in learning: Muon, blockwise and periodic, on the language, everybody's learning rate tuned alike.

One process. Where TP would hold a hidden matrix in T pieces, `BlockMuon` orthogonalizes T pieces; all else is what
whole Muon does. T = 8 is no grid that could run here, for the network has 4 heads; blocks do not mind.

Every arm tries the same learning rates, a factor of sqrt(2) apart, on the same tuning seeds, and goes on beyond either
end while the best is there; then all race on the same fresh seeds, and are compared pair by pair. Weight decay and
momentum are those that the race tuned for whole Muon, so if anybody has an advantage, it is whole Muon.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from distmuon.launch import World
from distmuon.optim.muon import Muon
from distmuon.optim.routing import by_algorithm
from distmuon.verify.blocks import BlockMuon
from muonbook.ch04 import tasks
from muonbook.ch04.sweep import RACE_SEEDS, TUNING_SEEDS, best_of, described, shared_out, span, try_rates, verdict
from muonbook.ch04.training import Setting, muon_and_adamw, train

RATES = tuple(0.016 * 2 ** (n / 2) for n in range(4))  # 0.016 to 0.045, around what the race found for whole Muon


class Arm(NamedTuple):
    """One way to orthogonalize. blocks: T. whole_every: k; 1 is Muon, 0 blockwise, what is between periodic."""

    blocks: int
    whole_every: int

    @property
    def title(self) -> str:
        names = {0: "blockwise", 1: "whole"}
        return names.get(self.whole_every, f"periodic, k = {self.whole_every}")

    def optimizers(self, model: nn.Module, setting: Setting) -> list[Optimizer]:
        """Return the optimizers, stepped one after the other."""
        options = {"blocks": self.blocks, "whole_every": self.whole_every}
        ratio = "shape" if self.whole_every else 1.0  # as the strategies do by default
        make = Muon if self == WHOLE else partial(BlockMuon, block_lr_ratio=ratio, **options)
        return muon_and_adamw(by_algorithm(model), setting, make)


WHOLE = Arm(1, 1)


@dataclass(frozen=True)
class Extent:
    """How much is done. farthest: how often tuning goes on beyond an end, at most."""

    steps: int
    arms: Sequence[Arm]
    rates: Sequence[float]
    tuning: Sequence[int]
    seeds: Sequence[int]
    farthest: int


FULL = Extent(
    steps=200,
    arms=(WHOLE, Arm(2, 5), Arm(2, 0), Arm(4, 2), Arm(4, 5), Arm(4, 0), Arm(8, 5), Arm(8, 0)),
    rates=RATES,
    tuning=TUNING_SEEDS[:2],
    seeds=RACE_SEEDS[:5],
    farthest=3,
)
QUICK = Extent(2, (WHOLE, Arm(2, 2), Arm(2, 0)), RATES[:2], TUNING_SEEDS[:1], RACE_SEEDS[:2], 0)

Job = tuple[Arm, float, int]  # arm, learning rate, seed


def measure(world: World, best: Setting, extent: Extent = FULL) -> dict[str, Any]:
    """Tune every arm and race them all; return what is kept, as plain data. Collective.

    best: whole Muon's setting, whose weight decay and momentum all arms have.
    """
    task = tasks.TASKS["language"].shorter(extent.steps)
    assert task.floor is not None
    floor = task.floor()

    def gap(job: Job) -> float:
        arm, lr, seed = job
        return train(task, best.at(lr), seed, arm.optimizers).final - floor

    def losses(points: Sequence[tuple[Arm, float]]) -> list[float]:
        jobs = [(arm, lr, seed) for arm, lr in points for seed in extent.tuning]
        found = iter(shared_out(world, jobs, gap))
        return [statistics.median(next(found) for _ in extent.tuning) for _ in points]

    curves = try_rates(dict.fromkeys(extent.arms, extent.rates), losses, extent.farthest)
    race = [(arm, best_of(curves[arm]), seed) for arm in extent.arms for seed in extent.seeds]
    gaps = dict(zip(race, shared_out(world, race, gap), strict=True))
    rows = []
    for arm in extent.arms:
        lr = best_of(curves[arm])
        rows.append(
            arm._asdict()
            | {"lr": lr, "lrs": list(curves[arm]), "medians": list(curves[arm].values())}
            | {"gaps": [gaps[arm, lr, seed] for seed in extent.seeds]}
        )
    return described(task) | {
        "weight_decay": best.weight_decay,
        "momentum": best.option,
        "tuning_seeds": list(extent.tuning),
        "seeds": list(extent.seeds),
        "rows": [row | against(row["gaps"], rows[0]["gaps"]) for row in rows],
    }


def against(gaps: Sequence[float], whole: Sequence[float]) -> dict[str, Any]:
    """Return by how much gaps exceed whole Muon's, seed by seed, on how many they do, and whether that may be said."""
    found = verdict(gaps, whole)
    return {
        "more_than_whole": [a - b for a, b in zip(gaps, whole, strict=True)],
        "worse": found.losses,
        "better": found.wins,
        "claimed": found.claimed,
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the table: every arm's gap above the floor, and its difference to whole Muon's under the same seeds."""
    count = len(found["seeds"])
    table = [
        f"{found['steps']} steps on the language, {count} seeds: nats per letter above the floor, median [least, most]",
        f"  {'T':>2}  {'':16}{'lr':>7}   {'gap':24}{'more than whole, paired':28}worse on",
    ]
    for row in found["rows"]:
        arm = Arm(row["blocks"], row["whole_every"])
        gap = span(row["gaps"]) if all(map(math.isfinite, row["gaps"])) else "diverged"
        line = f"  {arm.blocks:2}  {arm.title:16}{row['lr']:7.4f}   {gap:24}"
        if arm != WHOLE:
            said = "" if row["claimed"] else "   no difference claimed"
            line += f"{span(row['more_than_whole']):28}{row['worse']} of {count}{said}"
        table.append(line.rstrip())
    return table
