"""What one changed line does to a small training, over its steps and over the time that they take."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from muonbook.figures import plots
from muonbook.measure import results

LOSS = "held-out loss, nats per byte"


def over_steps() -> dict[str, Any]:
    """Return the curves of both optimizers, each at its best learning rate, over the number of steps."""
    return _curves(1.0, 1.0, "step", "The same number of steps")


def over_time() -> dict[str, Any]:
    """Return the same curves over the time that they take, in steps of AdamW's training."""
    ratio = results.load("one_line")["clock"]["training_step_over_adamws"]["median"]
    return _curves(1.0, ratio, "time, in training steps of AdamW", "The same time")


def _curves(of_adamw: float, of_muonw: float, x_label: str, title: str) -> dict[str, Any]:
    found = results.load("one_line")
    every = found["model"]["steps"] / (len(found["best"]["adamw"]["course"]) - 1)
    series = {}
    for name, key, pace in (("AdamW", "adamw", of_adamw), ("Muon", "muonw", of_muonw)):
        course = found["best"][key]["course"]
        series[name] = ([pace * every * place for place in range(len(course))], course)
    return {"series": series, "x_label": x_label, "y_label": LOSS, "title": title}


def draw(curves: dict[str, Any]) -> Figure:
    return plots.draw_curves(**curves)


def describe(curves: dict[str, Any]) -> str:
    return plots.describe_curves(**curves)
