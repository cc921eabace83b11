"""Chapter 12's tables in words, values first: on a telephone the right end of a line is off the screen.

Rows are those of book/results/bytes.json; see `byte_counts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distmuon.verify.prediction import predict_step
from muonbook.ch12.byte_counts import STEPS, G, M
from muonbook.measure import formulas
from muonbook.measure.baselines import BASELINES
from muonbook.measure.workload import SHAPES

ByteRows = Sequence[Mapping[str, Any]]
TOLERANCE = 0.03  # of what the ring formula says, beyond which the link disagrees with it
BROADCASTS = ("torch_zero",)  # along a tree: only all ranks together send what the ring formula says


def beside_lines(cases: Iterable[tuple[str, int, int]]) -> list[str]:
    """Return what a step of Muon sends on each (shape, D, T), mean over DP ranks: formula, what it leaves out, both.

    float32, with momentum gathered in bfloat16.
    """
    columns, m = [], M[None]
    for shape, dp, tp in cases:
        layout, muon, _ = SHAPES[shape].shared_by(dp).plan(dp, tp)
        n, s = sum(layout.specs[index].numel for index in muon), formulas.mean_owners(layout, muon)
        found = {"closed formula, matrices": formulas.gather_all_muon(dp, tp, n, G, 4, m, s)}
        found |= {f"+ {what}": size for what, size in formulas.beside(layout, tp, muon, m).items()}
        planned = formulas.mean_sent([predict_step(layout, tp, rank, muon) for rank in range(dp)])
        together = sum(found.values())
        columns.append({**found, "= together": together, "predicted from the map": planned})
    rows = [("".join(f"{float(column[what]):>13,.2f}" for column in columns), what) for what in columns[0]]
    heads = "".join(f"{f'{shape} {dp} x {tp}':>13}" for shape, dp, tp in cases)
    exact = all(column["= together"] == column["predicted from the map"] for column in columns)
    return [heads, *(f"{values}  {what}" for values, what in rows), f"Exactly, as fractions: {exact}."]


def ratio_lines(rows: ByteRows) -> list[str]:
    """Return Muon / ZeRO-1 AdamW by formula and counted, grid by grid."""
    lines = ["formula  matrices  whole model      s  DP x TP"]
    for row in rows:
        values = f"{row['formula']:>7.3f}{row['matrices']:>10.3f}{row['whole']:>13.3f}{row['s']:>7.2f}"
        lines.append(f"{values}  {row['dp']} x {row['tp']}")
    return lines


def tell_ratios(rows: ByteRows) -> bool:
    """Print Muon / ZeRO-1 AdamW on one grid, by formula and counted; return whether matrices have the same in both."""
    print(f"{rows[0]['dp']} DP x {rows[0]['tp']} TP ranks, Muon / ZeRO-1 AdamW:")
    print("formula  matrices  whole model")
    for row in rows:
        print(f"{row['formula']:>7.3f}{row['matrices']:>10.3f}{row['whole']:>13.3f}  {row['dtypes']}")
    same = all(abs(row["formula"] - row["matrices"]) < 1e-12 for row in rows)
    print(f"For matrices, counted = formula: {same}.")
    return same


def fsdp2_lines(rows: ByteRows) -> list[str]:
    """Return what torch's Muon on FSDP2 calls, sends and comes to, beside gather_all; one line where ranks agree."""
    scopes = {
        "collectives in the update": lambda row: str(row["update_calls"]),
        "of them per matrix": lambda row: f"{row['update_calls'] / row['matrices']:.1f}",
        "update's bytes / momentum gather's": lambda row: f"{row['update_sent'] / row['gather_all_momentum']:.1f}",
        "whole step's bytes / whole step's": lambda row: (
            f"{(row['update_sent'] + row['model_sent']) / row['gather_all_sent']:.1f}"
        ),
    }
    lines = []
    for what, value in scopes.items():
        values = list(dict.fromkeys(value(row) for row in rows))
        lines.append(f"{' or '.join(values):>6}  {what}")
    return [*lines, f"The same on {', '.join(str(row['dp']) for row in rows)} DP ranks."]


def stray_lines(rows: ByteRows) -> list[str]:
    """Return how far torch's Muon on FSDP2 strays from one process, and that from float32: largest over matrices."""
    return [
        f"{max(row['stray'] for row in rows):.2f}  FSDP2 from one process, both in bf16",
        f"{max(row['rounding'] for row in rows):.2f}  one process in bf16 from one in float32",
    ]


def wire_lines(rows: ByteRows) -> list[str]:
    """Return `wire_on`'s rows of several grids as a table: grids across, baselines down, then the verdicts."""
    grids = list(dict.fromkeys((row["dp"], row["tp"]) for row in rows))
    lines = ["".join(f"{f'{dp} x {tp}':>7}" for dp, tp in grids) + "  DP x TP"]
    for name, baseline in BASELINES.items():
        ratios = {(row["dp"], row["tp"]): f"{row['ratio']:.3f}" for row in rows if row["contender"] == name}
        lines.append("".join(f"{ratios.get(grid, '-'):>7}" for grid in grids) + f"  {baseline.title}")
    return [*lines, *wire_verdicts(rows)]


def wire_verdicts(rows: ByteRows) -> list[str]:
    """Return how near the wire is to the ring formula, in sum and on single ranks, for all that we predict."""
    known = predicted(rows)
    lines = [f"Sum over ranks within {TOLERANCE:.0%}, for all that we predict: {near(known, ['ratio'])}."]
    for what, those in (
        ("single ranks", without_broadcasts(known)),
        ("with broadcasts", [row for row in known if row["contender"] in BROADCASTS]),
    ):
        if those:
            least, most = min(row["least_rank"] for row in those), max(row["greatest_rank"] for row in those)
            lines.append(f"{least:.3f} to {most:.3f}  {what}")
    return lines


def tell_wire(rows: ByteRows) -> bool:
    """Print what the operating system counted on one grid, over what the ring formula says; return whether it is near.

    Of a broadcast only the sum over ranks must be.
    """
    print(f"{rows[0]['dp']} DP x {rows[0]['tp']} TP ranks, {STEPS} steps:")
    print("what left the interfaces, without headers, over the ring formula of the collectives called")
    print("  sum   single ranks        formula")
    for row in rows:
        by_rank = f"{row['least_rank']:.3f} to {row['greatest_rank']:.3f}"
        print(f"{row['ratio']:.3f} {by_rank} {row['ring']:>14,}  {BASELINES[row['contender']].title}")
    known = predicted(rows)
    well = near(known, ["ratio"]) and near(without_broadcasts(known), ["least_rank", "greatest_rank"])
    print(f"Within 3 %, for every contender that we can predict (a broadcast's ranks only in sum): {well}.")
    return well


def predicted(rows: ByteRows) -> ByteRows:
    """Return the rows of baselines whose collectives are known before they are called."""
    return [row for row in rows if BASELINES[row["contender"]].predict is not None]


def without_broadcasts(rows: ByteRows) -> ByteRows:
    return [row for row in rows if row["contender"] not in BROADCASTS]


def near(rows: ByteRows, keys: Sequence[str]) -> bool:
    """Say whether all of these ratios are 1 to within TOLERANCE."""
    return all(abs(row[key] - 1) < TOLERANCE for row in rows for key in keys)


def doubled_lines(rows: ByteRows) -> list[str]:
    """Return FSDP2's surplus on the wire, and what is left of it if reduce-scatters are counted as all-reduces."""
    lines = ["wire / ring   / doubled  DP x TP"]
    for row in rows:
        if row["contender"] == "muon_fsdp2":
            twice = row["payload"] / (row["ring"] + row["reduce_scatter"])
            lines.append(f"{row['ratio']:>11.3f}{twice:>12.3f}  {row['dp']} x {row['tp']}")
    return lines


def world_lines(layouts: ByteRows, dp: int, tp: int) -> list[str]:
    """Return Muon / ZeRO-1 AdamW of the models that chapter 15 plans on this grid, by our bucket rule and Megatron's.

    layouts: of book/results/worlds.json; all parameters, bfloat16 with float32 gradients.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in layouts:
        if (row["dp"], row["tp"]) == (dp, tp):
            found.setdefault(row["model"], {})[row["rule"]] = row
    return ["ratio      s  Megatron's buckets"] + [
        f"{by['ours']['gather_all_over_zero1']:>5.2f}{by['ours']['spread']:>7.1f}"
        f"{by['megatron']['gather_all_over_zero1']:>8.2f}  {model}"
        for model, by in found.items()
    ]
