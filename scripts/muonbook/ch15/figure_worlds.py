"""Planned worlds, in frames: models on more and more ranks, Muon's step over AdamW's, by four algorithms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from muonbook.figures.player import Frame
from muonbook.figures.style import CARD, INK, LOOKS, MARGIN, MUTED, PADDING, ROW, TEXT, WIDTH, Block
from muonbook.planner.algorithms import ALGORITHMS

from muonbook.figures.style import box, page, put, text_block  # isort: skip

NAMES = {name: each.title for name, each in ALGORITHMS.items() if each.optimizer == "muon"}
TICKS = (1.0, 1.5, 2.0, 3.0, 4.0)  # times AdamW's step; the last one is where the scale ends
LEFT, RIGHT = MARGIN + 74.0, WIDTH - MARGIN - 46.0  # of the bars: names before them, ratios behind
BAR, AXIS = 13.0, 20.0
WITHOUT_ROOM = (
    "Hollow, and *: the step's own buffers, as our engine takes them, do not fit into 80 GB beside what it keeps."
)


def frames_of_worlds(
    worlds: Mapping[str, Any], fabric: str, tokens: int, models: Sequence[str], fewest: int = 1
) -> list[Frame]:
    """Return a frame for every number of ranks, from `fewest` on, in book/results/worlds.json.

    models: that are drawn, from the top, all on one fabric, with one batch.

    Raises ValueError, naming those there are, for a batch or a fabric that was not surveyed.
    """
    every = worlds["cells"]
    for name, asked in (("fabric", fabric), ("tokens", tokens)):
        if asked not in (known := sorted({cell[name] for cell in every})):
            raise ValueError(f"{name} is {asked!r}; the survey has {', '.join(map(str, known))}.")
    here = [cell for cell in every if (cell["fabric"], cell["tokens"]) == (fabric, tokens)]
    mine = [cell for cell in here if cell["algorithm"] in NAMES and cell["model"] in models]
    titles = {name: worlds["models"][name]["title"] for name in models}
    sizes = sorted({cell["ranks"] for cell in mine if cell["ranks"] >= fewest})
    return [_frame(ranks, titles, [cell for cell in mine if cell["ranks"] == ranks]) for ranks in sizes]


def _frame(ranks: int, titles: Mapping[str, str], cells: Sequence[Mapping[str, Any]]) -> Frame:
    head = f"On {ranks:,} ranks: Muon's step / AdamW's"
    panels, told = [], []
    for model, title in titles.items():
        rows = {cell["algorithm"]: cell for cell in cells if cell["model"] == model}
        panels.append(_panel(title, rows))
        told.append(f"{title}{_grids(rows)}: {_words(rows)}.")
    blocks = [text_block(head, TEXT), _axis(len(titles)), *panels, text_block(WITHOUT_ROOM)]
    return Frame(page(blocks), f"{head}. {' '.join(told)}", _caption(cells))


def _caption(cells: Sequence[Mapping[str, Any]]) -> str:
    def most(name: str) -> str:
        return times(max(cell["over_adamw"] for cell in cells if cell["algorithm"] == name and cell["tp"]))

    return f"At most: {', '.join(f'{title} {most(name)}' for name, title in NAMES.items() if name != 'flat')}."


def _words(rows: Mapping[str, Mapping[str, Any]]) -> str:
    if all(cell["tp"] is None for cell in rows.values()):
        return next(cell["why"] for cell in rows.values())
    room = {True: "", False: " without room for its buffers"}
    return ", ".join(f"{NAMES[name]} {times(rows[name]['over_adamw'])}{room[rows[name]['has_room']]}" for name in NAMES)


def times(ratio: float) -> str:
    """Return a ratio as it is written here: "1.07x"."""
    return f"{ratio:.2f}×"


def _place(ratio: float) -> float:
    """Return where a ratio lies on the card, on a logarithmic scale that begins at 1."""
    return LEFT + (RIGHT - LEFT) * max(0.0, min(1.0, math.log(ratio) / math.log(TICKS[-1])))


def _panel_height() -> float:
    return ROW + 2 + BAR * len(NAMES) + 5


def _axis(panels: int) -> Block:
    def paint(axes: Axes, top: float) -> None:
        for tick in TICKS:
            put(axes, _place(tick), top, f"{tick:g}×", "center", color=MUTED)
            axes.vlines([_place(tick)], top + AXIS - 3, top + AXIS + panels * _panel_height() - 4, PADDING, lw=0.7)

    return AXIS, paint


def _panel(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Block:
    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top, title + _grids(rows), bold=True)
        if all(cell["tp"] is None for cell in rows.values()):
            put(axes, LEFT, top + ROW + 2, next(cell["why"] for cell in rows.values()), color=MUTED)
            return
        for number, name in enumerate(NAMES):
            _bar(axes, top + ROW + 2 + BAR * number, name, rows[name])

    return _panel_height(), paint


def _grids(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return which T the algorithms have their shortest steps at."""
    found = sorted({cell["tp"] for cell in rows.values() if cell["tp"]})
    return f", T = {' or '.join(map(str, found))}" if found else ""


def _bar(axes: Axes, y: float, name: str, cell: Mapping[str, Any]) -> None:
    end, look = _place(cell["over_adamw"]), LOOKS[NAMES[name]]["color"]
    fill = look if cell["has_room"] else CARD
    put(axes, LEFT - 6, y - 1, NAMES[name], "right", color=MUTED)
    box(axes, LEFT, y + 1, max(end - LEFT, 1.5), BAR - 3, fill, ec=look, lw=1.2, gid=f"{name}-{cell['model']}")
    put(axes, WIDTH - MARGIN - 8, y - 1, times(cell["over_adamw"]), "right", color=INK)
    put(axes, WIDTH - MARGIN - 7, y - 1, "" if cell["has_room"] else "*", color=INK)
