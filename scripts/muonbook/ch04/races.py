"""A race as it is printed and stored: every optimizer tuned, raced on fresh seeds, and what its steps cost.

A loss after so many steps is half of an answer: a step of Muon is dearer. So three prices are taken of what the best
settings reach: steps, floating-point operations as torch counts them, and time against AdamW's step in the same run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from distmuon.launch import World
from muonbook.ch04.baselines import Setting
from muonbook.ch04.sweep import RACE_SEEDS, TUNING_SEEDS, Tuned, race
from muonbook.ch04.tasks import Task
from muonbook.ch04.training import Outcome, started
from muonbook.measure.results import shuffled, spread


def stored_race(
    world: World,
    task: Task,
    names: Sequence[str],
    tuning: Iterable[int] = TUNING_SEEDS,
    seeds: Iterable[int] = RACE_SEEDS,
) -> dict[str, Any]:
    """Tune the named optimizers on `task` and race them; return all that is kept, as plain data. Collective."""
    raced = race(world, task, names, tuning, seeds)
    racers = {
        name: _stored(tuned, outcomes) | {"flops": flops(task, tuned.best)} for name, (tuned, outcomes) in raced.items()
    }
    floor = task.floor() if task.floor else None
    return {"task": task.name, "batch": task.batch, "steps": task.steps, "floor": floor, "racers": racers}


def _stored(tuned: Tuned, outcomes: list[Outcome]) -> dict[str, Any]:
    """Return what is kept of one racer: infinite losses as None, which JSON knows."""
    return {
        "best": asdict(tuned.best),
        "settings": len(tuned.medians()),
        "runs": len(tuned.tried),
        "curve": {f"{lr:g}": _finite(loss) for lr, loss in tuned.curve().items()},
        "seeds": [outcome.seed for outcome in outcomes],
        "looks": outcomes[0].steps,
        "held_out": [[_finite(loss) for loss in outcome.held_out] for outcome in outcomes],
        "accuracy": [outcome.accuracy for outcome in outcomes],
    }


def _finite(loss: float) -> float | None:
    return round(loss, 6) if math.isfinite(loss) else None


# ---- What a step costs ------------------------------------------------------------------------------------


def flops(task: Task, setting: Setting) -> dict[str, int]:
    """Return the floating-point operations of one step: {"model": forward and backward, "optimizer": its products}.

    Counted by torch, which counts matrix products alone.
    """
    run = started(task, setting, seed=0)
    with FlopCounterMode(display=False) as gradients:
        run.loss_and_gradients(0)
    with FlopCounterMode(display=False) as whole:
        run.step(0)
    return {
        "model": gradients.get_total_flops(),
        "optimizer": whole.get_total_flops() - gradients.get_total_flops(),
    }


def times(task: Task, best: dict[str, Setting], rounds: int = 40) -> dict[str, dict[str, Any]]:
    """Return {name: spread of the seconds of a step, in units of the median step of AdamW in this run}.

    The optimizers take their turns in random order. Only on a machine that does nothing else does this mean much.
    """
    runs = {name: started(task, setting, seed=0) for name, setting in best.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in shuffled(runs, number):
            began = time.perf_counter()
            runs[name].step(min(number, task.steps - 1))
            seconds[name].append(time.perf_counter() - began)
    usual = statistics.median(seconds["adamw"])
    return {name: spread([one / usual for one in taken]) for name, taken in seconds.items()}
