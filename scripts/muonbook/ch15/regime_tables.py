"""What chapter 15 stores, as lines of text and as curves: what the page prints and draws.

found: book/results/regimes.json, as `results.load("regimes")` returns it; what is told of it are ratios only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from muonbook.ch15.cost_fit import FITTED_ENTRANTS, Constants, Point, fit, points, worst_and_median
from muonbook.ch15.regimes import ALGORITHMS
from muonbook.measure.muon_variants import MUON_VARIANTS
from muonbook.measure.workload import TIMED, Workload

NAMES = {
    **{name: MUON_VARIANTS[name].title for name in ALGORITHMS},
    "zero1": "AdamW, ZeRO-1",
    "ddp": "AdamW, DDP",
    "muon_small": "bucketed, many calls",
    "zero1_small": "ZeRO-1, many calls",
}

Found = Mapping[str, Any]


# ---- Batch size -------------------------------------------------------------------------------------------


def most_share(width: int, tokens: float) -> float:
    """Return the bound 5 a / tokens: Newton–Schulz's operations, each matrix once, over forward and backward's."""
    return 5 * width / tokens


def share_curves(found: Found, width: int) -> dict[str, Any]:
    """Return series for `draw_curves`: the optimizer's time over forward and backward's, medians, over tokens."""
    rows = found["share"][str(width)]
    tokens = rows["tokens"]
    return {
        "5a / tokens": (tokens, [most_share(width, t) for t in tokens]),
        "Muon": (tokens, [row["median"] for row in rows["muon"]]),
        "AdamW": (tokens, [row["median"] for row in rows["adamw"]]),
    }


def share_lines(found: Found) -> list[str]:
    """Return, per width, Muon's and AdamW's share at some batches, and how many rounds that is the median of."""
    lines = ["  width   tokens   5a / tokens      Muon     AdamW   rounds"]
    for width, rows in found["share"].items():
        chosen = sorted({*range(0, len(rows["tokens"]), 3), len(rows["tokens"]) - 1})
        for n in chosen:
            tokens, cells = rows["tokens"][n], [rows[name][n]["median"] for name in ("muon", "adamw")]
            cells = [most_share(int(width), tokens), *cells]
            shares = f"{cells[0]:14.1%}{cells[1]:10.1%}{cells[2]:10.1%}"
            lines.append(f"  {width:>5s}{tokens:9,d}{shares}{rows['muon'][n]['count']:9d}")
    return lines


def slope(found: Found, width: int) -> float:
    """Return the power of the batch that Muon's share follows, by least squares on both logarithms; the bound's: -1."""
    rows = found["share"][str(width)]
    tokens, shares = ([math.log(x) for x in xs] for xs in (rows["tokens"], [row["median"] for row in rows["muon"]]))
    return statistics.linear_regression(tokens, shares).slope


def repeated(workload: Workload, dp: int, tp: int) -> tuple[float, float]:
    """Return how often `gather_all` orthogonalizes a matrix, mean by operations; and the busiest rank's work over its
    fair share. From the map alone."""
    from distmuon.optim.newton_schulz import flops

    layout, muon, _ = workload.plan(dp, tp)
    ranks = [0] * dp
    whole = 0
    for bucket in layout.buckets:
        for index in (index for index in bucket.params if index in muon):
            work = flops(layout.specs[index].full_shape(tp))
            whole += work
            for rank in layout.owners(bucket, index):
                ranks[rank] += work
    return tp * sum(ranks) / whole, tp * dp * max(ranks) / whole


# ---- Grids ------------------------------------------------------------------------------------------------


def skew_lines(found: Found) -> list[str]:
    """Return, per grid, bytes and step time over ZeRO-1 AdamW's; bucketed's step over that on its best grid."""
    names = (*ALGORITHMS, "ddp")
    titles = [NAMES[name] for name in names]
    lines = [_row("bytes", titles)]
    for row in found["skew"]:
        lines.append(_row(_grid(row), [_times(row[n]["sent_bytes"] / row["zero1"]["sent_bytes"]) for n in names]))
    lines.append(_row("time", titles))
    lines += [_row(_grid(row), [_spread(row[name]["over_zero1"]) for name in names]) for row in found["skew"]]
    lines.append("  bucketed's step over that on its best grid, and how often a matrix is orthogonalized:")
    best = min(row["muon"]["seconds"]["median"] for row in found["skew"])
    for row in found["skew"]:
        lines.append(_row(_grid(row), [_times(row["muon"]["seconds"]["median"] / best), _times(repeats(row))], 10))
    return [*lines, _rounds(row["muon"]["over_zero1"] for row in found["skew"])]


def clocked_grids(found: Found) -> dict[str, dict[str, float]]:
    """Return {grid: {algorithm: median step over ZeRO-1 AdamW's}}."""
    return {
        f"{row['dp']} DP × {row['tp']} TP": {NAMES[name]: row[name]["over_zero1"]["median"] for name in ALGORITHMS}
        for row in found["skew"]
    }


def repeats(row: Mapping[str, Any]) -> float:
    """Return how often a matrix is orthogonalized on one grid of the skew, on average."""
    mean, _ = repeated(TIMED.shared_by(row["dp"] * row["tp"]), row["dp"], row["tp"])
    return mean


# ---- Links ------------------------------------------------------------------------------------------------


def link_lines(found: Found) -> list[str]:
    """Return step time over ZeRO-1 AdamW's, per rate; before it the limits of the simple formula."""
    asked, steps = found["links"]["entrants"], found["links"]["steps"]
    names = [name for name in asked if name != "zero1"]
    lines = [_row("", ["bytes", "computed"], 10)]
    for name in names:
        amounts = [amount(asked[name]) / amount(asked["zero1"]) for amount in (_sent, _computation)]
        lines.append(_row(NAMES[name], [_times(each) for each in amounts], 10))
    lines.append(_row("time", [_rate(step["rate_mbit"]) for step in steps]))
    lines += [_row(NAMES[name], [_spread(step[name]["over_zero1"]) for step in steps]) for name in names]
    return [*lines, _rounds(step["muon"]["over_zero1"] for step in steps)]


def link_parts(found: Found) -> dict[str, dict[str, dict[str, float]]]:
    """Return {link: {entrant: {part: % of ZeRO-1 AdamW's step over it}}}, from the slowest link to none.

    Entrants are AdamW and Muon by algorithm. The whole is the median over rounds of the two steps' ratio; of it,
    computing is what a step takes that sends nothing, and the rest is sending, and waiting for it.
    """
    parts = {}
    for step in found["links"]["steps"]:
        rows = {}
        for name in ("zero1", *ALGORITHMS):
            alone = found["links"]["entrants"][name]["computation_seconds"]["median"]
            computing = 100 * alone / step["zero1"]["seconds"]["median"]
            whole = 100 * step[name]["over_zero1"]["median"]
            rows[NAMES[name]] = {"computing": computing, "sending": whole - computing}
        parts[_rate(step["rate_mbit"])] = rows
    return parts


def link_bytes(found: Found) -> dict[str, float]:
    """Return {entrant of `link_parts`: bytes that a rank sends in a step, % of ZeRO-1 AdamW's}."""
    asked = found["links"]["entrants"]
    return {NAMES[name]: 100 * _sent(asked[name]) / _sent(asked["zero1"]) for name in ("zero1", *ALGORITHMS)}


# ---- The model --------------------------------------------------------------------------------------------


def fitted(found: Found) -> tuple[Constants, list[Point]]:
    """Return the constants, and the points that they were not fitted to."""
    all_points = points(found["links"])
    return fit(point for point in all_points if point.fitted), [point for point in all_points if not point.fitted]


def error_lines(found: Found) -> list[str]:
    """Return the model's error, (model - measured) / measured, per entrant and rate; a star marks a fitted point."""
    constants, _ = fitted(found)
    rates = [step["rate_mbit"] for step in found["links"]["steps"]]
    lines = [f"  {'':22s}" + "".join(f"{_rate(rate):>12s}" for rate in rates)]
    for name in found["links"]["entrants"]:
        mine = [point for point in points(found["links"]) if point.entrant == name]
        cells = (f"{constants.error(point):+.0%}{'*' if point.fitted else ' '}" for point in mine)
        lines.append(f"  {NAMES[name]:22s}" + "".join(f"{cell:>12s}" for cell in cells))
    return lines


def held_out(constants: Constants, left: Sequence[Point]) -> dict[str, float]:
    """Return the median absolute error per group of held-out points."""
    groups = {
        "Muon, whose sending it never saw": [p for p in left if p.entrant not in FITTED_ENTRANTS],
        "all held out": left,
    }
    return {name: worst_and_median(constants, group)[2] for name, group in groups.items()}


def _sent(asked: Mapping[str, Any]) -> float:
    return asked["ring_bytes"] + asked["exchange_bytes"]


def _computation(asked: Mapping[str, Any]) -> float:
    return asked["computation_seconds"]["median"]


def _rate(rate_mbit: float | None) -> str:
    return "no limit" if rate_mbit is None else f"{rate_mbit:g} Mbit"


def _grid(row: Mapping[str, Any]) -> str:
    return f"{row['dp']:2d} x {row['tp']:2d}"


def _row(label: str, cells: Sequence[str], width: int = 15) -> str:
    return (f"  {label:20s}" + "".join(f"{cell:>{width}s}" for cell in cells)).rstrip()


def _times(ratio: float) -> str:
    return f"{ratio:.2f}"


def _spread(found: Mapping[str, Any]) -> str:
    low, high = _band(found)
    return f"{found['median']:.2f} {low:.2f}-{high:.2f}"


def _band(found: Mapping[str, Any]) -> list[float]:
    """Return the quartiles, or, of fewer than eight values, the range."""
    return found["quartiles"] if found["count"] >= 8 else found["range"]


def _rounds(rows: Iterable[Mapping[str, Any]]) -> str:
    counts = ", ".join(str(row["count"]) for row in rows)
    return f"  rounds: {counts}; time: median, and quartiles, below 8 rounds the range"
