"""Muon over data parallelism, trained and certified, with the bytes of ZeRO-1 AdamW on the same map beside it."""

from __future__ import annotations

from dataclasses import replace

from distmuon.launch import World
from distmuon.models.recipe import Recipe
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.verify.training import predict_run
from muonbook import certified
from muonbook.certified import CertifiedRun

KINDS = ("gradients", "norms and loss", "momentum", "parameters")


def train(world: World, recipe: Recipe) -> tuple[list[Ledger], CertifiedRun] | None:
    """Train with AdamW, and with Muon under certificate; return every rank's ledger of the first, and the second."""
    grid = Grid.of(world)
    adamw = world.gather(certified.counted(certified.on_digits(replace(recipe, optimizer="adamw"), grid), grid)[1])
    muon = certified.train(world, recipe, grid)
    return None if adamw is None or muon is None else (adamw, muon)


def report(found: tuple[list[Ledger], CertifiedRun], recipe: Recipe, dp: int, threads: int) -> tuple[bool, None]:
    """Judge the run; print verdicts and bytes."""
    adamw, muon = found
    verdict = certified.judge(muon, recipe, dp, 1, threads)
    foretold = [predict_run(replace(recipe, optimizer="adamw"), dp, 1, rank) for rank in range(dp)]
    as_predicted = verdict.as_predicted and adamw == foretold
    falling = muon.losses[-1] < muon.losses[0]
    print(f"Muon on {dp} DP ranks, {recipe.dtype}, {recipe.steps} steps: the loss has fallen: {falling}.")
    print(f"Same gradients, sharded and in one process, bitwise equal parameters: {verdict.exact}.")
    print(f"Trained in float32 throughout, within 4 x the control of one process: {verdict.unrounded}.")
    print(f"Every rank ends with the same parameters: {muon.replicas_agree}.\n")
    theirs, ours = (_sent(ledgers[0], recipe.steps) for ledgers in (adamw, muon.ledgers))
    print("Bytes that a rank sends per step    ZeRO-1 AdamW        Muon")
    for row in ours:
        print(f"  {row:<30}{theirs[row]:>16,}{ours[row]:>12,}")
    if theirs["all"]:
        print(f"  Muon / ZeRO-1 AdamW{ours['all'] / theirs['all']:>39.3f}")
    print(f"Every rank, bucket and collective, counted = predicted: {as_predicted}.")
    return verdict.exact and verdict.unrounded and muon.replicas_agree and as_predicted, None


def _sent(ledger: Ledger, steps: int) -> dict[str, int]:
    """Return bytes per step: of every kind, and of all."""
    rows = dict.fromkeys((*KINDS, "all"), 0)
    for entry, traffic in ledger:
        kind = entry.label.partition(",")[0]
        for row in (kind if kind in KINDS else "norms and loss", "all"):
            rows[row] += traffic.sent_bytes // steps
    return rows
