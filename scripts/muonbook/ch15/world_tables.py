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
    """Return what Muon adds to Moonlight's forward and backward at one of its own batches, by ranks."""
    mine = rows(worlds["moonlight"], tokens=tokens)
    sizes = sorted({row["ranks"] for row in mine})
    lines = [f"  {'':{WIDE}s}" + "".join(f"{ranks:>5d} ranks" for ranks in sizes)]
    for name, title in worlds["algorithms"].items():
        of = {row["ranks"]: row for row in mine if row["algorithm"] == name}
        lines.append(f"  {title:{WIDE}s}" + "".join(f"{of[ranks]['extra']:>11.1%}" for ranks in sizes))
    return lines


def square_lines(worlds: Worlds) -> list[str]:
    """Return in what share of the plans with a square and another grid the square is the quickest, by algorithm."""
    lines = [f"  {'':{WIDE}s}plans   quickest"]
    for name, title in worlds["algorithms"].items():
        said = worlds["verdict"][name]
        lines.append(f"  {title:{WIDE}s}{said['square_possible']:>5d}{said['square_wins_step']:>11.0%}")
    return lines


def divided_lines(worlds: Worlds, model: str, by: str, form: str = ".2f") -> list[str]:
    """Return Muon's step over AdamW's if the same ranks are divided further. by: "pp", pipeline stages, or "ep", ranks
    that share out experts."""
    mine = rows(worlds["divided"], model=model)
    degrees = sorted({row[by] for row in mine})
    lines = [f"  {'':{WIDE}s}" + "".join(f"{by.upper()} {degree:>2d}".rjust(9) for degree in degrees)]
    for name in dict.fromkeys(row["algorithm"] for row in mine):
        over = {row[by]: row["over_adamw"] for row in mine if row["algorithm"] == name}
        lines.append(f"  {worlds['algorithms'][name]:{WIDE}s}" + "".join(f"{over[n]:>8{form}}x" for n in degrees))
    return lines


def reported_lines(worlds: Worlds) -> list[str]:
    """Return what the report's own world sends on each grid of its four ranks."""
    lines = ["  dp x tp   MiB sent   sending over PCIe / the quickest grid's"]
    for row in worlds["reported"]:
        lines.append(f"  {row['dp']:2d} x {row['tp']:2d}{row['bytes'] / 2**20:11.1f}{row['seconds']:11.2f}x")
    return lines


def planner_lines(planner: Mapping[str, Any]) -> list[str]:
    """Return how far the planner's seconds are off those of steps that it has not seen: book/results/planner.json."""
    errors = planner["errors"]
    return [
        f"  the planner, on {errors['steps']} steps of small worlds on one machine that were held out of its fit:",
        f"  error in the median {errors['median']:.0%}, at worst {errors['worst']:.0%} ({errors['worst_of']})",
    ]
