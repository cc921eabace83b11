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
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from distmuon.launch import World
from distmuon.optim.muon import Muon
from distmuon.optim.param_groups import by_algorithm
from distmuon.verify.blocks import BlockMuon
from muonbook.ch04.search_space import Setting, muon_and_adamw
from muonbook.ch04.sweep import best_of, described, shared_out, span, try_rates, verdict
from muonbook.ch04.tasks import LearningTask
from muonbook.ch04.training import started

FACTORS = tuple(2 ** (n / 2) for n in (-1, 0, 1))  # of whole Muon's learning rate: what every arm tries first
FARTHEST = 3  # learning rates beyond them, at most


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
ARMS = (WHOLE, Arm(2, 5), Arm(2, 0), Arm(4, 2), Arm(4, 5), Arm(4, 0), Arm(8, 5), Arm(8, 0))

Job = tuple[Arm, float, int]  # arm, learning rate, seed


def measure(
    world: World,
    best: Setting,
    task: LearningTask,
    tuning: Sequence[int],
    seeds: Sequence[int],
    arms: Sequence[Arm] = ARMS,
) -> dict[str, Any]:
    """Tune every arm and race them all; return what is kept, as plain data. Collective.

    best: whole Muon's setting, whose weight decay and momentum all arms have. tuning, seeds: those that everybody is
    tuned on, and those that everybody races on.
    """

    def losses(points: Sequence[tuple[Arm, float]]) -> list[float]:
        jobs = [(arm, lr, seed) for arm, lr in points for seed in tuning]
        found = iter(shared_out(world, jobs, partial(final_gap, task, best)))
        return [statistics.median(next(found) for _ in tuning) for _ in points]

    rates = [best.lr * factor for factor in FACTORS]
    curves = try_rates(dict.fromkeys(arms, rates), losses, FARTHEST)
    race = [(arm, best_of(curves[arm]), seed) for arm in arms for seed in seeds]
    gaps = dict(zip(race, shared_out(world, race, partial(final_gap, task, best)), strict=True))
    rows = []
    for arm in arms:
        lr = best_of(curves[arm])
        rows.append(
            arm._asdict()
            | {"lr": lr, "lrs": list(curves[arm]), "medians": list(curves[arm].values())}
            | {"gaps": [gaps[arm, lr, seed] for seed in seeds]}
        )
    return described(task, seeds) | {
        "weight_decay": best.weight_decay,
        "momentum": best.momentum,
        "tuning_seeds": list(tuning),
        "rows": [row | against(row["gaps"], rows[0]["gaps"]) for row in rows],
    }


def final_gap(task: LearningTask, best: Setting, job: Job) -> float:
    """Train; return the held-out loss above the floor after the last step, the only one that is taken."""
    arm, lr, seed = job
    assert task.floor is not None
    run = started(task, best.at(lr), seed, arm.optimizers)
    for step in range(task.steps):
        if not math.isfinite(run.step(step)):
            return math.inf
    return run.look()[0] - task.floor(seed)


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
        f"{found['steps']} steps, {count} seeds: nats per letter above the floor, median [least, most]",
        f"  {'T':>2} {'':15} {'lr':>6}  {'gap':21}  {'more than whole':22} worse on",
    ]
    for row in found["rows"]:
        arm = Arm(row["blocks"], row["whole_every"])
        gap = span(row["gaps"]) if all(map(math.isfinite, row["gaps"])) else "diverged"
        line = f"  {arm.blocks:2} {arm.title:15} {row['lr']:6.3f}  {gap:21}  "
        if arm != WHOLE:
            said = "" if row["claimed"] else ", no claim"
            line += f"{span(row['more_than_whole']):22} {row['worse']} of {count}{said}"
        table.append(line.rstrip())
    return table
