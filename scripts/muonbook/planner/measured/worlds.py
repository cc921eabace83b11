"""What `python scripts/plan.py --measure` measures: steps of small worlds over links of a rate, fitted and held out.

Worlds are started here, without torch; `timed_worlds` is what their ranks do. Held out are worlds of another width,
another grid or another rate, and one strategy everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from distmuon import launch
from muonbook import network_emulation
from muonbook.measure import interleaved_timing, results
from muonbook.measure.workload import Workload
from muonbook.planner.measured import step_fit

TIMED = "muonbook.planner.measured.timed_worlds"
BASELINES = ("adamw", "gather_all", "gather_cut", "owner", "muonw")
HELD_OUT_BASELINES = ("gather_cut",)
SEQUENCES = 8  # of a step, over all DP ranks
PASSES = 4  # over all worlds, in another order: whoever else computes on this machine, comes and goes
Ranks = Sequence[dict[str, dict[str, Any]]]  # what `time_steps` returned, by rank


class MeasuredWorld(NamedTuple):
    """A world to be timed. rate_mbit: of every rank's link; None: unlimited."""

    dp: int
    tp: int
    width: int
    rate_mbit: float | None
    held_out: bool = False
    layers: int = 2

    @property
    def title(self) -> str:
        rate = "no limit" if self.rate_mbit is None else f"{self.rate_mbit:g} Mbit/s"
        return f"{self.dp} x {self.tp}, width {self.width}, {self.layers} layers, {rate}"


WORLDS = (
    MeasuredWorld(4, 1, 64, None),
    MeasuredWorld(4, 1, 128, None),
    MeasuredWorld(2, 1, 128, None, layers=4),
    MeasuredWorld(4, 1, 256, None),
    MeasuredWorld(2, 2, 64, None),
    MeasuredWorld(4, 1, 128, 100.0),
    MeasuredWorld(2, 1, 128, 100.0),
    MeasuredWorld(4, 1, 192, None, held_out=True),
    MeasuredWorld(2, 2, 192, None, held_out=True),
    MeasuredWorld(8, 1, 128, None, held_out=True),
    MeasuredWorld(4, 1, 192, 200.0, held_out=True),
    MeasuredWorld(2, 2, 128, 100.0, held_out=True),
    MeasuredWorld(4, 2, 128, 100.0, held_out=True),
)
QUICK = WORLDS[:3] + WORLDS[5:6] + WORLDS[-2:-1]


def measure(quick: bool) -> dict[str, Any]:
    """Return all that is measured, with the fit and its errors; "worlds" is None where ranks may have no networks."""
    obstacle = network_emulation.why_unavailable()
    if obstacle is None:
        network_emulation.setup_bridge()  # before torch is imported
    found: dict[str, Any] = {
        "planning": launch.run(f"{TIMED}:plan_the_largest")[0],
        "cores": os.cpu_count(),
        "worlds": None,
    }
    if obstacle is not None:
        print(f"Worlds are left out: {obstacle}")
        return found
    found["held_out_baselines"] = list(HELD_OUT_BASELINES)
    worlds, passes = (QUICK, 1) if quick else (WORLDS, PASSES)
    told: dict[str, list[Ranks]] = {world.title: [] for world in worlds}
    for number in range(passes):
        for title in interleaved_timing.shuffled(told, number):
            print(f"{title} ...", flush=True)
            (world,) = (world for world in worlds if world.title == title)
            told[title].append(_timed(world, 2 if quick else 6 if world.rate_mbit is None else 3))
    found["worlds"] = [{**world._asdict(), "title": world.title} | _pooled(told[world.title]) for world in worlds]
    steps = step_fit.timed(found)
    constants = step_fit.fit(steps)
    return found | {"constants": constants, "errors": step_fit.errors_of(steps, constants)}


def _timed(world: MeasuredWorld, rounds: int) -> Ranks:
    workload = Workload(width=world.width, layers=world.layers, sequences=SEQUENCES)
    baselines = [name for name in BASELINES if name != "muonw" or world.tp == 1]  # it knows DTensors, not our TP layers
    given, link = (workload, baselines, rounds), network_emulation.Link(world.rate_mbit)
    return network_emulation.run(f"{TIMED}:time_steps", given, dp=world.dp, tp=world.tp, link=link)


def _pooled(passes: Sequence[Ranks]) -> dict[str, Any]:
    """Return "baselines" of a world, from all passes: the slowest rank's seconds by round, the most a rank is asked."""
    seconds = {name: [time for ranks in passes for time in _slowest(ranks, name)] for name in passes[0][0]}
    told = {}
    for name in seconds:
        ranks = [rank[name] for each in passes for rank in each]
        told[name] = {
            "seconds": results.spread(seconds[name]),
            "asked": {key: max(rank["asked"][key] for rank in ranks) for key in ranks[0]["asked"]},
            "bytes_as_predicted": all(rank["sent_bytes"] == rank["predicted_bytes"] for rank in ranks),
        }
    return {"baselines": told}


def _slowest(ranks: Ranks, name: str) -> list[float]:
    return [max(times) for times in zip(*(rank[name]["seconds"] for rank in ranks), strict=True)]


def lines(found: dict[str, Any]) -> list[str]:
    """Return the measurement as a table: every step beside the model's time."""
    plan = found["planning"]
    told = [f"a trillion parameters on 8,192 ranks: {plan['seconds']:.1f} s and {plan['bytes'] / 1e9:.2f} GB"]
    if found["worlds"] is None:
        return told
    told.append(f"{'measured':>10s}{'model':>10s}{'error':>8s}")
    for step in step_fit.timed(found):
        off, model = step_fit.error(found["constants"], step), step_fit.seconds(found["constants"], step)
        mark = "held out" if step.held_out else "fitted"
        told.append(f"{step.seconds:>8.3f} s{model:>8.3f} s{off:>+8.0%}  {mark:8s}  {step.baseline}, {step.world}")
    errors = found["errors"]
    return [
        *told,
        f"{errors['steps']} held-out steps: median error {errors['median']:.0%}, worst {errors['worst']:.0%} "
        f"({errors['worst_of']}); within 25 %: {errors['within_25_percent']}",
    ]
