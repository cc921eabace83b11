"""Planned worlds, in frames: a model on more and more ranks, Muon's step over AdamW's by four algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muonbook.ch15.worlds.world_tables import rows
from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_bars, draw_bars
from muonbook.planner.algorithms import ALGORITHMS

NAMES = {name: each.title for name, each in ALGORITHMS.items() if each.optimizer == "muon"}
TWICE = 2.0  # where no gain is left, if Muon needs half of AdamW's steps


def frames_of_worlds(
    worlds: Mapping[str, Any], fabric: str, tokens: int, shown: Sequence[tuple[str, int]]
) -> list[Frame]:
    """Return a frame for every (model, ranks), on one fabric, with one batch and on one scale.

    worlds: book/results/worlds.json. Raises ValueError, naming those there are, for a batch, a fabric, a model or a
    number of ranks that was not surveyed, and where a model fits no grid of so many ranks.
    """
    every = worlds["cells"]
    asked: list[tuple[str, Any]] = [("fabric", fabric), ("tokens", tokens)]
    asked += [(name, value) for look in shown for name, value in zip(("model", "ranks"), look, strict=True)]
    for name, value in asked:
        if value not in (known := sorted({cell[name] for cell in every})):
            raise ValueError(f"{name} is {value!r}; the survey has {', '.join(map(str, known))}.")
    here = rows(every, fabric=fabric, tokens=tokens)
    found = {}
    for model, ranks in shown:
        title = f"{worlds['models'][model]['title']} on {ranks:,} ranks"
        cells = {row["algorithm"]: row for row in rows(here, model=model, ranks=ranks)}
        found[title] = {NAMES[name]: cells[name] for name in NAMES}
        if why := next((cell["why"] for cell in found[title].values() if not cell["tp"]), ""):
            raise ValueError(f"{title}: {why}.")
    most = max(cell["over_adamw"] for cells in found.values() for cell in cells.values())
    wires = worlds["assumptions"]["fabrics"][fabric]["title"]
    note = f"A step over AdamW's, planned: {wires}, {tokens / 1e6:.0f} million tokens. Dashes: twice."
    return [_frame(title, cells, note, most) for title, cells in found.items()]


def _frame(title: str, cells: Mapping[str, Mapping[str, Any]], note: str, most: float) -> Frame:
    bars = {name: cell["over_adamw"] for name, cell in cells.items()}
    look: dict[str, Any] = {"title": title, "note": note, "unit": "×", "level": TWICE, "most": most}
    return Frame(draw_bars(bars, **look), describe_bars(bars, **look), _caption(cells))


def _caption(cells: Mapping[str, Mapping[str, Any]]) -> str:
    long = [name for name, cell in cells.items() if cell["over_adamw"] >= TWICE]
    tight = [name for name, cell in cells.items() if not cell["has_room"]]
    told = f"Twice as long or longer: {', '.join(long) or 'none'}."
    return f"{told} Too full for 80 GB while it updates: {', '.join(tight)}." if tight else told
