"""What plans say of steps that no constant was fitted to, beside what the clock said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from muonbook.measure.muon_variants import MUON_VARIANTS
from muonbook.measure.workload import Workload
from muonbook.planner.measured import step_fit
from muonbook.planner.measured.timed_worlds import asked_on

ENTRANT_TITLES = {"gather_all": "bucketed", "gather_cut": "cut, in buckets", "owner": "owner", "muonw": "MuonW, FSDP2"}

Pairs = dict[str, tuple[list[float], list[float]]]  # Muon -> (its step over AdamW's, measured; the same, planned)


def planned_against_measured(planner: Mapping[str, Any], unseen: bool = False) -> Pairs:
    """Return the worlds that the planner was measured on, of Muon's steps that no constant was fitted to.

    planner: what book/results/planner.json holds. unseen: only worlds where none was fitted to AdamW's either.
    """
    by_world: dict[str, dict[str, step_fit.TimedStep]] = {}
    for step in step_fit.timed(planner):
        by_world.setdefault(step.world, {})[step.entrant] = step
    found: Pairs = {}
    for steps in by_world.values():
        adamw = steps.pop("adamw")
        for name, step in steps.items():
            if step.held_out and (adamw.held_out or not unseen):
                measured, planned = found.setdefault(ENTRANT_TITLES[name], ([], []))
                measured.append(step.seconds / adamw.seconds)
                planned.append(
                    step_fit.seconds(planner["constants"], step) / step_fit.seconds(planner["constants"], adamw)
                )
    return {title: found[title] for title in ENTRANT_TITLES.values()}


def planned_grids(
    planner: Mapping[str, Any], skew: Sequence[Mapping[str, Any]], workload: Workload, names: Sequence[str]
) -> Pairs:
    """Return grids that another measurement timed, of which no step was fitted to.

    skew: rows of book/results/regimes.json, of `workload`. names: algorithms of LAID_OUT.
    """

    def planned(name: str, job: Workload, row: Mapping[str, Any]) -> float:
        wanted = asdict(asked_on(name, job, row["dp"], row["tp"]))
        step = step_fit.TimedStep("", name, True, None, planner["cores"], wanted, 0.0)
        return step_fit.seconds(planner["constants"], step)

    found: Pairs = {MUON_VARIANTS[name].title: ([], []) for name in names}
    for row in skew:
        adamw = planned("adamw", workload, row)
        for name in names:
            algorithm = MUON_VARIANTS[name]
            job = replace(workload, bucket_size=algorithm.bucket_size(workload))
            clocks = [row[who]["seconds"]["quartiles"][0] for who in (name, "zero1")]
            measured, plans = found[algorithm.title]
            measured.append(clocks[0] / clocks[1])
            plans.append(planned(algorithm.strategy, job, row) / adamw)
    return found
