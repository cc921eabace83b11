"""What one changed line does to a small training, over its steps and over the time that they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from muonbook.figures import plots
from muonbook.measure import results

LOSS = "held-out loss, nats per byte"
SEED = "The first seed, with the best rate of each, from step 10 on."


def pictures() -> dict[str, tuple[Figure, str]]:
    """Return file -> (figure, alt text): both optimizers, each at its best rate, over steps and over time.

    Time is counted in steps of AdamW's training, because clocks differ from machine to machine. There Muon's curve ends
    when AdamW's does, at a loss between two that were measured. Left out is the start, where both fall steeply.
    """
    found = results.load("one_line")
    steps, reached = found["model"]["steps"], found["steps_to_adamws_end"]
    ratio = found["clock"]["training_step_over_adamws"]["median"]
    adamw, muon = (found["best"][key]["course"] for key in ("adamw", "muonw"))
    at = np.linspace(0, steps, len(adamw))
    then = at * ratio < steps
    cut = [*at[then] * ratio, steps], [*np.asarray(muon)[then], np.interp(steps / ratio, at, muon)]
    over_steps = _curves("step", (at, adamw), (at, muon), f"Muon needs {reached} steps for the loss of AdamW's {steps}")
    over_time = _curves(
        "time, in training steps of AdamW",
        (at, adamw),
        cut,
        f"When AdamW ends at {adamw[-1]:.2f}, Muon is at {cut[1][-1]:.2f}",
    )
    over_steps["marks"] = [(reached, f"{reached} steps")]
    return {
        name: (plots.draw_curves(**curves), f"{plots.describe_curves(**curves)} {curves['note']}")
        for name, curves in {"over_steps.png": over_steps, "over_time.png": over_time}.items()
    }


def _curves(x_label: str, adamw: Sequence[Any], muon: Sequence[Any], title: str) -> dict[str, Any]:
    """Return what `plots.draw_curves` takes; each curve is (x, y) and loses its first point."""
    series = {name: tuple(values[1:] for values in curve) for name, curve in (("AdamW", adamw), ("Muon", muon))}
    return {"series": series, "x_label": x_label, "y_label": LOSS, "title": title, "note": SEED}
