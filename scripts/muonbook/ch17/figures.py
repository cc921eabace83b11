"""What chapter 17 draws: boxes of a checkpoint, how far a step moves a weight, and the largest attention logit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures.plots import draw_curves
from muonbook.figures.style import INK, LEFT, MARGIN, ROW, STRIP, box, card, dp_colour, ink_on, put

# ---- The boxes of a checkpoint ----------------------------------------------------------------------------

Rows = Sequence[tuple[int, int]]  # (begin, end) of each rank
BOX = 34.0  # how high a strip of boxes is, in points


def draw_boxes(written: Rows, read: Rows, title: str) -> Figure:
    """Draw the rows of a matrix from left to right: the boxes that were written, and below them those that are read."""
    total = written[-1][1]

    def place(row: int) -> float:
        return LEFT + STRIP * row / total

    def paint(axes: Axes, top: float) -> None:
        for strip, (ranks, word) in enumerate(((written, "written"), (read, "read"))):
            y = top + strip * (BOX + 2 * ROW) + ROW
            put(axes, MARGIN, y + BOX / 2 - 7, word)
            for rank, (begin, end) in enumerate(ranks):
                middle = (place(begin) + place(end)) / 2
                for writer, low, high in _from_boxes(written, begin, end):
                    box(axes, place(low), y, place(high) - place(low), BOX, dp_colour(writer))
                if strip == 0:
                    put(axes, middle, y + BOX / 2 - 7, str(rank), "center", color=ink_on(dp_colour(rank)))
                else:
                    box(axes, place(begin), y, place(end) - place(begin), BOX, "none", ec=INK, lw=1.6)
                    put(axes, middle, y + BOX + 2, f"rank {rank}", "center")

    note = f"{total} rows of a momentum buffer, from left to right. A colour is a rank that wrote."
    return card(title, note, (2 * (BOX + 2 * ROW), paint))


def describe_boxes(written: Rows, read: Rows, title: str) -> str:
    """Return alt text for `draw_boxes`: from whose boxes each rank reads."""
    opened = ([str(writer) for writer, _, _ in _from_boxes(written, begin, end)] for begin, end in read)
    told = "; ".join(f"rank {rank} reads from {' and '.join(writers)}" for rank, writers in enumerate(opened))
    return f"{title}. {len(written)} ranks wrote a box each, in order; {len(read)} ranks read: {told}."


def _from_boxes(written: Rows, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return whose boxes hold rows begin to end, and which of them each holds: (writer, first, last + 1)."""
    both = ((writer, max(first, begin), min(last, end)) for writer, (first, last) in enumerate(written))
    return [(writer, low, high) for writer, low, high in both if low < high]


# ---- What `Metrics` has written ---------------------------------------------------------------------------

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
    """Return alt text for `draw_sizes`, with ranges in tenths, outward: finer digits differ between processors."""
    told = [
        f"{name} between {math.floor(10 * min(y)) / 10:.1g} and {math.ceil(10 * max(y)) / 10:.2g}"
        for name, (_, y) in _sizes(records).items()
    ]
    steps, label, title = SIZES
    first, last = records[0]["step"], records[-1]["step"]
    return f"{title}. The {label}, from {steps} {first} to {last}: {'; '.join(told)}."


def _sizes(records: Records) -> dict[str, tuple[list[float], list[float]]]:
    steps = [record["step"] for record in records]
    return {
        ALGORITHMS[group["algorithm"]]: (steps, [record["groups"][number]["update_rms"] for record in records])
        for number, group in enumerate(records[0]["groups"])
    }


# ---- Attention's logits -----------------------------------------------------------------------------------

AXES = "step", "largest attention logit"
TITLE = "Attention's logits grow, unless they are clipped"
THRESHOLD = "threshold"


def draw_growth(largest: Mapping[str, Sequence[float]], tau: float) -> Figure:
    """Draw the largest logit of every step, a line for each way to train, and the threshold across."""
    curves = {name: (range(1, len(values) + 1), values) for name, values in largest.items()}
    ends = [1, max(map(len, largest.values()))]
    figure = draw_curves(curves | {THRESHOLD: (ends, [tau, tau])}, *AXES, title=TITLE, note="One seed.", log_y=True)
    for line in figure.findobj(lambda artist: artist.get_gid() == f"curve-{THRESHOLD}"):
        line.set(linewidth=1.2, zorder=1)  # a clipped run keeps to it, and must not be hidden
    return figure


def describe_growth(largest: Mapping[str, Sequence[float]], tau: float) -> str:
    """Return alt text for `draw_growth`."""
    steps = max(map(len, largest.values()))
    told = "; ".join(f"{name} {_where(values[-1] / tau)}" for name, values in largest.items())
    return f"{TITLE}. The {AXES[1]} over {steps} steps, with a {THRESHOLD} of {tau:g}: {told}. One seed."


def _where(share: float) -> str:
    """Say where a line ends. In words: the digits differ from one processor to the next."""
    return "ends far above it" if share > 8 else "ends above it" if share > 1.5 else "ends near it or below"
