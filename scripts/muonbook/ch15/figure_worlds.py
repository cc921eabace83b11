"""The map of planned worlds: which T makes a step shortest, and what Muon adds there, over worlds and links."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures.plots import card, head
from muonbook.figures.style import ACCENT, CARD, MARGIN, MUTED, PADDING, ROW, WIDTH, Block, box, ink_on, mix, put
from muonbook.planner.fabrics import NODE

NAMES, CELL_HIGH, GAP = 44.0, 23.0, 2.0  # room for the names of worlds, height of a cell, between cells
DARKEST = 3.0  # times AdamW's step: the end of the scale
SCALE = (1.0, 1.1, 1.3, 2.0, 3.0)
NOTHING = {"no batch": "no batch", "no room": "no room"}
IN_A_CELL = "In a cell: the T of the shortest step, and how much longer Muon's is than ZeRO-1 AdamW's."
SPANS_NODES = "† T spans nodes, which nobody does."
NO_BATCH = "No batch: less than one sequence for a rank."


def draw_worlds(found: dict[str, Any], tokens: int = 1 << 22, title: str = "", note: str = "") -> Figure:
    """Draw one panel per model: worlds downwards, links across; a cell holds the best T, and Muon's step over AdamW's.

    found: what `planned_worlds.survey` returned. tokens: per step, one of those surveyed.
    Raises ValueError, naming those there are, for other tokens.
    """
    cells = _cells(found, tokens)
    fabrics = [each["title"] for each in found["assumptions"]["fabrics"].values()]
    panels = [_panel(found["models"][model]["title"], rows) for model, rows in cells.items()]
    every = [cell for worlds in cells.values() for row in worlds.values() for cell in row]
    spans, lacks = any((c["tp"] or 0) > NODE for c in every), any(c.get("why") == "no batch" for c in every)
    told = " ".join(filter(None, [note, IN_A_CELL, SPANS_NODES * spans, NO_BATCH * lacks]))
    return card(title, told, _heads(fabrics), *panels, _scale())


def describe_worlds(found: dict[str, Any], tokens: int = 1 << 22, title: str = "") -> str:
    """Return alt text for `draw_worlds`, with every cell."""
    told = [head(title, f"Best T and Muon's step over ZeRO-1 AdamW's, {tokens:,} tokens per step")]
    titles = {name: each["title"] for name, each in found["assumptions"]["fabrics"].items()}
    for model, worlds in _cells(found, tokens).items():
        lines = []
        for ranks, row in worlds.items():
            each = ", ".join(f"{titles[cell['fabric']]} {_words(cell)}" for cell in row)
            lines.append(f"{ranks:,} ranks: {each}")
        told.append(f"{found['models'][model]['title']}. {'; '.join(lines)}.")
    return " ".join(told)


def _cells(found: dict[str, Any], tokens: int) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Return the cells of this batch: model -> ranks -> one per fabric."""
    surveyed = sorted({cell["tokens"] for cell in found["cells"]})
    if tokens not in surveyed:
        raise ValueError(f"tokens is {tokens}; the survey has {', '.join(map(str, surveyed))}.")
    planned = {row["ranks"] for row in found["layouts"]}  # the other worlds are there for "DP = TP" only
    sorted_out: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for cell in found["cells"]:
        if cell["tokens"] == tokens and cell["ranks"] in planned:
            sorted_out.setdefault(cell["model"], {}).setdefault(cell["ranks"], []).append(cell)
    return sorted_out


def _words(cell: dict[str, Any]) -> str:
    return NOTHING[cell["why"]] if cell["tp"] is None else f"{_tp(cell)}, {_times(cell['over_adamw'])}"


def _tp(cell: dict[str, Any]) -> str:
    return f"T {cell['tp']}" + "†" * (cell["tp"] > NODE)


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:.1f}×"


def _colour(ratio: float) -> str:
    """Return the shade of a ratio: the card at 1, the accent at `DARKEST` and beyond, logarithmic between."""
    return mix(CARD, ACCENT, max(0.0, min(1.0, math.log(ratio) / math.log(DARKEST))))


def _across(columns: int) -> float:
    return (WIDTH - 2 * MARGIN - NAMES) / columns


def _heads(fabrics: list[str]) -> Block:
    wide = _across(len(fabrics))

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 4 + ROW, "ranks", color=MUTED)
        for column, title in enumerate(fabrics):
            middle = MARGIN + NAMES + (column + 0.5) * wide
            first, _, second = title.partition(", ") if "," in title else title.partition(" for ")
            second = second if "," in title else f"for {second}"
            put(axes, middle, top + 4, first, "center")
            put(axes, middle, top + 4 + ROW, second, "center")

    return 8 + 2 * ROW, paint


def _panel(title: str, worlds: dict[int, list[dict[str, Any]]]) -> Block:
    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 3, title, bold=True)
        for n, (ranks, row) in enumerate(worlds.items()):
            y, wide = top + 6 + ROW + n * CELL_HIGH, _across(len(row))
            put(axes, MARGIN + NAMES - 8, y + 4, f"{ranks:,}", "right")
            for column, cell in enumerate(row):
                _paint_cell(axes, MARGIN + NAMES + column * wide, y, wide - GAP, cell)

    return 14 + ROW + CELL_HIGH * len(worlds), paint


def _paint_cell(axes: Axes, x: float, y: float, wide: float, cell: dict[str, Any]) -> None:
    name = f"cell-{cell['model']}-{cell['ranks']}-{cell['fabric']}"
    if cell["tp"] is None:
        box(axes, x, y, wide, CELL_HIGH - GAP, CARD, ec=PADDING, lw=0.6, gid=name)
        put(axes, x + wide / 2, y + 4, NOTHING[cell["why"]], "center", color=MUTED)
        return
    colour = _colour(cell["over_adamw"])
    box(axes, x, y, wide, CELL_HIGH - GAP, colour, ec=PADDING, lw=0.6, gid=name)
    put(axes, x + 5, y + 4, _tp(cell).removeprefix("T "), color=ink_on(colour))
    put(axes, x + wide - 5, y + 4, _times(cell["over_adamw"]), "right", color=ink_on(colour))


def _scale() -> Block:
    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 4, "Muon's step over AdamW's:", color=MUTED)
        for n, ratio in enumerate(SCALE):
            x, y, label = MARGIN + 46 * n, top + ROW + 7, f"{ratio:g}×" + "+" * (ratio == DARKEST)
            box(axes, x, y, 44, CELL_HIGH - GAP, _colour(ratio), ec=PADDING, lw=0.6, gid=f"scale-{ratio:g}")
            put(axes, x + 22, y + 4, label, "center", color=ink_on(_colour(ratio)))

    return ROW + CELL_HIGH + 8, paint
