"""Towers of `figure_memory`, enlarged: what is alive, operator by operator, while buckets are moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distmuon.verify.memory_tracker import Moment
from muonbook.ch13.figure_memory import WORK
from muonbook.figures.plots import head, part_key
from muonbook.figures.style import MARGIN, MUTED, ROW, WIDTH, Block, box, card, in_bytes, put

FIRST, LAST = "momentum", "all_gather"  # stages of a move of one bucket
SHOWN = ("momentum", "Newton–Schulz", "all else")
HIGH = 86.0  # of the highest tower
BEYOND = 1.05  # what is drawn, over the longest tower: so that its end shows


def moves(history: Sequence[Moment]) -> list[list[Moment]]:
    """Return the moments of every bucket's move, in order. Raises ValueError where nothing is moved."""
    found, begin = [], None
    for n, (moment, after) in enumerate(zip(history, [*history[1:], None], strict=True)):
        if begin is None and moment.stage == FIRST:
            begin = n  # of the first wave, which further ones follow
        if begin is not None and moment.stage == LAST and (after is None or after.stage != LAST):
            found.append(list(history[begin : n + 1]))
            begin = None
    if not found:
        raise ValueError("a tower is one move of a bucket, from momentum to all_gather; this step has none.")
    return found


def draw_towers(towers: Mapping[str, Sequence[Moment]], title: str = "", note: str = "") -> Figure:
    """Draw towers on one scale, operators to the right. towers: name -> moments of one move, or of several."""
    high, wide = max(map(_top, towers.values())), BEYOND * max(map(len, towers.values()))
    key = part_key({name: (WORK[name][1], "") for name in SHOWN})
    return card(title, note, *key, *(_tower(name, moments, high, wide) for name, moments in towers.items()))


def describe_towers(towers: Mapping[str, Sequence[Moment]], title: str = "", **_: str) -> str:
    """Return alt text for `draw_towers`: how high each colour of each tower is."""
    told = []
    for name, moments in towers.items():
        tops = {work: _top([moment for moment in moments if _work(moment.stage) == work]) for work in SHOWN}
        told.append(
            f"{name}, {len(moments)} operators: {', '.join(f'{work} {in_bytes(tops[work])}' for work in SHOWN)}"
        )
    return f"{head(title, 'Towers')} {'; '.join(told)}."


def _top(moments: Sequence[Moment]) -> int:
    return max((moment.alive for moment in moments), default=0)


def _work(stage: str) -> str:
    return next((work for work, (stages, _) in WORK.items() if stage in stages), SHOWN[-1])


def _tower(name: str, moments: Sequence[Moment], high: int, operators: float) -> Block:
    one, top_of_it = (WIDTH - 2 * MARGIN) / operators, HIGH * _top(moments) / high

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 6, name, bold=True)
        put(axes, WIDTH - MARGIN, top + 6, in_bytes(_top(moments)), "right", True)
        floor = top + 12 + ROW + top_of_it
        for n, moment in enumerate(moments):
            tall = HIGH * moment.alive / high
            if tall:  # a hair wider, or the card would shine through
                box(axes, MARGIN + n * one, floor - tall, one + 0.2, tall, WORK[_work(moment.stage)][1])
        axes.hlines([floor], MARGIN, WIDTH - MARGIN, MUTED, lw=0.8)

    return 12 + ROW + top_of_it + 6, paint
