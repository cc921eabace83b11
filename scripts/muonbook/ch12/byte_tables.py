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


# ---- Every grid -------------------------------------------------------------------------------------------


def every_grid_lines(counted: Mapping[str, Any]) -> list[str]:
    """Return what was counted on all grids of up to eight ranks, and whether it was what had been predicted."""
    rows = counted["grids"]
    grids = {(row["dp"], row["tp"]) for row in rows}
    every_grid = {(dp, tp) for dp in range(1, 9) for tp in range(1, 9) if dp * tp <= 8}
    steps, calls, events = (sum(row[key] for row in rows) for key in ("steps", "collectives", "records"))
    return [
        f"{len(grids)} grids of up to eight ranks, all there are: {grids == every_grid}",
        f"{calls:,} collectives in the traces of {steps:,} steps",
        f"{events / calls:.2f} events per collective have a name that sounds right",
        f"predicted = ledger = dispatched = recorded: {counted['equal']}",
    ]


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
    """Return what left the interfaces over what gloo has to send, in sum and on single ranks, for all we predict."""
    known = predicted(rows)
    sums, ranks = ("on_gloo", "on_gloo"), ("least_rank", "greatest_rank")
    lines = ["bytes on the wire / bytes that gloo has to send, of all that we predict:"]
    for what, those, (least, greatest) in (
        ("sums over ranks", known, sums),
        ("single ranks", without_broadcasts(known), ranks),
        ("single ranks, with broadcasts", [row for row in known if row["contender"] in BROADCASTS], ranks),
    ):
        if those:
            low, high = min(row[least] for row in those), max(row[greatest] for row in those)
            lines.append(f"{low:.3f} to {high:.3f}  {what}")
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
