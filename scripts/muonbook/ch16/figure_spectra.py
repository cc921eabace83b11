"""How safe is the Gram form in bf16? A column per spectrum, a dot per form, and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from muonbook.figures.plots import power, short
from muonbook.figures.style import ACCENT, INK, MARGIN, MUTED, ROW, WIDTH

from muonbook.figures.style import card, inset, put  # isort: skip

HIGH, LEFT = 190.0, 42.0  # of the plotting area; room for the numbers on its left
FORMS = {  # field -> (name, marker, colour)
    "plain": ("Gram, as one writes it down", "x", ACCENT),
    "gram": ("Gram, centred, computed anew", "o", INK),
    "standard": ("standard", "_", MUTED),
}


def draw_errors(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw the error of each form on every spectrum, from the kindest on. rows: of `spectra_sweep.sweep`."""
    rows = sorted(rows, key=lambda row: row["gram"])

    def paint(axes: Axes, top: float) -> None:
        for place, (name, marker, colour) in enumerate(FORMS.values()):
            y = top + 6 + place * ROW
            axes.plot([MARGIN + 6], [y], marker=marker, color=colour, ls="", ms=6, mew=1.8)
            put(axes, MARGIN + 18, y - 7, name, color=colour)
        under = top + len(FORMS) * ROW + 12
        plot = inset(axes, MARGIN + LEFT, under, WIDTH - 2 * MARGIN - LEFT, HIGH)
        xs = range(len(rows))
        plot.plot(xs, [row["bound"] for row in rows], color=MUTED, lw=1, ls=(0, (3, 2)), drawstyle="steps-mid")
        for field, (_, marker, colour) in FORMS.items():
            plot.plot(xs, [row[field] for row in rows], marker=marker, color=colour, ls="", ms=5, mew=1.6)
        plot.set_yscale("log")
        plot.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))
        plot.yaxis.set_minor_locator(NullLocator())
        plot.set_xticks([])
        plot.set_xlabel(f"{len(rows)} spectra; dashed: what the test allows")
        plot.spines[["top", "right"]].set_visible(False)

    return card(title, "", (HIGH + len(FORMS) * ROW + 12 + 20, paint))


def describe_errors(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return alt text for `draw_errors`."""
    worst = {field: max(row[field] for row in rows) for field in FORMS}
    safe = sum(row["gram"] <= row["bound"] for row in rows)
    told = ", ".join(f"{FORMS[field][0]} {short(value)}" for field, value in worst.items())
    return f"{title}. Largest error of each form over {len(rows)} spectra: {told}. Within what is allowed: {safe}."
