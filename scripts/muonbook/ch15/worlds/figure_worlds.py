"""Planned worlds, in frames: model by model, Muon's step over AdamW's on more and more ranks, by four algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from muonbook.ch15.worlds.world_tables import rows
from muonbook.figures.player import Frame
from muonbook.figures.plots import Curve, draw_curves
from muonbook.planner.algorithms import ALGORITHMS

NAMES = {name: each.title for name, each in ALGORITHMS.items() if each.optimizer == "muon"}
AXES = ("ranks", "Muon's step / AdamW's")
TWICE, GAIN_ENDS = 2.0, "twice: no gain left"  # where Muon needs half of AdamW's steps
Cells = list[dict[str, Any]]


def frames_of_worlds(
    worlds: Mapping[str, Any], fabric: str, tokens: int, models: Sequence[str], error: float
) -> list[Frame]:
    """Return a frame for every model, on one fabric and with one batch; all frames share their scales.

    worlds: book/results/worlds.json. error: by what share of the measured ratio a plan may be off to either side.

    Raises ValueError, naming those there are, for a batch, a fabric or a model that was not surveyed.
    """
    every = worlds["cells"]
    for name, asked in (("fabric", fabric), ("tokens", tokens), *(("model", model) for model in models)):
        if asked not in (known := sorted({cell[name] for cell in every})):
            raise ValueError(f"{name} is {asked!r}; the survey has {', '.join(map(str, known))}.")
    here = [cell for cell in rows(every, fabric=fabric, tokens=tokens) if cell["algorithm"] in NAMES]
    cells = {worlds["models"][model]["title"]: rows(here, model=model) for model in models}
    highest = max(cell["over_adamw"] for mine in cells.values() for cell in mine if cell["tp"])
    least, most = _trusted(1.0, error)[0], ceil(_trusted(highest, error)[1])
    reach = [(ranks, height) for ranks in sorted({cell["ranks"] for cell in here}) for height in (least, most)]
    wires = worlds["assumptions"]["fabrics"][fabric]["title"]
    note = (
        f"Planned: {wires}, {tokens / 1e6:.0f} million tokens. Shaded: off by {100 * error:.0f} %, as the worst plan "
        "of a small world. Hollow: no room for the step's own buffers."
    )
    return [_frame(model, mine, note, reach, error) for model, mine in cells.items()]


def _frame(model: str, cells: Cells, note: str, reach: Sequence[tuple[float, float]], error: float) -> Frame:
    drawn = [cell for cell in cells if cell["tp"]]
    series = {title: _curve(rows(drawn, algorithm=name)) for name, title in NAMES.items()}
    hollow = {title: _curve(rows(drawn, algorithm=name, has_room=False)) for name, title in NAMES.items()}
    long = {title: max(planned) for title, (_, planned) in series.items() if max(planned) >= TWICE}
    bands = {}  # of those that take twice as long by plan, and of bucketed in any case
    for title in dict.fromkeys([NAMES["bucketed"], *long]):
        ranks, planned = series[title]
        low, high = zip(*(_trusted(ratio, error) for ratio in planned), strict=True)
        bands[title] = ranks, low, high
    head = f"{model}: {_who(long, error)} {TWICE:g}×"
    look: dict[str, Any] = {"log_x": True, "bands": bands, "hollow": hollow, "reach": reach}
    told = [f"{title} {_told(rows(cells, algorithm=name))}" for name, title in NAMES.items()]
    for title, (_, low, high) in bands.items():
        between = (f"{times(least)} to {times(most)}" for least, most in zip(low, high, strict=True))
        told.append(f"{title} shaded from {', '.join(between)}")
    alt = f"{head}. {AXES[1]} over {AXES[0]}. {'; '.join(told)}; at {times(TWICE)}, {GAIN_ENDS}."
    return Frame(draw_curves(series, *AXES, head, note, levels=[(TWICE, GAIN_ENDS)], **look), alt, _caption(series))


def _curve(cells: Cells) -> Curve:
    return [cell["ranks"] for cell in cells], [cell["over_adamw"] for cell in cells]


def _trusted(planned: float, error: float) -> tuple[float, float]:
    """Return the least and the most that was measured, if the plan is off by no more than the error."""
    return planned / (1 + error), planned / (1 - error)


def _who(long: Mapping[str, float], error: float) -> str:
    """Say who takes twice as long by plan, and whether it does so however the plan errs. One row: frames are of a size.

    long: algorithm -> its greatest ratio.
    """
    if not long:
        return "no algorithm reaches"
    sure = all(_trusted(most, error)[0] >= TWICE for most in long.values())
    return f"{next(iter(long)) if len(long) == 1 else f'{len(long)} algorithms'} {'passes' if sure else 'may reach'}"


def _caption(series: Mapping[str, Curve]) -> str:
    return f"At most: {', '.join(f'{title} {times(max(planned))}' for title, (_, planned) in series.items())}."


def _told(cells: Cells) -> str:
    """Return an algorithm's ratio, or why there is none, on every number of ranks."""
    room = {True: "", False: " without room for its buffers"}
    ratios = [times(cell["over_adamw"]) + room[cell["has_room"]] if cell["tp"] else cell["why"] for cell in cells]
    return ", ".join(f"on {cell['ranks']:,}: {ratio}" for cell, ratio in zip(cells, ratios, strict=True))


def times(ratio: float) -> str:
    """Return a ratio as it is written here: "1.07×"."""
    return f"{ratio:.2f}×"
