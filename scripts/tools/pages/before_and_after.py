"""What one changed line does to a small training, over its steps and over the time that they take."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from muonbook.figures import plots
from muonbook.measure import results

LOSS = "held-out loss, nats per byte"


def pictures() -> dict[str, tuple[Figure, str]]:
    """Return file -> (figure, alt text): both optimizers, each at its best rate, over steps and over time.

    Time is counted in steps of AdamW's training, because clocks differ from machine to machine.
    """
    ratio = results.load("one_line")["clock"]["training_step_over_adamws"]["median"]
    found = {
        "over_steps.png": _curves(1.0, "step", "The same number of steps"),
        "over_time.png": _curves(ratio, "time, in training steps of AdamW", "The same time"),
    }
    return {name: (plots.draw_curves(**curves), plots.describe_curves(**curves)) for name, curves in found.items()}


def _curves(step_of_muonw: float, x_label: str, title: str) -> dict[str, Any]:
    """Return what `plots.draw_curves` takes. step_of_muonw: how far it goes to the right, where AdamW's goes 1."""
    found = results.load("one_line")
    every = found["model"]["steps"] / (len(found["best"]["adamw"]["course"]) - 1)
    series = {}
    for name, key, pace in (("AdamW", "adamw", 1.0), ("Muon", "muonw", step_of_muonw)):
        course = found["best"][key]["course"]
        series[name] = ([pace * every * place for place in range(len(course))], course)
    return {"series": series, "x_label": x_label, "y_label": LOSS, "title": title}
