"""Towers of `figure_memory`, enlarged: what is alive, operator by operator, while one bucket is moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distmuon.verify.storage_tracker import Moment
from muonbook.ch13.figure_memory import WORK
from muonbook.figures.plots import head, part_key
from muonbook.figures.style import MARGIN, MUTED, ROW, WIDTH, Block, box, card, in_bytes, put

FIRST, LAST = "momentum", "all_gather"  # stages of a move of one bucket
SHOWN = ("momentum", "Newton–Schulz", "all else")
HIGH = 86.0  # of the highest tower
BEYOND = 1.05  # what is drawn, over the longest move: so that its end shows


def highest_move(history: Sequence[Moment]) -> list[Moment]:
    """Return the moments of that bucket's move in which most is alive. Raises ValueError where nothing is moved."""
    begins = [n for n, (before, moment) in enumerate(pairwise(history), 1) if FIRST == moment.stage != before.stage]
    moves = []
    for begin, limit in pairwise([*begins, len(history)]):
        ends = [n for n in range(begin, limit) if history[n].stage == LAST]
        moves.append(list(history[begin : ends[-1] + 1]) if ends else [])
    if not any(moves):
        raise ValueError("a tower is one move of a bucket, from momentum to all_gather; this step has none.")
    return max(moves, key=_top)


def draw_towers(steps: Mapping[str, Sequence[Moment]], title: str = "", note: str = "") -> Figure:
    """Draw every step's highest tower on one scale, operators to the right. steps: name -> history."""
    moves = {name: highest_move(history) for name, history in steps.items()}
    high, wide = max(map(_top, moves.values())), BEYOND * max(map(len, moves.values()))
    key = part_key({name: (WORK[name][1], "") for name in SHOWN})
    return card(title, note, *key, *(_tower(name, move, high, wide) for name, move in moves.items()))


def describe_towers(steps: Mapping[str, Sequence[Moment]], title: str = "", **_: str) -> str:
    """Return alt text for `draw_towers`: how high each colour of each tower is."""
    told = []
    for name, history in steps.items():
        move = highest_move(history)
        tops = {work: _top([moment for moment in move if _work(moment.stage) == work]) for work in SHOWN}
        told.append(f"{name}, {len(move)} operators: {', '.join(f'{work} {in_bytes(tops[work])}' for work in SHOWN)}")
    return f"{head(title, 'Towers')} {'; '.join(told)}."


def _top(move: Sequence[Moment]) -> int:
    return max((moment.alive for moment in move), default=0)


def _work(stage: str) -> str:
    return next((work for work, (stages, _) in WORK.items() if stage in stages), SHOWN[-1])


def _tower(name: str, move: Sequence[Moment], high: int, operators: float) -> Block:
    one, top_of_it = (WIDTH - 2 * MARGIN) / operators, HIGH * _top(move) / high

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 6, name, bold=True)
        put(axes, WIDTH - MARGIN, top + 6, in_bytes(_top(move)), "right", True)
        floor = top + 12 + ROW + top_of_it
        for n, moment in enumerate(move):
            tall = HIGH * moment.alive / high
            if tall:  # a hair wider, or the card would shine through
                box(axes, MARGIN + n * one, floor - tall, one + 0.2, tall, WORK[_work(moment.stage)][1])
        axes.hlines([floor], MARGIN, WIDTH - MARGIN, MUTED, lw=0.8)

    return 12 + ROW + top_of_it + 6, paint
