"""The main job: what every rank runs, and its result as one dictionary, one page and one picture."""

from __future__ import annotations

import copy
import os
import sys
import textwrap
from argparse import Namespace
from typing import Any

import torch

from distmuon import launch
from distmuon.models.digits import digits
from distmuon.models.recipe import Recipe
from distmuon.optim import strategies
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Layout
from distmuon.verify import training
from distmuon.verify.bounds import FEW_STEPS
from distmuon.verify.byte_table import byte_lines, ledger_rows
from distmuon.verify.certificate import Certificate, gather_evidence, judge, judging
from distmuon.verify.problem import train_on_grid
from muonbook.certified import on_digits
from muonbook.jobs import machine, plural, progress

LITTLE = 0.001  # of the parameters: padding below it is told in elements alone
LINE = 92  # characters of a printed line: more are cut off in the book


def work(world: launch.World, recipe: Recipe) -> dict[str, Any] | None:
    """Run on every rank: train, keep the ledger, and hand over to rank 0 what the certificate needs."""
    grid = Grid.of(world)
    grid.world.all_reduce(torch.zeros(1, device=grid.device), "first collective")
    start_seconds = launch.seconds_since(world.started)
    problem = on_digits(recipe, grid)
    grid.ledger.clear()
    with progress(recipe.steps, world.rank) as tick:
        run = train_on_grid(problem, grid, tick)
    ledgers = world.gather(copy.deepcopy(grid.ledger))
    evidence = gather_evidence(problem, grid, run)
    if world.rank != 0:
        return None
    return {"evidence": evidence, "ledgers": ledgers, "start_seconds": start_seconds, "world": world}


def report(handed_over: dict[str, Any], recipe: Recipe, arguments: Namespace) -> tuple[bool, dict[str, Any]]:
    """Judge the run; print its page and its verdict, and draw it where --figure asks for it."""
    layout, _, _ = training.plan_run(recipe, arguments.dp, arguments.tp)
    result, judged = summarize(recipe, handed_over, arguments.threads)
    if not arguments.quiet:
        print("\n".join(page(recipe, result, judged, layout)))
    drawn = True
    if arguments.figure:
        from muonbook.ch10.figures import save_run  # not at the top: ranks need no matplotlib, and it takes a while

        try:
            save_run(result, layout, arguments.tp, arguments.figure)
            print(f"Picture: {arguments.figure}")
        except launch.OutputError as error:  # what --json asked for is still to be written
            print(f"error: {error}", file=sys.stderr)
            drawn = False
    print("\n".join(verdict_lines(result, arguments.quiet)))
    return result["passed"] and drawn, result


def summarize(recipe: Recipe, handed_over: dict[str, Any], threads: int) -> tuple[dict[str, Any], Certificate]:
    """Run the single-process reference here, where no other rank waits, and put everything into one result.

    Under torchrun other ranks of this host are still leaving meanwhile: the reference's time would be too long, and is
    None.
    """
    world, evidence = handed_over["world"], handed_over["evidence"]
    device = torch.device(world.device)
    data, held_out = digits(Grid.alone(world.device), recipe.seed)
    with judging(device, threads):
        judged = judge(training.problem_of(recipe, data, world.tp), evidence, device)
    predicted = None
    if strategies.has_costs(recipe.strategy):
        predicted = [training.predict_run(recipe, world.dp, world.tp, rank) for rank in range(world.size)]
    own, unrounded = judged.drifts.get(recipe.dtype), judged.drifts.get("unrounded")
    result = {
        "grid": {"dp": world.dp, "tp": world.tp},
        "backend": world.backend,
        "device": world.device,
        "dtype": recipe.dtype,
        "optimizer": recipe.optimizer,
        "strategy": recipe.strategy,
        "whole_every": recipe.whole_every if recipe.strategy == "periodic" else None,
        "overlap": recipe.overlap,
        "publish": recipe.publish,
        "steps": recipe.steps,
        "seed": recipe.seed,
        "machine": machine(),
        "losses": evidence.run.losses,
        "reference_losses": judged.reference.losses,
        "accuracy": training.accuracy(recipe, evidence.run.parameters, held_out),
        "reference_accuracy": training.accuracy(recipe, judged.reference.parameters, held_out),
        "exact": judged.exact,
        "float64_relative_difference": judged.float64_relative_difference,
        "relative_difference": own and own.difference,
        "control_relative_difference": own and own.control,
        "unrounded_relative_difference": unrounded and unrounded.difference,
        "unrounded_control_relative_difference": unrounded and unrounded.control,
        "replicas_agree": judged.replicas_agree,
        "muon_relative_difference": judged.from_muon,
        "verdicts": judged.verdicts,
        "ledger": ledger_rows(handed_over["ledgers"], predicted),
        "ledger_differences": [
            f"rank {rank}: {line}"
            for rank, expected in enumerate(predicted or ())
            for line in handed_over["ledgers"][rank].differences(expected)
        ],
        "seconds_per_step": evidence.run.seconds_per_step,
        "reference_seconds_per_step": None if launch.under_torchrun() else judged.reference.seconds_per_step,
        "start_seconds": handed_over["start_seconds"],
    }
    passed = judged.passed and not result["ledger_differences"]
    return result | {"passed": passed}, judged


def verdict_lines(result: dict[str, Any], quiet: bool) -> list[str]:
    """Return the verdict, in a line, or in two of an optimizer that is what it is, but not Muon.

    quiet: whether it is all that is printed, so that it cannot point to the page above it.
    """
    failed = {row for row, passed in result["verdicts"].items() if passed is False}
    if result["passed"]:
        return ["Verified: the sharded run is the single-process run."]
    if failed != {"muon"} or result["ledger_differences"]:
        return [f"NOT verified: {'run again without --quiet to see why' if quiet else 'see FAIL above'}."]
    what, away = f"{result['strategy']} over {result['grid']['tp']} TP ranks", result["muon_relative_difference"]
    return [
        f"Verified as what it is: {what}, and the sharded run is its single-process run.",
        f"NOT verified as Muon: that is another optimizer, whose run ends {away:.0e} of the movement away.",
    ]


def page(recipe: Recipe, result: dict[str, Any], judged: Certificate, layout: Layout) -> list[str]:
    """Return the printed page, line by line."""
    dp, tp = result["grid"]["dp"], result["grid"]["tp"]
    # a control may not have flipped a single rounding to bf16 yet while the sharded run has
    own = judged.drifts.get(recipe.dtype)
    lucky = recipe.steps < FEW_STEPS and own is not None and own.passed is False
    luck = f"  In so few steps luck decides how far rounding moves a control: try {FEW_STEPS} or more."
    wrong = [f"  FAIL {line}" for line in result["ledger_differences"][:10]]

    def outcome(losses: list[float], accuracy: float) -> str:
        return f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, held-out accuracy {accuracy:.0%}"

    return [
        f"Grid: {dp} DP x {tp} TP = {plural(dp * tp, 'rank')}, {result['backend']} on {result['device']}, "
        f"{recipe.dtype}, {recipe.optimizer}.",
        textwrap.fill(f"Virtual map: {map_in_words(layout, tp)}", LINE, subsequent_indent="  "),
        "",
        f"Training: {plural(recipe.steps, 'step')} of {recipe.batch} handwritten digits.",
        f"  on the grid      {outcome(result['losses'], result['accuracy'])}",
        f"  in one process   {outcome(result['reference_losses'], result['reference_accuracy'])}",
        "",
        "Certificates: is it the same training?",
        *judged.lines(),
        *([luck] if lucky else []),
        "",
        "Bytes that a rank sends per step, mean over ranks:",
        *byte_lines(result["ledger"], dp * tp, recipe.steps),
        *(wrong or _as_predicted(result)),
        "",
        _time(result),
    ]


def _as_predicted(result: dict[str, Any]) -> list[str]:
    if not result["ledger"]:
        return []
    if result["ledger"][0]["predicted_sent_bytes"] is None:
        return [f"  {result['strategy']} has no COSTS, so these are counted only"]
    return ["  every rank, bucket and collective: counted = predicted"]


def _time(result: dict[str, Any]) -> str:
    ranks = result["grid"]["dp"] * result["grid"]["tp"]
    if result["reference_seconds_per_step"] is None:
        return "Time: not compared under torchrun, whose other ranks still run while one process trains."
    ratio = result["seconds_per_step"] / result["reference_seconds_per_step"]
    where = f" ({plural(ranks, 'rank')} on {os.cpu_count()} cores; not a cluster)"
    caveat = where if result["device"] == "cpu" and ranks > 1 else ""
    return f"Time: a step takes {ratio:.1f} x as long as in one process{caveat}."


def map_in_words(layout: Layout, tp: int) -> str:
    """Return the virtual map in a sentence or two."""
    padding = sum(bucket.padded - bucket.numel for bucket in layout.buckets)
    numel = sum(bucket.numel for bucket in layout.buckets)
    straddling = sum(len(layout.owners(bucket, i)) > 1 for bucket in layout.buckets for i in bucket.params)
    sizes = ", ".join(f"{bucket.padded:,}" for bucket in layout.buckets)
    where = f" on each of {tp} TP ranks" if tp > 1 else ""
    share = f" ({layout.padding:.1%})" if layout.padding > LITTLE else ""
    shards = f"is cut into {layout.dp} shards" if layout.dp > 1 else "is one shard"
    sentences = [
        f"{plural(len(layout.specs), 'parameter')} of {numel:,} elements{where},",
        f"laid out in {plural(len(layout.buffers), 'buffer')} and {plural(len(layout.buckets), 'bucket')} of {sizes};",
        f"each bucket {shards}, with {plural(padding, 'element')} of padding in all{share}.",
        f"Straddling a shard boundary: {plural(straddling, 'parameter') if straddling else 'no parameter'}.",
    ]
    return " ".join(sentences)
