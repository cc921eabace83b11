"""What book/results/worlds.json holds, as lines of text, algorithm by algorithm: what the page prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonbook.planner.algorithms import ALGORITHMS

RULES = {name: each.rule for name, each in ALGORITHMS.items() if each.optimizer == "muon" and each.strategy != "owner"}
WIDE = 22  # a column of titles

Worlds = Mapping[str, Any]


def rows(found: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows with these values."""
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def world_lines(worlds: Worlds, model: str, ranks: int, tokens: int, fabric: str) -> list[str]:
    """Return one world, algorithm by algorithm: its step over AdamW's; how often a matrix is orthogonalized; whether
    there is room."""
    lines = [f"  {'':{WIDE}s}step / AdamW's   a matrix is orthogonalized   Newton-Schulz   room"]
    for name, title in worlds["algorithms"].items():
        (cell,) = rows(worlds["cells"], model=model, ranks=ranks, tokens=tokens, fabric=fabric, algorithm=name)
        often = f"{repeated(worlds, name, model, ranks, cell['tp']):.0f}x"
        room = "yes" if cell["has_room"] else "no"
        cells = f"{cell['over_adamw']:>13.2f}x{often:>29s}{cell['newton_schulz_share']:>16.0%}{room:>7s}"
        lines.append(f"  {title:{WIDE}s}{cells}")
    return lines


def repeated(worlds: Worlds, algorithm: str, model: str, ranks: int, tp: int) -> float:
    """Return how many ranks orthogonalize the same matrix, mean weighted by operations."""
    if algorithm not in RULES:
        return 1.0
    (layout,) = rows(worlds["layouts"], model=model, ranks=ranks, tp=tp, rule=RULES[algorithm])
    return float(layout["redundancy"])


def moonlight_lines(worlds: Worlds, tokens: int) -> list[str]:
    """Return what Muon adds to Moonlight's forward and backward at one of its own batches, by ranks.

    A star: the step's buffers have no room there. MuonW is left out: FSDP2's gathers are another account.
    """
    mine = rows(worlds["moonlight"], tokens=tokens)
    sizes = sorted({row["ranks"] for row in mine})
    lines = [f"  {'':{WIDE}s}" + "".join(f"{ranks:>5d} ranks" for ranks in sizes)]
    for name, title in worlds["algorithms"].items():
        if name == "muonw":
            continue
        of = {row["ranks"]: row for row in mine if row["algorithm"] == name}
        cells = (f"{of[ranks]['extra']:.1%}{' ' if of[ranks]['has_room'] else '*'}" for ranks in sizes)
        lines.append(f"  {title:{WIDE}s}" + "".join(f"{cell:>11s}" for cell in cells))
    return lines


def square_lines(worlds: Worlds) -> list[str]:
    """Return in what share of plans the quickest grid has D = T, and the least T that the model fits into.

    The first of the plans in which there is such a grid, and another; the second of all with a choice.
    """
    lines = [f"  {'':{WIDE}s}{'D = T, or nearly':>18s}{'the least T':>20s}"]
    for name, title in worlds["algorithms"].items():
        said = worlds["verdict"][name]
        square = f"{said['square_wins_step']:.0%} of {said['square_possible']}"
        least = f"{said['least_tp_wins_step']:.0%} of {said['with_a_choice']}"
        lines.append(f"  {title:{WIDE}s}{square:>18s}{least:>20s}")
    return lines


def reported_lines(worlds: Worlds) -> list[str]:
    """Return what the report's own world sends on each grid of its four ranks."""
    lines = ["  dp x tp   MiB sent   sending over PCIe / the quickest grid's"]
    for row in worlds["reported"]:
        lines.append(f"  {row['dp']:2d} x {row['tp']:2d}{row['bytes'] / 2**20:11.1f}{row['seconds']:11.2f}x")
    return lines
