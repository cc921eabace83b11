"""The cost model's constants on one machine, fitted to the steps of some worlds and held against those of others.

    seconds = R / cores x (passes x a + Newton–Schulz x b + elements x c + parameters x d + matrices x e + units x f
                           + messages x alpha + bytes x copying)      or, for the bytes, if that takes longer,
              ring or exchange x bytes / rate

R ranks share the cores, so all that a core does takes that much longer, copies between processes among it; a link with
a limit is every rank's own. What a step asks comes from the plan; nothing of a held-out world is looked at. A step's
time is the lower quartile of its rounds: whoever else computes on the machine only adds to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

COMPUTED = ("passes", "orthogonalizing", "elements", "parameters", "matrices", "units", "messages")
MEANINGS = {
    "passes": "seconds per FLOP of forward and backward",
    "orthogonalizing": "seconds per FLOP of Newton–Schulz",
    "elements": "seconds per element that is reduced or updated",
    "parameters": "seconds per parameter, however small",
    "matrices": "seconds per matrix that is orthogonalized, however small",
    "units": "seconds per gather or reduction that FSDP2 makes",
    "messages": "seconds per message: alpha",
    "copying": "seconds per byte that is sent, on a link without limit",
    "ring": "times that a ring takes of what its bytes take at the link's rate",
    "exchange": "times that an exchange takes of the same",
}
Constants = Mapping[str, float]  # by the names in MEANINGS


class TimedStep(NamedTuple):
    """One baseline's step in one world. asked: as `timed_worlds.asked` has it. seconds: of the slowest rank, the lower
    quartile of all rounds."""

    world: str
    baseline: str
    held_out: bool
    rate_mbit: float | None
    cores: int
    asked: Mapping[str, float]
    seconds: float

    @property
    def sharing(self) -> float:
        """Ranks per core, at least 1."""
        return max(1.0, self.asked["ranks"] / self.cores)


def seconds(constants: Constants, step: TimedStep) -> float:
    """Return the model's time; `step.seconds` is not looked at."""
    busy = step.sharing * sum(constants[name] * step.asked[name] for name in COMPUTED)
    return busy + sum(_moving(constants, step, pattern) for pattern in ("ring", "exchange"))


def _moving(constants: Constants, step: TimedStep, pattern: str) -> float:
    amount, copied = step.asked[f"{pattern}_bytes"], step.sharing * constants["copying"]
    limit = 0.0 if step.rate_mbit is None else constants[pattern] * 8e-6 / step.rate_mbit
    return amount * max(copied, limit)


def error(constants: Constants, step: TimedStep) -> float:
    """Return (model - measured) / measured."""
    return seconds(constants, step) / step.seconds - 1


def fit(steps: Iterable[TimedStep]) -> dict[str, float]:
    """Return the constants with the least squares of relative error over steps that are not held out.

    Raises ValueError for fewer steps than constants.
    """
    fitted = [step for step in steps if not step.held_out]
    if len(fitted) < len(MEANINGS):
        raise ValueError(f"{len(fitted)} steps for {len(MEANINGS)} constants; measure more worlds.")
    rows = np.array([_row(step) for step in fitted]) / np.array([[step.seconds] for step in fitted])
    return dict(zip(MEANINGS, least_squares(rows, np.ones(len(fitted))).tolist(), strict=True))


def _row(step: TimedStep) -> list[float]:
    """Return what every constant is multiplied by: on a link with a limit its rate counts, on others copying."""
    computed = [step.sharing * step.asked[name] for name in COMPUTED]
    ring, exchange = step.asked["ring_bytes"], step.asked["exchange_bytes"]
    if step.rate_mbit is None:
        return [*computed, step.sharing * (ring + exchange), 0.0, 0.0]
    return [*computed, 0.0, ring * 8e-6 / step.rate_mbit, exchange * 8e-6 / step.rate_mbit]


def least_squares(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return x with the least |rows x - wanted| of which nothing is negative (Lawson and Hanson 1974)."""
    from scipy.optimize import nnls  # half a second, and a plan needs it not

    scales = np.abs(rows).max(axis=0)  # messages, bytes and seconds differ by ten orders of magnitude
    scales[scales == 0] = 1.0
    return nnls(rows / scales, wanted)[0] / scales


def timed(found: Mapping[str, Any]) -> list[TimedStep]:
    """Return the measured steps of book/results/planner.json."""
    return [
        TimedStep(
            world["title"], baseline, world["held_out"] or baseline in found["held_out_baselines"], world["rate_mbit"],
            found["cores"], told["asked"], told["seconds"]["quartiles"][0],
        )
        for world in found["worlds"]
        for baseline, told in world["baselines"].items()
    ]  # fmt: skip


def errors_of(steps: Sequence[TimedStep], constants: Constants) -> dict[str, Any]:
    """Return {"worst", "median"} of the absolute errors of held-out steps, and which step is the worst."""
    held_out = [step for step in steps if step.held_out]
    worst = max(held_out, key=lambda step: abs(error(constants, step)))
    every = [abs(error(constants, step)) for step in held_out]
    return {
        "steps": len(every),
        "worst": max(every),
        "worst_of": f"{worst.baseline}, {worst.world}",
        "median": statistics.median(every),
        "within_25_percent": sum(each <= 0.25 for each in every),
    }
