"""Four levels of the machine, in frames: what each of them counts of a step, compared with what was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.ch12.contenders import CONTENDERS
from muonbook.figures.player import Frame
from muonbook.figures.style import ACCENT, CARD, INK, MARGIN, MUTED, ROW, WIDTH, Block, box, card, ink_on, mix, put

SHOWN = ("zero1", "muon_cut", "adamw_fsdp2", "muonw_fsdp2")
TITLE = "Who counts the same?"
NOTE = "Bytes of a step. =: as predicted, call by call. –: no call of ours. Percent: of the prediction."
NAMES, HIGH, GAP = 78.0, 26.0, 4.0  # room for a floor's name; a floor; between floors
ACROSS = (WIDTH - 2 * MARGIN - NAMES) / len(SHOWN)
NEAR = 1.01  # what is this near to its prediction agrees: the wire also carries gloo's own messages


FLOORS = ("ledger", "dispatcher", "profiler", "wire")  # who counts there, from our own code down
STOPS = {  # floors that are lit, from the top -> what is said there
    1: "In our ledger, every call of ours is as predicted. It does not hear what FSDP2 calls.",
    3: "The dispatcher and the profiler hear FSDP2, too, and everything is as predicted.",
    4: "On the wire, both optimizers on FSDP2 send a third more.",
}


def counts(found: Mapping[str, Any], dp: int, tp: int) -> list[dict[str, float | None]]:
    """Return for every floor what it counts over the prediction, by contender; None: it has nothing of theirs.

    found: book/results/bytes.json; without a wire, where the machine could not count there, the upper floors alone.
    Raises ValueError where a grid was not counted, or differs on an upper floor.
    """
    grids = [row for row in found["counted"]["grids"] if (row["dp"], row["tp"]) == (dp, tp)]
    if not (grids and all(row["equal"] for row in grids)):
        raise ValueError(f"on {dp} x {tp} ranks counts were not taken, or are not those predicted.")
    ledger = {name: None if CONTENDERS[name].ledger is None else 1.0 for name in SHOWN}
    floors: list[dict[str, float | None]] = [ledger, dict.fromkeys(SHOWN, 1.0), dict.fromkeys(SHOWN, 1.0)]
    wire = {row["contender"]: row for row in found["wire"] or () if (row["dp"], row["tp"]) == (dp, tp)}
    return [*floors, {name: wire[name]["ratio"] for name in SHOWN}] if wire else floors


def frames_of_floors(found: Mapping[str, Any], dp: int, tp: int) -> list[Frame]:
    """Return a frame per stop on the way down; what lies deeper is still dark. Errors as for `counts`."""
    floors = counts(found, dp, tp)
    return [
        Frame(_draw(floors[:lit]), f"{TITLE} {dp} DP × {tp} TP ranks. {_told(floors[:lit])}", told)
        for lit, told in STOPS.items()
        if lit <= len(floors)
    ]


def _told(floors: Sequence[Mapping[str, float | None]]) -> str:
    told = []
    for floor, counted in zip(FLOORS, floors, strict=False):
        cells = (f"{CONTENDERS[name].title} {_cell(floor, ratio)}" for name, ratio in counted.items())
        told.append(f"{floor}: {', '.join(cells)}")
    return f"{'; '.join(told)}."


def _cell(floor: str, ratio: float | None) -> str:
    if ratio is None:
        return "–"
    return f"{100 * ratio:.0f} %" if floor == "wire" else "="


def _draw(floors: Sequence[Mapping[str, float | None]]) -> Figure:
    return card(TITLE, NOTE, _heads(), *(_floor(n, floors) for n in range(len(FLOORS))))


def _heads() -> Block:
    def paint(axes: Axes, top: float) -> None:
        for column, name in enumerate(SHOWN):
            for line, words in enumerate(CONTENDERS[name].title.split(", ")):
                put(axes, _middle(column), top + 6 + ROW * line, words, "center", bold=not line)

    return 8 + 2 * ROW, paint


def _middle(column: int) -> float:
    return MARGIN + NAMES + ACROSS * (column + 0.5)


def _floor(n: int, floors: Sequence[Mapping[str, float | None]]) -> Block:
    floor, seen = FLOORS[n], n < len(floors)

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 6, floor, bold=n == len(floors) - 1, color=INK if seen else MUTED)
        for column, name in enumerate(SHOWN):
            ratio = floors[n][name] if seen else None
            agrees = ratio is None or ratio < NEAR
            colour = (mix(MUTED, CARD, 0.75) if agrees else ACCENT) if seen else mix(MUTED, CARD, 0.35)
            x, gid = MARGIN + NAMES + ACROSS * column, f"{floor}-{name}"
            box(axes, x + 2, top, ACROSS - 4, HIGH, colour, gid=gid)
            if seen:
                put(axes, _middle(column), top + 6, _cell(floor, ratio), "center", bold=True, color=ink_on(colour))

    return HIGH + GAP, paint
