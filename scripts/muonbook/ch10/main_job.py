"""The main job's result, as one dictionary and as one page: what worker 10 prints, writes and draws."""

from __future__ import annotations

import os
import textwrap
from typing import Any

import torch

from distmuon import launch
from distmuon.launch import session
from distmuon.models.digits import digits
from distmuon.models.recipe import Recipe
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Layout
from distmuon.verify import training
from distmuon.verify.certificate import Certificate, judge
from muonbook import report

FEW_STEPS = 10  # below, a control may not have flipped a single rounding to bf16 yet while the sharded run has


def summarize(recipe: Recipe, handed_over: dict[str, Any], threads: int) -> tuple[dict[str, Any], Certificate]:
    """Run the single-process reference here, where no other rank waits, and put everything into one result.

    Under torchrun other ranks of this host are still leaving meanwhile: the reference's time would be too long, and is
    None.
    """
    world, evidence = handed_over["world"], handed_over["evidence"]
    torch.set_num_threads(threads)  # as many as a rank had, or the last bits may differ
    device = torch.device(world.device)
    with session.environment(session.directory()):
        judged = judge(recipe, evidence, world.dp, device)
    predicted = [training.predict_run(recipe, world.dp, world.tp, rank // world.tp) for rank in range(world.size)]
    _, held_out = digits(Grid.alone(world.device), recipe.seed)
    result = {
        "grid": {"dp": world.dp, "tp": world.tp},
        "backend": world.backend,
        "device": world.device,
        "dtype": recipe.dtype,
        "optimizer": recipe.optimizer,
        "strategy": recipe.strategy,
        "steps": recipe.steps,
        "seed": recipe.seed,
        "machine": report.machine(),
        "losses": evidence.run.losses,
        "reference_losses": judged.reference.losses,
        "accuracy": training.accuracy(recipe, evidence.run.parameters, held_out),
        "reference_accuracy": training.accuracy(recipe, judged.reference.parameters, held_out),
        "exact": judged.exact,
        "float64_relative_difference": judged.float64_relative_difference,
        "relative_difference": judged.relative_difference,
        "control_relative_difference": judged.control_relative_difference,
        "replicas_agree": judged.replicas_agree,
        "ledger": report.ledger_rows(handed_over["ledgers"], predicted),
        "ledger_differences": [
            f"rank {rank}: {line}"
            for rank, (counted, expected) in enumerate(zip(handed_over["ledgers"], predicted, strict=True))
            for line in counted.differences(expected)
        ],
        "seconds_per_step": evidence.run.seconds_per_step,
        "reference_seconds_per_step": None if launch.under_torchrun() else judged.reference.seconds_per_step,
        "start_seconds": handed_over["start_seconds"],
    }
    passed = all(judged.verdicts.values()) and not result["ledger_differences"]
    return result | {"passed": passed}, judged


def page(recipe: Recipe, result: dict[str, Any], judged: Certificate, layout: Layout) -> list[str]:
    """Return the printed page, line by line."""
    dp, tp = result["grid"]["dp"], result["grid"]["tp"]
    lucky = recipe.steps < FEW_STEPS and not judged.verdicts.get(recipe.dtype, True)
    luck = [f"  In so few steps luck decides how far rounding moves a control: try {FEW_STEPS} or more."] * lucky
    wrong = [f"  FAIL {line}" for line in result["ledger_differences"][:10]]

    def outcome(losses: list[float], accuracy: float) -> str:
        return f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, held-out accuracy {accuracy:.0%}"

    return [
        f"Grid: {dp} DP x {tp} TP = {report.plural(dp * tp, 'rank')}, {result['backend']} on {result['device']}, "
        f"{recipe.dtype}, {recipe.optimizer}.",
        textwrap.fill(f"Virtual map: {report.map_in_words(layout, tp)}", 100, subsequent_indent="  "),
        "",
        f"Training: {report.plural(recipe.steps, 'step')} of {recipe.batch} handwritten digits.",
        f"  on the grid      {outcome(result['losses'], result['accuracy'])}",
        f"  in one process   {outcome(result['reference_losses'], result['reference_accuracy'])}",
        "",
        "Certificates: is it the same training?",
        *report.certificate_lines(judged, recipe.steps, dp * tp),
        *luck,
        "",
        "Bytes that a rank sends per step, mean over ranks:",
        *report.byte_lines(result["ledger"], dp * tp, recipe.steps),
        *(wrong or ["  every rank, bucket and collective: counted = predicted"] * bool(result["ledger"])),
        "",
        _time(result),
    ]


def _time(result: dict[str, Any]) -> str:
    ranks = result["grid"]["dp"] * result["grid"]["tp"]
    if result["reference_seconds_per_step"] is None:
        return "Time: not compared under torchrun, whose other ranks still run while one process trains."
    ratio = result["seconds_per_step"] / result["reference_seconds_per_step"]
    caveat = f" ({report.plural(ranks, 'rank')} on {os.cpu_count()} cores, over loopback: no word on a cluster.)"
    return f"Time: a step takes {ratio:.1f} x as long as in one process." + (
        caveat if result["device"] == "cpu" and ranks > 1 else ""
    )
