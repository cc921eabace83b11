"""Chapter 13's counts: the baselines weighed on every small grid, and step by step with many batch sizes.

Nothing here is a time: the same counts on every machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from distmuon import launch
from distmuon.launch import World
from distmuon.sharding.grid import Grid
from distmuon.verify.model_states import STATE, ModelStates
from muonbook.ch13.step_memory import Weighed, cross_check, packed, weigh
from muonbook.measure.workload import FILM, SHAPES, Workload
from muonbook.runnable_baselines import RUNNABLE, TRIED, ZERO1, admitted

Job = tuple[str, Workload, bool]  # baseline, what to train, whether to follow a whole step
Row = dict[str, Any]

CASES = [("even", "float32"), ("even", "bfloat16"), ("tall", "bfloat16"), ("odd", "float32")]  # shape, dtype
GRIDS = [(dp, tp) for tp in range(1, 9) for dp in range(1, 9) if dp * tp <= 8]
TRACKED = [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 4)]  # where whole steps are followed, too
QUICK = [(2, 1), (2, 2)]
BATCHES = [1, 4, 16]  # sequences per DP rank
PICTURED = FILM.shared_by(4)


# ---- On every rank ----------------------------------------------------------------------------------------


def weigh_all(world: World, jobs: Sequence[Job]) -> list[list[Weighed]] | None:
    """Weigh (baseline, workload, tracked), one after the other; return every rank's list of what was found."""
    grid, found = Grid.of(world), []
    for name, workload, tracked in jobs:
        one = weigh(name, workload, grid, tracked)
        found.append(one if workload == PICTURED else one._replace(history=[]))
    return world.gather(found)


def weigh_admitted(world: World, workload: Workload) -> list[list[Weighed]] | None:
    """Weigh those on trial that can train this workload here, and follow a whole step of each."""
    return weigh_all(world, [(name, workload, True) for name in admitted(workload, world.dp, world.tp, TRIED)])


def cross_check_all(world: World, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the peak of each baseline's update as two counters saw it, on one rank."""
    return {name: cross_check(name, SHAPES["even"].shared_by(1), Grid.of(world)) for name in names}


# ---- What was found ---------------------------------------------------------------------------------------


def report(ranks: list[list[Weighed]], workload: Workload, dp: int, tp: int) -> tuple[bool, None]:
    """Print what rank 0 keeps per kind; all is well if all was predicted: what is kept to the byte, updates by a bound.

    An update's own bytes are not printed: gloo's thread lets go of a tensor a moment after the wait, on a busy machine
    after what comes next has been taken.
    """
    names = admitted(workload, dp, tp, TRIED)
    rows = [row_of(name, [rank[number] for rank in ranks]) for number, name in enumerate(names)]
    print(f"Bytes on rank 0 of {dp} DP x {tp} TP, {workload.dtype}\n")
    print(f"{'':<24}{'parameters':>10}{'gradients':>11}{'masters':>9}{'state':>10}{'kept':>11}")
    for row in rows:
        columns = [row["kept"][kind] for kind in ("parameters", "gradients", "masters")]
        columns += [sum(row["kept"][kind] for kind in STATE), sum(row["kept"].values())]
        sizes = "".join(f"{value:>{w},}" for value, w in zip(columns, (10, 11, 9, 10, 11), strict=True))
        print(f"{RUNNABLE[row['baseline']].title:<24}{sizes}")
    numbers = numbers_compared(ranks)
    well = numbers["equal"] == numbers["compared"]
    print(f"\nEvery rank, baseline and kind kept, counted = predicted to the byte: {well}")
    print(f"({numbers['compared']} numbers, {numbers['nonzero']} of them not 0).")
    bounded = all(row["under_bound"] is not False for row in rows)
    print(f"Every update stayed under its bound, on every rank: {bounded}.")
    return well and bounded, None


def row_of(name: str, ranks: Sequence[Weighed]) -> Row:
    """Return what a results file holds of one baseline: rank 0's bytes, and the worst rank's update."""
    first = ranks[0]
    bounds = [(one.transient, one.bound) for one in ranks if one.bound is not None]
    worst = max(range(len(ranks)), key=lambda rank: ranks[rank].transient)
    return {
        "baseline": name,
        "kept": first.states,
        "standing": first.standing,
        "stages": first.stages,
        "peak": first.peak if first.stages else None,
        "transient": ranks[worst].transient,
        "bound": ranks[worst].bound,
        "under_bound": all(measured <= bound for measured, bound in bounds) if bounds else None,
    }


def numbers_compared(ranks: Sequence[Sequence[Weighed]]) -> Row:
    """Return how many counted numbers there are, how many of them are the predicted ones, and how many are not 0."""
    pairs = [(size, one.predicted[kind]) for rank in ranks for one in rank for kind, size in one.states.items()]
    equal = sum(counted == predicted for counted, predicted in pairs)
    return {"compared": len(pairs), "equal": equal, "nonzero": sum(map(any, pairs))}


# ---- All measurements -------------------------------------------------------------------------------------


def measure(quick: bool) -> Row:
    """Return all that chapter 13 stores. Nothing here is a time: the same counts on every machine."""
    models = CASES[:1] if quick else CASES
    grids, tracked = (QUICK, QUICK[:1]) if quick else (GRIDS, TRACKED)
    of_grids = measure_grids(grids, tracked, models)
    of_batches, timelines = measure_steps(BATCHES[:1] if quick else BATCHES)
    return {
        "quick": quick,
        **of_grids,
        "batches": of_batches,
        "timelines": timelines,
        "cross_check": launch.run(cross_check_all, (["zero1", "muon", "muonw"],))[0],
    }


def measure_grids(
    grids: Sequence[tuple[int, int]], tracked: Sequence[tuple[int, int]], models: Sequence[tuple[str, str]]
) -> Row:
    """Weigh every baseline on every grid with every (shape, dtype); on `tracked` grids follow steps of "even", too."""
    rows: list[Row] = []
    halves: list[bool] = []
    totals: list[bool] = []
    numbers = {"grids": len(grids), "compared": 0, "equal": 0, "nonzero": 0}
    for dp, tp in grids:
        places, jobs = [], []
        for shape, dtype in models:
            workload = replace(SHAPES[shape], dtype=dtype).shared_by(dp)
            for name in admitted(workload, dp, tp):
                places.append((shape, dtype))
                jobs.append((name, workload, (dp, tp) in tracked and shape == "even"))
        if not jobs:
            continue
        ranks = launch.run(weigh_all, (jobs,), dp=dp, tp=tp)[0]
        here = numbers_compared(ranks)
        numbers |= {name: numbers[name] + number for name, number in here.items()}
        found = [row_of(job[0], [rank[n] for rank in ranks]) for n, job in enumerate(jobs)]
        placed = [{"dp": dp, "tp": tp, "shape": s, "dtype": d} | row for (s, d), row in zip(places, found, strict=True)]
        halves += [is_half(*pair) for rank in ranks for pair in pairs_of(jobs, [one.states for one in rank], ["muon"])]
        summed = [_summed([rank[number] for rank in ranks]) for number in range(len(jobs))]
        totals += [is_half(*pair) for pair in pairs_of(jobs, summed, ZERO1[1:])]
        rows += [row for row in placed if row["stages"]]
        print(f"  {dp} DP x {tp} TP: {here['equal']} of {here['compared']} numbers as predicted", flush=True)
    numbers |= {"halves": len(halves), "exact_halves": sum(halves)}
    return {"kept": numbers | {"half_totals": len(totals), "exact_half_totals": sum(totals)}, "rows": rows}


def pairs_of(
    jobs: Sequence[Job], found: Sequence[ModelStates], names: Collection[str]
) -> Iterator[tuple[ModelStates, ModelStates]]:
    """Yield what ZeRO-1 AdamW keeps and what each of `names` does of the same workload. found: one for every job."""
    adamw = {workload: one for (name, workload, _), one in zip(jobs, found, strict=True) if name == "zero1"}
    for (name, workload, _), one in zip(jobs, found, strict=True):
        if name in names:
            yield adamw[workload], one


def is_half(adamw: ModelStates, muon: ModelStates) -> bool:
    """Say whether Muon keeps exactly half of what AdamW kept for the matrices that changed hands."""
    return sum(adamw[kind] - muon[kind] for kind in ("exp_avg", "exp_avg_sq")) == 2 * muon["momentum"]


def _summed(ranks: Sequence[Weighed]) -> ModelStates:
    """Return what all ranks keep together."""
    return {kind: sum(one.states[kind] for one in ranks) for kind in ranks[0].states}


def measure_steps(batches: Sequence[int]) -> tuple[list[Row], Row]:
    """Weigh ours on 4 DP ranks with more and more tokens; return rows, and of the first a step, moment by moment."""
    jobs = [(name, PICTURED.shared_by(4, each), True) for each in batches for name in ZERO1]
    ranks = launch.run(weigh_all, (jobs,), dp=4)[0]
    rows = []
    for number, (name, workload, _) in enumerate(jobs):
        place = {"dp": 4, "bucket_size": workload.bucket_size, "tokens_per_rank": workload.tokens // 4}
        rows.append(place | row_of(name, [rank[number] for rank in ranks]))
    print(f"  4 DP x 1 TP: {len(batches)} batches, step by step", flush=True)
    first = zip(ZERO1, ranks[0], strict=False)  # of the fewest tokens, which are PICTURED's
    return rows, {name: {"kept": one.states, "history": packed(one.history)} for name, one in first}
