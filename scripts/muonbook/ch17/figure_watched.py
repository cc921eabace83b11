"""What `Metrics` has written, drawn: the size of updates, and the singular values of those that were sampled."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from muonbook.figures.plots import draw_curves

SIZES = "step", "root mean square of the update", "How far a step moves a weight, over the learning rate"
SPECTRA = "step", "singular value", "The updates' singular values, one matrix at a time"
ALGORITHMS = {"muon": "Muon", "adamw": "AdamW"}
Records = Sequence[Mapping[str, Any]]


def read(path: str) -> Records:
    """Return the observations of a file that `JsonLines` has written."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def draw_sizes(records: Records) -> Figure:
    """Draw the size of the update of each group."""
    return draw_curves(_sizes(records), *SIZES)


def describe_sizes(records: Records) -> str:
    """Return alt text for `draw_sizes`."""
    return _described(_sizes(records), SIZES, 0.1)


def draw_spectra(records: Records) -> Figure:
    """Draw the largest, the median and the smallest singular value of each sample; between, four fifths of them."""
    quantiles = _quantiles(records)
    x, low, high = quantiles["steps"], quantiles["0.1"], quantiles["0.9"]
    return draw_curves(_spectra(quantiles), *SPECTRA, bands={"median": (x, low, high)})


def describe_spectra(records: Records) -> str:
    """Return alt text for `draw_spectra`."""
    return _described(_spectra(_quantiles(records)), SPECTRA, 0.5)


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


def _quantiles(records: Records) -> dict[str, list[float]]:
    rows = [(record["step"], *sample["singular_values"]) for record in records for sample in record["samples"].values()]
    columns = zip(*rows, strict=True)
    return dict(zip(("steps", "smallest", "0.1", "median", "0.9", "largest"), map(list, columns), strict=True))


def _spectra(quantiles: Mapping[str, list[float]]) -> dict[str, tuple[list[float], list[float]]]:
    return {name: (quantiles["steps"], quantiles[name]) for name in ("largest", "median", "smallest")}
