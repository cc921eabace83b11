"""The certificate on trial: it judges healthy Muon and every mutant, and must tell which is which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distmuon.launch import World
from distmuon.models.digits import digits
from distmuon.models.recipe import Recipe
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.sharding.grid import Grid
from distmuon.verify import certificate
from distmuon.verify.bounds import CONTROL_FACTOR, FLOAT64_BOUND
from distmuon.verify.certificate import Certificate, Evidence
from distmuon.verify.problem import train_on_grid
from distmuon.verify.training import problem_of
from muonbook.ch10.mutants import MUTANTS
from muonbook.jobs import plural

HEALTHY = "none"
COLUMNS = ("exact", "exact bf16", "float64", "unrounded", "float32", "replicas")
MARKS = {True: "pass", False: "FAIL", None: "no power"}


class Trained(NamedTuple):
    """What rank 0 knows of one optimizer: all evidence from a float32 model, and the exact row's from a bf16 model."""

    evidence: Evidence
    exact_bf16: dict[str, Tensor]


class Judged(NamedTuple):
    certificate: Certificate
    exact_bf16: bool

    @property
    def verdicts(self) -> dict[str, bool | None]:
        """One per column of the table."""
        found = self.certificate.verdicts | {"exact bf16": self.exact_bf16}
        return {column: found[column] for column in COLUMNS}

    @property
    def differences(self) -> dict[str, tuple[float, float]]:
        """The difference and its bound, both of the movement, for each row that has them."""
        drifts = self.certificate.drifts.items()
        return {"float64": (self.certificate.float64_relative_difference, FLOAT64_BOUND)} | {
            row: (drift.difference, CONTROL_FACTOR * drift.control) for row, drift in drifts
        }


def work(world: World, recipe: Recipe, names: Sequence[str]) -> tuple[dict[str, Trained], torch.device] | None:
    """Train healthy Muon and these mutants as the certificate does, in one world; None on all ranks but 0.

    recipe: of a float32 model.
    """
    grid = Grid.of(world)
    data, _ = digits(grid, recipe.seed)
    trained: dict[str, Trained] = {}
    for name, muon in {HEALTHY: DistributedMuon, **{name: MUTANTS[name] for name in names}}.items():
        problem, bf16 = (problem_of(each, data, grid.tp.size, muon) for each in (recipe, _bf16(recipe)))
        evidence = certificate.gather_evidence(problem, grid, train_on_grid(problem, grid))
        trained[name] = Trained(evidence, certificate.exact_on_grid(bf16, grid).parameters)
    return (trained, grid.device) if world.rank == 0 else None


def report(
    found: tuple[dict[str, Trained], torch.device], recipe: Recipe, dp: int, tp: int, threads: int
) -> tuple[bool, dict[str, Any]]:
    """Judge them all; print which row notices which mistake. All is well if the healthy one passes, and no other."""
    judged = judge(*found, recipe, dp, threads)
    verdicts = {name: one.verdicts for name, one in judged.items()}
    unnoticed = [name for name, rows in verdicts.items() if name != HEALTHY and False not in rows.values()]
    healthy = False not in verdicts[HEALTHY].values()
    mistakes = plural(len(verdicts) - 1, "mistake")
    print(f"{mistakes}, one at a time, on {dp} DP x {tp} TP ranks; what each row of the certificate says:")
    print("\n".join(table(verdicts)))
    print(f"Every mistake is noticed by some row: {not unnoticed}. Without one, no row fails: {healthy}.")
    differences = {name: one.differences for name, one in judged.items()}
    result = {"grid": {"dp": dp, "tp": tp}, "verdicts": verdicts, "differences and bounds": differences}
    return healthy and not unnoticed, result


def judge(
    trained: dict[str, Trained], device: torch.device, recipe: Recipe, dp: int, threads: int
) -> dict[str, Judged]:
    """Make the references once, and hold every optimizer against them. threads: as many as a rank had."""
    data, _ = digits(Grid.alone(str(device)), recipe.seed)
    with certificate.judging(device, threads):
        references = certificate.References.make(problem_of(recipe, data), device, dp)
        exact_bf16 = certificate.exact_alone(problem_of(_bf16(recipe), data), device, dp)
        return {
            name: Judged(references.compare(one.evidence), certificate.identical(one.exact_bf16, exact_bf16))
            for name, one in trained.items()
        }


def table(verdicts: dict[str, dict[str, bool | None]]) -> list[str]:
    """Return the printed table, line by line."""
    lines = [f"  {'mistake':<34}" + "  ".join(COLUMNS)]
    for name, rows in verdicts.items():
        marks = "".join(f"{MARKS[rows[column]]:<{len(column) + 2}}" for column in COLUMNS)
        lines.append(f"  {name:<34}{marks}".rstrip())
    return lines


def _bf16(recipe: Recipe) -> Recipe:
    return replace(recipe, dtype="bfloat16")
