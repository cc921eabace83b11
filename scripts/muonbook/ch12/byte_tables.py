"""Chapter 12's tables in words, values first: on a telephone the right end of a line is off the screen.

Rows are those of book/results/bytes.json; see `byte_counts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muonbook.ch12.byte_counts import PAPERS, STEPS
from muonbook.ch12.contenders import ALGORITHMS, CONTENDERS

ByteRows = Sequence[Mapping[str, Any]]
TOLERANCE = 0.03  # of what the ring formula says, beyond which the link disagrees with it
BROADCASTS = ("torch_zero",)  # along a tree: only all ranks together send what the ring formula says


# ---- Muon over AdamW --------------------------------------------------------------------------------------


def algorithm_lines(rows: ByteRows) -> list[str]:
    """Return `algorithms_on`'s rows of one grid, over ZeRO-1 AdamW: by formula, and counted."""
    lines = ["formula  counted     s"]
    for row in rows:
        planned = f"{row['ratio']:>7.3f}" if "ratio" in row else f"{'-':>7}"
        spread = f"{row['s']:>6.2f}" if "s" in row else f"{'-':>6}"
        lines.append(f"{planned}{row['over_zero1']:>9.3f}{spread}  {CONTENDERS[row['contender']].title}")
    return lines


def closed(rows: ByteRows) -> bool:
    """Say whether formula, padding, AdamW's parameters and norms are what was counted, for all of Muon's algorithms."""
    return all(row["closed"] for row in rows if row["contender"] in ALGORITHMS)


def tell_ratios(algorithms: ByteRows, rows: ByteRows) -> bool:
    """Print Muon / ZeRO-1 AdamW on one grid; return whether what was counted is what the formulas say."""
    print(f"{rows[0]['dp']} DP x {rows[0]['tp']} TP ranks, over ZeRO-1 AdamW, {PAPERS}:")
    print(*algorithm_lines(algorithms), sep="\n")
    print(f"Formula + padding + AdamW's + norms = counted: {closed(algorithms)}.")
    print("Of gather_all, by dtypes: formula, matrices alone, whole model")
    for row in rows:
        print(f"{row['formula']:>7.3f}{row['matrices']:>9.3f}{row['whole']:>8.3f}  {row['dtypes']}")
    same = all(abs(row["formula"] - row["matrices"]) < 1e-12 for row in rows)
    print(f"For matrices, counted = formula: {same}.")
    return same and closed(algorithms)


# ---- torch's own Muon -------------------------------------------------------------------------------------


def fsdp2_lines(rows: ByteRows) -> list[str]:
    """Return what torch's Muon on FSDP2 calls and sends, beside gather_all; one line where ranks agree."""
    scopes = {
        "collectives in the update": lambda row: str(row["update_calls"]),
        "of them per matrix": lambda row: f"{row['update_calls'] / row['matrices']:.1f}",
        "update's bytes / gather_all's momentum": lambda row: f"{row['update_sent'] / row['gather_all_momentum']:.1f}",
    }
    lines = []
    for what, value in scopes.items():
        values = list(dict.fromkeys(value(row) for row in rows))
        lines.append(f"{' or '.join(values):>6}  {what}")
    return [*lines, f"The same on {', '.join(str(row['dp']) for row in rows)} DP ranks."]


# ---- The wire ---------------------------------------------------------------------------------------------


def wire_lines(rows: ByteRows) -> list[str]:
    """Return `wire_on`'s rows of several grids, a line per contender: the least and the greatest of its ratios."""
    lines = ["  wire / ring   gloo's"]
    for name, contender in CONTENDERS.items():
        mine = [row for row in rows if row["contender"] == name]
        if mine:
            spans = [(min(row[key] for row in mine), max(row[key] for row in mine)) for key in ("ratio", "on_gloo")]
            told = "".join(f"{low:.3f}-{high:.3f}  " for low, high in spans)
            lines.append(f"{told}{contender.title}")
    return lines


def wire_verdicts(rows: ByteRows) -> list[str]:
    """Return how near the wire is to the formula, in sum and on single ranks, for all that we predict."""
    known = predicted(rows)
    lines = [f"Sum over ranks within {TOLERANCE:.0%} of gloo's, for all that we predict: {near(known, ['on_gloo'])}."]
    for what, those in (
        ("single ranks", without_broadcasts(known)),
        ("with broadcasts", [row for row in known if row["contender"] in BROADCASTS]),
    ):
        if those:
            least, most = min(row["least_rank"] for row in those), max(row["greatest_rank"] for row in those)
            lines.append(f"{least:.3f}-{most:.3f}  {what}")
    return lines


def tell_wire(rows: ByteRows) -> bool:
    """Print what the operating system counted on one grid, over what the formula says; return whether it is near.

    Of a broadcast only the sum over ranks must be.
    """
    print(f"{rows[0]['dp']} DP x {rows[0]['tp']} TP ranks, {STEPS} steps:")
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
