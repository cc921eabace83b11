"""Muon over tensor parallelism, trained and certified, with a row of bytes for every collective."""

from __future__ import annotations

from distmuon.launch import World
from distmuon.models.recipe import Recipe
from distmuon.sharding.grid import Grid
from muonbook import certified
from muonbook.certified import CertifiedRun


def train(world: World, recipe: Recipe) -> CertifiedRun | None:
    """Train on 1 x T ranks, under certificate."""
    return certified.train(world, recipe, Grid.of(world))


def report(run: CertifiedRun, recipe: Recipe, tp: int, threads: int) -> tuple[bool, None]:
    """Judge the run; print verdicts and bytes."""
    verdict = certified.judge(run, recipe, 1, tp, threads)
    loss = f"loss {run.losses[0]:.2f} -> {run.losses[-1]:.2f} in {recipe.steps} steps"
    print(f"Muon on {tp} TP ranks, {recipe.dtype}: {loss}.")
    print(f"Same gradients, cut over TP and in one process, bitwise equal parameters: {verdict.exact}.")
    print(f"Trained in float32 throughout, {verdict.measured}: {verdict.unrounded}.")
    print(f"Every rank sees the same whole parameters: {run.replicas_agree}.\n")
    print("A rank sends, per step                          calls   predicted     counted")
    counted = dict(run.ledgers[0])
    for entry, traffic in verdict.predicted[0]:
        calls, _, sent = (total // recipe.steps for total in traffic)
        what = entry.label if entry.op == "all_gather" else entry.label.replace("layers.", "activations, layers.")
        mine = counted[entry].sent_bytes // recipe.steps if entry in counted else 0
        print(f"  {entry.op:<12}{what:<34}{calls:>5}{sent:>12,}{mine:>12,}")
    print(f"Every rank and collective, counted = predicted: {verdict.as_predicted}.")
    return verdict.exact and verdict.unrounded and run.replicas_agree and verdict.as_predicted, None
