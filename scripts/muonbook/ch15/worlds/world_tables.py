"""What book/results/worlds.json holds, algorithm by algorithm: what the page draws, and the lines that it folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

WIDE = 12  # a column of titles

Worlds = Mapping[str, Any]


def rows(found: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows with these values."""
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def moonlight_curves(worlds: Worlds, tokens: int, counted: str = "extra") -> dict[str, tuple[list[int], list[float]]]:
    """Return {algorithm: (ranks, % of Moonlight's forward and backward)} at one of its own batches.

    counted: "extra", what Muon adds to AdamW, or "optimizer", all that is not forward and backward. MuonW is left out:
    FSDP2's gathers are another account.
    """
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for name, title in worlds["algorithms"].items():
        mine = rows(worlds["moonlight"], tokens=tokens, algorithm=name)
        if name != "muonw":
            curves[title] = ([row["ranks"] for row in mine], [100 * row[counted] for row in mine])
    return curves


def moonlight_lines(worlds: Worlds, tokens: int, counted: str = "extra") -> list[str]:
    """Return the curves' numbers, by ranks; a star: the step's buffers have no room there."""
    names = {title: name for name, title in worlds["algorithms"].items()}
    curves = moonlight_curves(worlds, tokens, counted)
    sizes, _ = next(iter(curves.values()))
    lines = [f"  {'':{WIDE}s}" + "".join(f"{ranks:>5d} ranks" for ranks in sizes)]
    for title, (_, shares) in curves.items():
        room = [row["has_room"] for row in rows(worlds["moonlight"], tokens=tokens, algorithm=names[title])]
        cells = (f"{share:.1f}%{' ' if fits else '*'}" for share, fits in zip(shares, room, strict=True))
        lines.append(f"  {title:{WIDE}s}" + "".join(f"{cell:>11s}" for cell in cells))
    return lines


def ranks_lines(worlds: Worlds, fabric: str, tokens: int, models: Sequence[str]) -> list[str]:
    """Return a model's step over AdamW's, algorithm by algorithm, by ranks; -: no grid of so many fits."""
    lines = []
    for model in models:
        mine = rows(worlds["cells"], model=model, fabric=fabric, tokens=tokens)
        sizes = sorted({row["ranks"] for row in mine})
        lines.append(f"  {worlds['models'][model]['title']:14s}" + "".join(f"{ranks:>8,}" for ranks in sizes))
        for name, title in worlds["algorithms"].items():
            cells = (rows(mine, algorithm=name, ranks=ranks) for ranks in sizes)
            told = (f"{row['over_adamw']:.2f}x" if row["tp"] else "-" for (row,) in cells)
            lines.append(f"  {title:14s}" + "".join(f"{ratio:>8s}" for ratio in told))
    return lines


def shape_lines(curves: Mapping[str, tuple[list[float], list[float]]]) -> list[str]:
    """Return a line for every model of `planned_steps.shape_curves`: a step over the quickest grid's, by T / D."""
    lines = []
    for title, (shapes, over) in curves.items():
        told = (f"{Fraction(shape)!s:>4s}: {ratio:.2f}x" for shape, ratio in zip(shapes, over, strict=True))
        lines.append(f"  {title:20s}{'  '.join(told)}")
    return lines


def reported_lines(worlds: Worlds) -> list[str]:
    """Return what the report's own world sends on each grid of its four ranks."""
    lines = ["  dp x tp   MiB sent   sending over PCIe / the quickest grid's"]
    for row in worlds["reported"]:
        lines.append(f"  {row['dp']:2d} x {row['tp']:2d}{row['bytes'] / 2**20:11.1f}{row['seconds']:11.2f}x")
    return lines
