"""The cost model's constants, fitted to some of the steps that were timed over links, and held against the others.

    seconds = computation + alpha x messages + sum over both patterns of bytes x max(copying, pattern / rate)

A byte is copied while others are on the link, so the slower of the two counts. Computation is measured without
communication; messages and bytes are predicted from the map. Fitted are four constants of this machine. Everything
follows from the stored measurements, so that the same file gives the same digits.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from muonbook.planner.cost_model import LinkCost
from muonbook.planner.measured.step_fit import least_squares

FITTED_RATES = (30.0, 300.0, None)  # Mbit/s; and of them the steps of
FITTED_ENTRANTS = ("ddp", "zero1", "zero1_small")


@dataclass(frozen=True)
class Point:
    """One timed step: who, over which link, what it asks, and what it took. rate_mbit None: unlimited."""

    entrant: str
    rate_mbit: float | None
    computation_seconds: float
    messages: int
    ring_bytes: int
    exchange_bytes: int
    seconds: float

    @property
    def fitted(self) -> bool:
        """Say whether the constants may be fitted to this point; all others are held out."""
        return self.entrant in FITTED_ENTRANTS and self.rate_mbit in FITTED_RATES


@dataclass(frozen=True)
class Constants:
    """alpha: seconds per message. copying: seconds per byte on a link without limit. ring, exchange: times that a ring,
    or an all-to-all, takes of what its bytes alone take at the link's rate: headers, and ranks that wait for another.
    """

    alpha: float
    copying: float
    ring: float
    exchange: float

    def seconds(self, point: Point) -> float:
        """Return the model's step time; `point.seconds` is not looked at."""
        ring = self.per_byte(self.ring, point.rate_mbit)
        exchange = self.per_byte(self.exchange, point.rate_mbit)
        moving = self.alpha * point.messages + ring * point.ring_bytes + exchange * point.exchange_bytes
        return point.computation_seconds + moving

    def per_byte(self, pattern: float, rate_mbit: float | None) -> float:
        """Return seconds per byte over such a link. pattern: `ring` or `exchange`."""
        return self.copying if rate_mbit is None else max(self.copying, pattern * 8e-6 / rate_mbit)

    def error(self, point: Point) -> float:
        """Return (model - measured) / measured."""
        return self.seconds(point) / point.seconds - 1

    def link(self, rate_mbit: float | None) -> LinkCost:
        """Return what a ring pays over such a link."""
        return LinkCost(self.alpha, 1 / self.per_byte(self.ring, rate_mbit))


def points(links: Mapping[str, Any]) -> list[Point]:
    """Return the measured medians of "links" in book/results/regimes.json as points."""
    found = []
    for step in links["steps"]:
        for name, asked in links["entrants"].items():
            bytes_and_messages = (asked["messages"], asked["ring_bytes"], asked["exchange_bytes"])
            computation, seconds = asked["computation_seconds"]["median"], step[name]["seconds"]["median"]
            found.append(Point(name, step["rate_mbit"], computation, *bytes_and_messages, seconds))
    return found


def fit(points: Iterable[Point]) -> Constants:
    """Return the constants with the least squares of relative error; none is negative.

    Raises ValueError for fewer points than constants.
    """
    points = list(points)
    if len(points) < 4:
        raise ValueError(f"{len(points)} points for 4 constants; measure at more rates.")
    rows = np.array([_asked(point) for point in points]) / np.array([[point.seconds] for point in points])
    wanted = np.array([1 - point.computation_seconds / point.seconds for point in points])
    return Constants(*map(float, least_squares(rows, wanted)))


def worst_and_median(constants: Constants, points: Sequence[Point]) -> tuple[Point, float, float]:
    """Return the point with the largest absolute error, that error, and the median of all."""
    worst = max(points, key=lambda point: abs(constants.error(point)))
    return worst, abs(constants.error(worst)), statistics.median(abs(constants.error(point)) for point in points)


def _asked(point: Point) -> tuple[float, float, float, float]:
    """Return what alpha, copying, ring and exchange are multiplied by, on a link slower than copying or without limit.

    That is what makes the fit linear; a rate between the two is for the model to answer, not to be fitted to.
    """
    if point.rate_mbit is None:
        return point.messages, point.ring_bytes + point.exchange_bytes, 0.0, 0.0
    per_byte = 8e-6 / point.rate_mbit
    return point.messages, 0.0, point.ring_bytes * per_byte, point.exchange_bytes * per_byte
