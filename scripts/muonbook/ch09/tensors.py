"""A collective as tensors before and after: every value written in a cell that has the colour of the rank it came from.

A sum is striped with the colours of all ranks that are in it. Values and sources are what the ranks of a real run
reported; `provenance.with_sources` measures both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures.style import INK, MARGIN, MUTED, PADDING, ROW, TP_HATCHES, WIDTH, Block

from muonbook.figures.style import arrow, box, card, dp_colour, hatch_on, ink_on, put, text_block, wide  # isort: skip

PADDED = -1  # as a source: padding, which came from nobody
NAMES, DIGIT = 46.0, 7.3  # room for the ranks' names, for a character of small type
HIGH, GAP, ARROW = 26.0, 9.0, 40.0  # of a cell, between ranks, the least room for an arrow
AXES = {"rank": "rank", "dp": "DP", "tp": "TP"}


class Cell(NamedTuple):
    """One element: what is written in it, and the ranks whose values it holds; without ranks it is undefined."""

    text: str
    sources: tuple[int, ...] = ()


CellRows = tuple[tuple[Cell, ...], ...]  # of what a rank holds; none where it holds no tensor


def cells(values: Sequence[Any], sources: Sequence[Any] | None = None) -> list[CellRows]:
    """Return what each rank holds as rows of cells.

    values: per rank a nested list [n] or [rows, columns], or None for no tensor; an element None is undefined.
    sources: of the same shape; each leaf a rank, a list of ranks (a sum), or -1 for padding. Without, every value comes
        from the rank that holds it.
    Raises ValueError for tensors of more than two dimensions or of no elements, and for sources of another shape.
    """
    held: list[CellRows] = []
    for rank, tensor in enumerate(values):
        if tensor is None:
            held.append(())
            continue
        source = sources[rank] if sources is not None else _like(tensor, rank)
        try:
            flat = not isinstance(next(iter(tensor), None), list | tuple)
            rows, whose = ([tensor], [source]) if flat else (tensor, source)
            held.append(tuple(tuple(map(_cell, *pair)) for pair in zip(rows, whose, strict=True) if _even(*pair)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"rank {rank}: values {tensor!r} and sources {source!r} do not match: {error}") from None
    return held


def draw_collective(
    before: Sequence[CellRows], after: Sequence[CellRows], title: str | None = None, caption: str = "", op: str = "",
    axis: str = "rank",
) -> Figure:  # fmt: skip
    """Draw what each rank holds before and after a collective, one row of the picture per rank.

    before, after: made by `cells`. op: the collective's name, on the arrow. axis: "rank" or "dp" for one colour per
    rank, "tp" for the colour of DP rank 0 and one hatch per rank.
    Raises ValueError for another axis, unequal numbers of ranks, no tensors, and tensors too wide for the card.
    """
    if axis not in AXES:
        raise ValueError(f"axis is {axis!r}; it must be one of {', '.join(AXES)}.")
    if len(before) != len(after) or not any(before) or not any(after):
        raise ValueError(f"{len(before)} ranks before and {len(after)} after; both need the same ranks, and a tensor.")
    everything = [cell for grid in (*before, *after) for row in grid for cell in row]
    size = max(24.0, DIGIT * max(len(cell.text) for cell in everything) + 6)
    left, room = MARGIN + NAMES, WIDTH - 2 * MARGIN - NAMES
    spans = [size * max(len(row) for grid in side for row in grid) for side in (before, after)]
    if max(spans) > room:
        raise ValueError(f"{max(spans) / size:.0f} cells of {size:.0f} points do not fit a card of {WIDTH:.0f}.")
    look = _Look(axis, size)
    if sum(spans) + ARROW <= room:
        blocks = [_side_by_side(before, after, look, op, left, spans)]
    else:
        blocks = [_column(before, look, "before", left), _down(op, left), _column(after, look, "after", left)]
    return card(title or op or "Before and after", caption, *blocks, *_notes(everything))


def describe_collective(
    before: Sequence[CellRows], after: Sequence[CellRows], title: str | None = None, caption: str = "", op: str = "",
    axis: str = "rank",
) -> str:  # fmt: skip
    """Return alt text for `draw_collective`, with every value and where it came from."""
    head = f"{title or op or 'A collective'}, drawn as tensors of {len(before)} ranks."
    return f"{head} Before: {_told(before, axis)}. After: {_told(after, axis)}."


class _Look(NamedTuple):
    axis: str
    size: float  # of a cell, across

    def fill(self, source: int) -> tuple[str, str]:
        """Return colour and hatch of a rank's values."""
        if source == PADDED:
            return PADDING, ""
        if self.axis == "tp":
            return dp_colour(0), TP_HATCHES[source % len(TP_HATCHES)]
        return dp_colour(source), ""


def _like(tensor: Any, rank: int) -> Any:
    return [_like(part, rank) for part in tensor] if isinstance(tensor, list | tuple) else rank


def _even(row: Sequence[Any], sources: Sequence[Any]) -> bool:
    if len(row) != len(sources) or not len(row):
        raise ValueError(f"{len(row)} values and {len(sources)} sources in a row")
    return True


def _cell(value: Any, source: Any) -> Cell:
    if isinstance(value, list | tuple):
        raise ValueError("a picture shows one or two dimensions")
    ranks = (source,) if isinstance(source, int) else tuple(source)
    if value is None or not ranks:
        return Cell("" if value is None else f"{value:g}")
    return Cell("" if ranks == (PADDED,) else f"{value:g}", ranks)


def _high(grid: CellRows) -> float:
    return HIGH * max(len(grid), 1)


def _rows(axes: Axes, side: Sequence[CellRows], look: _Look, x: float, top: float, highs: Sequence[float]) -> None:
    """Draw one grid per rank from `top` downwards, each centred in its share of `highs`."""
    for grid, high in zip(side, highs, strict=True):
        y = top + (high - _high(grid)) / 2
        if not grid:
            put(axes, x, y + 5, "no tensor", color=MUTED)
        for n, row in enumerate(grid):
            for column, cell in enumerate(row):
                _paint(axes, x + column * look.size, y + n * HIGH, cell, look)
        top += high + GAP


def _paint(axes: Axes, x: float, y: float, cell: Cell, look: _Look) -> None:
    """Draw one cell in its source's colour, or a sum with a stripe per source under its value."""
    fills = [look.fill(source) for source in cell.sources]
    several, across = len(fills) > 1, (look.size - 2) / max(len(fills), 1)
    if several or not fills:  # a frame: around a sum, or around nothing
        looks: dict[str, Any] = {"lw": 0.8, "ec": MUTED, "ls": "-" if several else (0, (2, 2))}
        box(axes, x + 1.4, y + 1.4, look.size - 2.8, HIGH - 2.8, "none", gid="sum" if several else "undefined", **looks)
    for n, (colour, hatch) in enumerate(fills):
        left, low = x + 1 + n * across, y + (HIGH - 8 if several else 1)
        looks = {"ec": hatch_on(colour), "hatch": hatch, "gid": f"source-{cell.sources[n]}"}
        box(axes, left, low, across, y + HIGH - 1 - low, colour, **looks)
        if hatch and not several:  # type on hatches is hard to read
            plate = DIGIT * len(cell.text) + 2
            box(axes, x + (look.size - plate) / 2, y + 6, plate, HIGH - 12, colour)
    ink = INK if several or not fills else ink_on(fills[0][0])
    put(axes, x + look.size / 2, y + (3 if several else HIGH / 2 - 6), cell.text, "center", color=ink)


def _labels(axes: Axes, look: _Look, top: float, highs: Sequence[float]) -> None:
    for rank, high in enumerate(highs):
        put(axes, MARGIN, top + high / 2 - 6, f"{AXES[look.axis]} {rank}")
        top += high + GAP


def _side_by_side(
    before: Sequence[CellRows], after: Sequence[CellRows], look: _Look, op: str, left: float, spans: Sequence[float]
) -> Block:
    highs = [max(_high(a), _high(b)) for a, b in zip(before, after, strict=True)]
    height, start, end = sum(highs) + GAP * (len(highs) - 1), left + spans[0], WIDTH - MARGIN - spans[1]
    named = end - start >= wide(op) + 8
    if not named:
        end = start + ARROW + 8

    def paint(axes: Axes, top: float) -> None:
        y = top + 6
        put(axes, left, y, "before", color=MUTED)
        put(axes, end, y, "after", color=MUTED)
        y += ROW + 3
        _labels(axes, look, y, highs)
        _rows(axes, before, look, left, y, highs)
        _rows(axes, after, look, end, y, highs)
        arrow(axes, (start + 10, y + height / 2), (end - 10, y + height / 2))
        if named:
            put(axes, (start + end) / 2, y + height / 2 - 18, op, "center", True)

    return 6 + ROW + 3 + height + GAP, paint


def _column(side: Sequence[CellRows], look: _Look, name: str, left: float) -> Block:
    highs = [_high(grid) for grid in side]

    def paint(axes: Axes, top: float) -> None:
        put(axes, left, top + 6, name, color=MUTED)
        _labels(axes, look, top + 9 + ROW, highs)
        _rows(axes, side, look, left, top + 9 + ROW, highs)

    return 9 + ROW + sum(highs) + GAP * len(highs), paint


def _down(op: str, left: float) -> Block:
    def paint(axes: Axes, top: float) -> None:
        arrow(axes, (left + 14, top), (left + 14, top + 32))
        put(axes, left + 28, top + 9, op, bold=True)

    return 34.0, paint


def _notes(everything: Sequence[Cell]) -> list[Block]:
    """Say only what this picture needs."""
    notes = {
        "Stripes: a sum of these ranks' values.": any(len(cell.sources) > 1 for cell in everything),
        "Grey: padding.": any(PADDED in cell.sources for cell in everything),
        "Dashed: nothing of it here.": any(not cell.sources for cell in everything),
    }
    text = " ".join(note for note, needed in notes.items() if needed)
    return [text_block(text)] if text else []


def _told(side: Sequence[CellRows], axis: str) -> str:
    """Return what each rank holds in words; ranks that hold the same are named once."""
    own = all(set(cell.sources) <= {rank, PADDED} for rank, grid in enumerate(side) for row in grid for cell in row)
    held: dict[str, list[int]] = {}
    for rank, grid in enumerate(side):
        held.setdefault(" / ".join(_row_told(row, axis, own) for row in grid) or "no tensor", []).append(rank)
    if len(held) == 1 and len(side) > 1:
        return f"every rank holds {next(iter(held))}"
    return "; ".join(f"{AXES[axis]} {', '.join(map(str, who))}: {what}" for what, who in held.items())


def _row_told(row: Sequence[Cell], axis: str, own: bool) -> str:
    """Return the values of a row and, for each run of cells with the same sources, where they came from."""
    runs = []
    for sources, run in groupby(row, key=lambda cell: cell.sources):
        ranks = f"{AXES[axis]} {' + '.join(map(str, sources))}"
        texts = ", ".join(cell.text for cell in run)
        special = {(): "undefined", (PADDED,): "padding"}.get(sources)
        runs.append(special or (texts if own else f"{texts} from {ranks}"))
    return ", ".join(runs)
