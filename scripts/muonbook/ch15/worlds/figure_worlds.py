"""Planned worlds, model by model: Muon's step over AdamW's on more and more ranks, by four algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muonbook.ch15.worlds.world_tables import rows
from muonbook.figures.player import Frame
from muonbook.figures.plots import Curve, describe_curves, draw_curves
from muonbook.planner.algorithms import ALGORITHMS

NAMES = {name: each.title for name, each in ALGORITHMS.items() if each.optimizer == "muon"}
TWICE = 2.0  # where no gain is left, if Muon needs half of AdamW's steps
LITTLE = 1.1  # what a caption calls little


def frames_of_worlds(worlds: Mapping[str, Any], fabric: str, tokens: int, models: Sequence[str]) -> list[Frame]:
    """Return a frame for every model, on one fabric, with one batch and on one scale.

    worlds: book/results/worlds.json. Raises ValueError, naming those there are, for a batch, a fabric or a model that
    was not surveyed.
    """
    every = worlds["cells"]
    asked = [("fabric", fabric), ("tokens", tokens), *(("model", model) for model in models)]
    for name, value in asked:
        if value not in (known := sorted({cell[name] for cell in every})):
            raise ValueError(f"{name} is {value!r}; the survey has {', '.join(map(str, known))}.")
    here = rows(every, fabric=fabric, tokens=tokens)
    found = {model: _curves(rows(here, model=model)) for model in models}
    everyone = [curve for curves in found.values() for curve in curves.values()]
    wires = worlds["assumptions"]["fabrics"][fabric]["title"]
    note = f"Planned: {wires}, {tokens / 1e6:.0f} million tokens, each on its quickest grid."
    frames = []
    for model, curves in found.items():
        axes, title = ("ranks", "a step over AdamW's"), worlds["models"][model]["title"]
        look: dict[str, Any] = {"log_x": True, "log_y": True, "levels": [(TWICE, "twice")], "room_for": everyone}
        figure = draw_curves(curves, *axes, title, note, **look)
        frames.append(Frame(figure, describe_curves(curves, *axes, title), _caption(curves)))
    return frames


def _curves(cells: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return {algorithm: (ranks, a step over AdamW's)} for as many ranks as a grid was found that fits."""
    curves = dict[str, Curve]()
    for name, title in NAMES.items():
        fitting = sorted((cell["ranks"], cell["over_adamw"]) for cell in rows(cells, algorithm=name) if cell["tp"])
        curves[title] = [ranks for ranks, _ in fitting], [over for _, over in fitting]
    return curves


def _caption(curves: Mapping[str, Curve]) -> str:
    told = []
    for title, (ranks, over) in curves.items():
        longer = next((n for n, ratio in enumerate(over) if round(ratio, 2) > LITTLE), len(over))
        if longer:
            told.append(f"{title} {ranks[longer - 1]:,}")
    return f"At most a tenth longer, up to so many ranks: {', '.join(told)}."
