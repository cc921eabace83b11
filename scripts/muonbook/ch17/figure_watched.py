"""What `Metrics` has written, drawn: the size of updates."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from muonbook.figures.plots import draw_curves

SIZES = "step", "RMS of the update / learning rate", "How far a step moves a weight"
ALGORITHMS = {"muon": "Muon", "adamw": "AdamW"}
Records = Sequence[Mapping[str, Any]]


def read(path: str) -> Records:
    """Return the observations of a file that `JsonLines` has written."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def draw_sizes(records: Records) -> Figure:
    """Draw the size of the update of Muon's group and of the last of AdamW's."""
    return draw_curves(_sizes(records), *SIZES)


def describe_sizes(records: Records) -> str:
    """Return alt text for `draw_sizes`."""
    return _described(_sizes(records), SIZES, 0.1)


def _described(series: Mapping[str, tuple[list[float], list[float]]], axes: Sequence[str], unit: float) -> str:
    """Return alt text with ranges in whole units, outward: finer digits differ from one processor to the next."""
    told = []
    for name, (_, y) in series.items():
        least, most = unit * math.floor(min(y) / unit), unit * math.ceil(max(y) / unit)
        told.append(f"{name} between {least:.1g} and {most:.2g}")
    steps, label, title = axes
    x, _ = next(iter(series.values()))
    return f"{title}. The {label}, from {steps} {x[0]} to {x[-1]}: {'; '.join(told)}."


def _sizes(records: Records) -> dict[str, tuple[list[float], list[float]]]:
    steps = [record["step"] for record in records]
    return {
        ALGORITHMS[group["algorithm"]]: (steps, [record["groups"][number]["update_rms"] for record in records])
        for number, group in enumerate(records[0]["groups"])
    }
