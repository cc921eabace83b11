"""Do attention's logits grow under Muon, and what does QK-Clip do about it? Small transformers, several seeds.

The model of part III learns handwritten digits, read pixel by pixel, with learning rates at which logits grow and with
those at which they do not.

What it cannot show: a large model, whose logits may grow over many thousand steps at a rate that suits it. Here it
takes a rate that is too high, and no weight decay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from distmuon import launch
from distmuon.extras.qk_clip import AttentionHeads, QKClip
from distmuon.launch import World
from distmuon.models.networks import Block, Transformer
from distmuon.optim.muonw import MuonW
from distmuon.optim.param_groups import groups_for
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from muonbook.measure.workload import NEW_PICTURE, Workload, batches, pixels

TAU, STEPS, SEEDS = 30.0, 120, (0, 1, 2)
HELD_OUT = 200  # windows of the corpus, of 1,797
LAST = 20  # steps over which the end of a run is looked at


class GrowthSetting(NamedTuple):
    """How a run is trained. algorithm: of the hidden matrices, "muon" or "adamw". threshold: tau; infinite: no clip."""

    algorithm: str
    lr: float
    weight_decay: float = 0.0
    threshold: float = math.inf


SETTINGS = {
    "Muon": GrowthSetting("muon", 0.03),
    "Muon, clip": GrowthSetting("muon", 0.03, threshold=TAU),
    "AdamW": GrowthSetting("adamw", 0.03),
    "Muon, weight decay": GrowthSetting("muon", 0.03, weight_decay=0.1),
    "Muon, 1/3 of the rate": GrowthSetting("muon", 0.01),
    "AdamW, 1/10 of the rate": GrowthSetting("adamw", 0.003),
}
DRAWN = ("Muon", "Muon, clip", "AdamW")


class LogitRun(NamedTuple):
    """One training. largest: logit of each step. clipped: heads, in each step. loss: on held-out pixels, in nats."""

    largest: list[float]
    loss: float
    clipped: list[int]

    @property
    def peak(self) -> float:
        """The largest logit of the last steps."""
        return max(self.largest[-LAST:])


def train(setting: GrowthSetting, seed: int, steps: int = STEPS, workload: Workload | None = None) -> LogitRun:
    """Train a small transformer of this seed in one process; watch its logits."""
    workload = workload or Workload(vocabulary=NEW_PICTURE + 1, width=64, heads=4, sequences=8, seed=seed)
    corpus, model = pixels(Grid.alone(), workload.context), workload.model(Group("tp"))
    model.load_state_dict(workload.weights())
    groups = groups_for(model, setting.algorithm)
    optimizer = MuonW(groups, lr=setting.lr, weight_decay=setting.weight_decay)
    clip = watch(model, optimizer, workload.heads, setting.threshold)
    largest, clipped = [], []
    for _, (inputs, targets) in zip(range(steps), batches(workload, corpus[:-HELD_OUT], 1, 0), strict=False):
        _loss(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = clip.summary()
        largest.append(seen["largest logit"])
        clipped.append(int(seen["clipped heads"]))
    with torch.no_grad():
        loss = _loss(model, corpus[-HELD_OUT:, :-1], corpus[-HELD_OUT:, 1:])
    return LogitRun(largest, loss.item(), clipped)


def watch(model: Transformer, optimizer: MuonW, heads: int, threshold: float) -> QKClip:
    """Return a clip that watches every block of the model."""
    blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks) if isinstance(block, Block)]
    clip = QKClip(
        optimizer, {name: AttentionHeads(b.query, b.key, heads) for name, b in blocks}, threshold, grid=Grid.alone()
    )
    for name, block in blocks:
        block.watch = clip.recorder(name, is_causal=True)
    return clip


def study(names: Sequence[str] = tuple(SETTINGS), seeds: Sequence[int] = SEEDS) -> dict[str, list[LogitRun]]:
    """Return the runs of these settings, one for each seed; all settings of a seed begin alike and read the same.

    Two processes share the runs, each of which is one process's own.
    """
    shares = launch.run("muonbook.ch17.logit_growth:share", (tuple(names), tuple(seeds)), dp=2)
    found = {job: run for share_of_rank in shares for job, run in share_of_rank.items()}
    return {name: [found[name, seed] for seed in seeds] for name in names}


def share(world: World, names: Sequence[str], seeds: Sequence[int]) -> dict[tuple[str, int], LogitRun]:
    """Train every run that is this rank's turn."""
    jobs = list(itertools.product(names, seeds))[world.rank :: world.size]
    return {(name, seed): train(SETTINGS[name], seed) for name, seed in jobs}


def table(runs: Mapping[str, Sequence[LogitRun]]) -> list[dict[str, Any]]:
    """Return a row for each setting: medians over seeds, and of the loss the mean and the extremes."""
    rows = []
    for name, found in runs.items():
        losses = [run.loss for run in found]
        rows.append(
            {
                "run": name,
                "rate": SETTINGS[name].lr,
                "first": median(run.largest[0] for run in found),
                "in_the_end": median(run.peak for run in found),
                "clipped_heads": mean(sum(run.clipped) / len(run.clipped) for run in found),
                "loss": [mean(losses), min(losses), max(losses)],
            }
        )
    return rows


def _loss(model: Transformer, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
