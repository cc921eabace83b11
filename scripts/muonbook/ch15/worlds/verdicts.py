"""What the cells of the survey say together, algorithm by algorithm: of "1 to 3 %", and of "DP = TP"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

CLAIMED = (0.01, 0.03)  # of forward and backward: Moonlight (Liu et al. 2025, section 2.3)

Cell = Mapping[str, Any]


def rows(found: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows with these values."""
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def verdict(cells: Sequence[Cell], layouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many cells there are, what layouts say of "near 1", and for every algorithm what its cells say."""
    names = list(dict.fromkeys(cell["algorithm"] for cell in cells))
    by = {name: of_algorithm([cell for cell in cells if cell["algorithm"] == name]) for name in names}
    return {
        "cells": len(cells) // len(names),  # of each algorithm
        "worlds": len({(cell["model"], cell["ranks"]) for cell in cells}),
        "assumptions": len({(cell["tokens"], cell["fabric"]) for cell in cells}),  # each world under all of them
        "near_one": near_one(layouts),
        **by,
    }


def near_one(layouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return bytes over ZeRO-1 AdamW's, least and most over all models and numbers of ranks, without TP.

    flat_cut: gather_cut on a flat buffer; bucketed: gather_all in Megatron's buckets. redundancy: how often flat_cut
    orthogonalizes a matrix.
    """
    alone = [row for row in layouts if row["tp"] == 1]
    flat = [row for row in alone if row["rule"] == "flat"]
    found = {
        "flat_cut": [row["gather_cut_over_zero1"] for row in flat],
        "bucketed": [row["gather_all_over_zero1"] for row in alone if row["rule"] == "megatron"],
        "redundancy": [row["redundancy"] for row in flat],
    }
    ends = {"least": min, "most": max}
    return {f"{name}_{end}": pick(values) for name, values in found.items() for end, pick in ends.items()}


def of_algorithm(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the verdict on one algorithm's cells."""
    found = [cell for cell in cells if cell["tp"] is not None]
    choice = [cell for cell in found if len(choices(cell)) > 1]
    square = with_a_square(cells)
    open_end = [cell for cell in square if max(choices(cell)) ** 2 > 2 * cell["ranks"]]  # T > D is possible too
    batches = sorted({cell["tokens"] for cell in found})
    return {
        "with_a_grid": len(found),
        "with_room": len([cell for cell in found if cell["has_room"]]),
        "with_a_choice": len(choice),
        "over_adamw_median": short(median([cell["over_adamw"] for cell in found])) if found else None,
        "over_adamw_most": max((cell["over_adamw"] for cell in found), default=None),
        **{
            f"adds_at_most_{limit * 100:g}_percent": {  # to forward and backward
                f"{tokens:,} tokens": share(
                    cell["over_forward_backward"] <= limit for cell in found if cell["tokens"] == tokens
                )
                for tokens in batches
            }
            for limit in CLAIMED
        },
        "least_tp_wins_step": share(cell["tp"] == min(choices(cell)) for cell in choice),
        "most_tp_wins_step": share(cell["tp"] == max(choices(cell)) for cell in choice),
        "most_tp_wins_communication": share(cell["tp_for_communication"] == max(choices(cell)) for cell in choice),
        "square_possible": len(square),
        "square_worlds": len({(cell["model"], cell["ranks"]) for cell in square}),
        "square_wins_step": share(cell["square_cost"] == 0 for cell in square),
        "square_cost_median": short(median([cell["square_cost"] for cell in square])) if square else None,
        "square_cost_most": max((cell["square_cost"] for cell in square), default=None),
        "square_wins_communication": share(cell["square_cost_communication"] == 0 for cell in square),
        "square_and_more_tp_possible": len(open_end),
        "square_wins_communication_then": share(cell["square_cost_communication"] == 0 for cell in open_end),
    }


def with_a_square(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells in which a grid with D = T, or nearly, fits, and another."""
    return [c for c in cells if c["tp"] is not None and len(choices(c)) > 1 and c["square_cost"] is not None]


def choices(cell: Cell) -> list[int]:
    """Return the T that fit in a cell."""
    return [int(tp) for tp in cell["tp_choices"].split()]


def share(values: Iterable[float]) -> float | None:
    """Return the mean of some truths or numbers; None of none."""
    found = [float(value) for value in values]
    return short(sum(found) / len(found)) if found else None


def short(value: float | None) -> float | None:
    """Return a number with four digits, for the assumptions hold for fewer; None stays."""
    return None if value is None else float(f"{value:.4g}")
