"""Chapter 12's tables in words, values first: on a telephone the right end of a line is off the screen.

Rows are those of book/results/bytes.json; see `byte_counts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muonbook.ch12.byte_counts import PAPERS, STEPS
from muonbook.ch12.contenders import ALGORITHMS, CONTENDERS

ByteRows = Sequence[Mapping[str, Any]]
TOLERANCE = 0.03  # of what the ring formula says: beyond it, a link measured here and now disagrees with it
BROADCASTS = ("torch_zero",)  # along a tree: only all ranks together send what the ring formula says


# ---- Muon over AdamW --------------------------------------------------------------------------------------


def algorithm_lines(rows: ByteRows) -> list[str]:
    """Return Muon's algorithms of `algorithms_on`'s rows of one grid, over ZeRO-1 AdamW: by formula, and counted."""
    ours = [row for row in rows if row["contender"] in ALGORITHMS]
    told = (f"{row['ratio']:>7.3f}{row['over_zero1']:>9.3f}  {CONTENDERS[row['contender']].title}" for row in ours)
    return ["formula  counted", *told]


def closed(rows: ByteRows) -> bool:
    """Say whether formula, padding, AdamW's parameters and norms are what was counted, for all of Muon's algorithms."""
    return all(row["closed"] for row in rows if row["contender"] in ALGORITHMS)


def tell_ratios(rows: ByteRows) -> bool:
    """Print Muon / ZeRO-1 AdamW on one grid; return whether what was counted is what the formulas say."""
    print(f"{_grid(rows)}, {PAPERS}; bytes of Muon / ZeRO-1 AdamW:")
    print(*algorithm_lines(rows), sep="\n")
    print(f"Formula + padding + AdamW's + norms = counted: {closed(rows)}.")
    return closed(rows)


def _grid(rows: ByteRows) -> str:
    return f"{rows[0]['dp']} DP x {rows[0]['tp']} TP ranks"


# ---- The wire ---------------------------------------------------------------------------------------------


def wire_lines(rows: ByteRows) -> list[str]:
    """Return `wire_on`'s rows of several grids, a line per contender: the least and the greatest of its ratios."""
    lines = [
        "Bytes that left all ranks' network interfaces, without headers, divided by",
        "  called    what the ring formula says of the collectives that torch called",
        "  gloo's    the same, if every reduce-scatter that torch called is an all-reduce",
        "Each is the least and the greatest ratio of all grids.",
        "",
        "     called       gloo's",
    ]
    for name, contender in CONTENDERS.items():
        mine = [row for row in rows if row["contender"] == name]
        if mine:
            spans = [(min(row[key] for row in mine), max(row[key] for row in mine)) for key in ("ratio", "on_gloo")]
            told = "".join(f"{low:.3f}-{high:.3f}  " for low, high in spans)
            lines.append(f"{told}{contender.title}")
    return lines


def tell_wire(rows: ByteRows) -> bool:
    """Print what the operating system counted on one grid, over what the formula says; return whether it is near.

    Of a broadcast only the sum over ranks must be.
    """
    print(f"{_grid(rows)}, {STEPS} steps:")
    print("what left the interfaces, without headers, over the ring formula of the collectives called;")
    print("gloo's: the same, a reduce-scatter that torch calls being an all-reduce")
    print("  sum  gloo's   single ranks        formula")
    for row in rows:
        by_rank = f"{row['least_rank']:.3f} to {row['greatest_rank']:.3f}"
        told = f"{row['ratio']:.3f}  {row['on_gloo']:.3f} {by_rank} {row['ring']:>14,}"
        print(f"{told}  {CONTENDERS[row['contender']].title}")
    known = predicted(rows)
    well = near(known, ["on_gloo"]) and near(without_broadcasts(known), ["least_rank", "greatest_rank"])
    print(f"Within 3 %, for every contender that we can predict (a broadcast's ranks only in sum): {well}.")
    return well


def predicted(rows: ByteRows) -> ByteRows:
    """Return the rows of contenders whose collectives are known before they are called."""
    return [row for row in rows if CONTENDERS[row["contender"]].predict is not None]


def without_broadcasts(rows: ByteRows) -> ByteRows:
    return [row for row in rows if row["contender"] not in BROADCASTS]


def near(rows: ByteRows, keys: Sequence[str]) -> bool:
    """Say whether all of these ratios are 1 to within TOLERANCE."""
    return all(abs(row[key] - 1) < TOLERANCE for row in rows for key in keys)
