"""What the chapter's worker runs: one small step with gather_all, a training, and forty matrices gathered in two ways.

Each experiment is a function that every rank calls, and beside it one that prints what came of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from distmuon.launch import World
from distmuon.models.recipe import Recipe
from distmuon.optim.muon import momentum_
from distmuon.optim.newton_schulz import newton_schulz
from distmuon.optim.options import MUON_DEFAULTS
from distmuon.optim.strategies.gather_all import GatherAll
from distmuon.optim.strategies.strategy import StrategyContext
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ParamSpec, plan
from distmuon.sharding.ledger import Ledger
from distmuon.verify.training import predict_run
from muonbook import certified
from muonbook.certified import CertifiedRun
from muonbook.measure import coalescing

# ---- The small step of the page, in the engine ------------------------------------------------------------

SMALL = (ParamSpec("A", (3, 4), "float32"), ParamSpec("B", (4, 5), "float32"), ParamSpec("b", (3,), "float32"))
MUON, FOLLOWED, MU = (0, 1), 1, 0.95  # A and B are Muon's, b is AdamW's; B is followed


def follow(world: World) -> list[dict[str, Any]] | None:
    """Take A and B from the momentum to dp_shard with the engine's moves; return what every rank held of B."""
    grid = Grid.of(world)
    layout = plan(SMALL, grid.dp.size)
    metas, buckets = layout.view(grid.dp.rank), layout.buckets[:1]
    options = MUON_DEFAULTS | dict(compute_dtype=torch.float32, batched=False)
    moves = GatherAll(StrategyContext(layout, metas, grid, dict.fromkeys(MUON, options), None))

    # M and G of the whole bucket, [35] each, as the page draws them
    start = torch.randn(2, 35, generator=torch.Generator().manual_seed(8)).to(grid.device)
    owned = {index: metas[index].local_range.as_slice for index in MUON if metas[index].owned}
    old, gradient = ([flat[place].clone() for place in owned.values()] for flat in start)
    momentum = dict(zip(owned, momentum_(old, gradient, MU), strict=True))
    gathered = moves.dp_gather(buckets, momentum)
    sent = grid.ledger.total().sent_bytes
    updates = moves.newton_schulz(moves.tp_gather(buckets, gathered))
    kept = moves.dp_shard(buckets, updates)

    old, gradient = ([flat[layout.global_ranges[FOLLOWED].as_slice].clone()] for flat in start)
    (whole,) = momentum_(old, gradient, MU)
    alone = newton_schulz(whole.view(SMALL[FOLLOWED].shape).to(torch.bfloat16), compute_dtype=torch.float32)
    nothing = torch.empty(0, dtype=alone.dtype, device=grid.device)
    held = [tensors.get(FOLLOWED, nothing) for tensors in (momentum, gathered, updates, kept)]
    return world.gather({
        "count": [tensor.numel() for tensor in held],
        "kept": held[-1].tolist(),
        "right": torch.equal(held[-1], alone.flatten()[metas[FOLLOWED].range_in_param.as_slice]),
        "sent": sent,
    })  # fmt: skip


def report_follow(ranks: list[dict[str, Any]]) -> tuple[bool, list[dict[str, Any]]]:
    """Print how much of the matrix each rank held, and whether its update is right."""
    print("Elements of B    momentum   dp_gather   newton_schulz   dp_shard")
    for number, rank in enumerate(ranks):
        before, gathered, update, kept = rank["count"]
        print(f"  DP rank {number}{before:>14}{gathered:>12}{update:>16}{kept:>11}")
    right = all(rank["right"] for rank in ranks)
    print(f"The pieces kept are those of Newton–Schulz on the whole matrix, bit for bit: {right}.")
    print(f"Each rank sent {ranks[0]['sent']} bytes, for the whole bucket.")
    return right, ranks


# ---- A training, certified --------------------------------------------------------------------------------

KINDS = ("gradients", "norms and loss", "momentum", "parameters")


def train(world: World, recipe: Recipe) -> tuple[list[Ledger], CertifiedRun] | None:
    """Train with AdamW, and with Muon under certificate; return every rank's ledger of the first, and the second."""
    grid = Grid.of(world)
    adamw = world.gather(certified.counted(certified.on_digits(replace(recipe, optimizer="adamw"), grid), grid)[1])
    muon = certified.train(world, recipe, grid)
    return None if adamw is None or muon is None else (adamw, muon)


def report_train(
    runs: tuple[list[Ledger], CertifiedRun], recipe: Recipe, dp: int, threads: int
) -> tuple[bool, None]:  # fmt: skip
    """Judge the run; print verdicts and bytes."""
    adamw, muon = runs
    verdict = certified.judge(muon, recipe, dp, 1, threads)
    predicted = [predict_run(replace(recipe, optimizer="adamw"), dp, 1, rank) for rank in range(dp)]
    as_predicted = verdict.as_predicted and adamw == predicted
    falling = muon.losses[-1] < muon.losses[0]
    print(f"Muon on {dp} DP ranks, {recipe.dtype}, {recipe.steps} steps: the loss has fallen: {falling}.")
    print(f"Same gradients, sharded and in one process, bitwise equal parameters: {verdict.exact}.")
    print(f"Trained in float32 throughout, {verdict.measured}: {verdict.unrounded}.")
    print(f"Every rank ends with the same parameters: {muon.replicas_agree}.\n")
    theirs, ours = (_bytes_per_step(ledgers[0], recipe.steps) for ledgers in (adamw, muon.ledgers))
    print("Bytes that a rank sends per step    ZeRO-1 AdamW        Muon")
    for row in ours:
        print(f"  {row:<30}{theirs[row]:>16,}{ours[row]:>12,}")
    if theirs["all"]:
        print(f"  Muon / ZeRO-1 AdamW{ours['all'] / theirs['all']:>39.3f}")
    print(f"Every rank, bucket and collective, counted = predicted: {as_predicted}.")
    return verdict.exact and verdict.unrounded and muon.replicas_agree and as_predicted, None


def _bytes_per_step(ledger: Ledger, steps: int) -> dict[str, int]:
    """Return the bytes that one rank sends: of every kind, and of all."""
    rows = dict.fromkeys((*KINDS, "all"), 0)
    for entry, traffic in ledger:
        kind = entry.label.partition(",")[0]
        for row in (kind if kind in KINDS else "norms and loss", "all"):
            rows[row] += traffic.sent_bytes // steps
    return rows


# ---- Forty matrices, gathered in two ways -----------------------------------------------------------------

SHAPES = ((64, 96), (31, 45), (128, 32), (50, 50), (17, 90), (80, 64), (33, 33), (96, 96))
MANY = tuple(ParamSpec(str(n), SHAPES[n % len(SHAPES)], "float32") for n in range(40))


def gather(world: World) -> list[dict[str, coalescing.Found]] | None:
    """Gather many matrices in both ways, and count."""
    return world.gather(coalescing.compare(Grid.of(world), MANY))


def report_gather(ranks: list[dict[str, coalescing.Found]]) -> tuple[bool, None]:
    """Print calls and bytes of each way, as rank 0 counted them."""
    found, dp = ranks[0], len(ranks)
    needed = 2 * sum(spec.numel for spec in MANY) * (dp - 1) / dp  # bf16; no ring sends less
    print(f"{len(MANY)} matrices, {dp} ranks  calls  bytes sent  padding")
    for name, way in found.items():
        sent = way.asked.sent_bytes
        print(f"{name:<22}{way.asked.calls:>5}{sent:>12,}{1 - needed / sent:>9.2%}")
    right = all(way.right for way in found.values())
    same = all(way.asked == way.made for way in found.values())
    print(f"Both ways gave the same {len(MANY)} matrices, bit for bit: {right}.")
    print(f"Our ledger and torch count the same calls and bytes: {same}.")
    return right and same, None
