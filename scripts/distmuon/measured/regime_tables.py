"""Chapter 15's stored measurements as lines of text and as curves: what the page prints and draws.

Each function takes book/results/regimes.json, as `results.load("regimes")` returns it, and gives ratios only.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from distmuon.measured.cost_fit import FITTED_ENTRANTS, FITTED_RATES, Constants, Point, fit, points
from distmuon.measured.regimes import SKEW
from distmuon.measured.workload import Workload

NAMES = {
    "muon": "Muon",
    "zero1": "AdamW, ZeRO-1",
    "ddp": "AdamW, DDP",
    "muon_small": "Muon, many calls",
    "zero1_small": "ZeRO-1, many calls",
}
CLAIMED = (0.01, 0.03)  # of forward and backward: Moonlight (Liu et al. 2025)

Found = Mapping[str, Any]


# ---- Batch size -------------------------------------------------------------------------------------------


def most_share(width: int, tokens: float) -> float:
    """Return the bound 5 a / tokens: Newton–Schulz's operations, each matrix once, over forward and backward's."""
    return 5 * width / tokens


def share_curves(found: Found, width: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (series, bands) for `draw_curves`: optimizer's time over forward and backward's, over tokens per step."""
    rows = found["share"][str(width)]
    tokens = rows["tokens"]
    series: dict[str, Any] = {
        "5a / tokens": (tokens, [most_share(width, t) for t in tokens]),
        "Muon": (tokens, [row["median"] for row in rows["muon"]]),
        "3 %": (tokens, [CLAIMED[1]] * len(tokens)),
        "1 %": (tokens, [CLAIMED[0]] * len(tokens)),
        "AdamW": (tokens, [row["median"] for row in rows["adamw"]]),
    }
    low, high = ([row["quartiles"][n] for row in rows["muon"]] for n in (0, 1))
    return series, {"Muon": (tokens, low, high)}


def share_lines(found: Found) -> list[str]:
    """Return, per width, Muon's and AdamW's share at some batches, and from which batch on it is within the claim."""
    lines = ["  width   tokens   5a / tokens      Muon     AdamW"]
    for width, rows in found["share"].items():
        chosen = sorted({*range(0, len(rows["tokens"]), 3), len(rows["tokens"]) - 1})
        for n in chosen:
            tokens, cells = rows["tokens"][n], [rows[name][n]["median"] for name in ("muon", "adamw")]
            cells = [most_share(int(width), tokens), *cells]
            lines.append(f"  {width:>5s}{tokens:9,d}{cells[0]:14.1%}{cells[1]:10.1%}{cells[2]:10.1%}")
    return lines


def first_within(found: Found, width: int, share: float) -> int | None:
    """Return the tokens per step from which on Muon's median share stays at or below `share`; None: none measured."""
    rows = found["share"][str(width)]
    over = [tokens for tokens, row in zip(rows["tokens"], rows["muon"], strict=True) if row["median"] > share]
    later = [tokens for tokens in rows["tokens"] if tokens > max(over, default=0)]
    return min(later, default=None)


def repeated(workload: Workload, dp: int, tp: int) -> tuple[float, float]:
    """Return how often `gather_all` orthogonalizes a matrix, mean by operations; and the busiest rank's work over its
    fair share. From the map alone."""
    from distmuon.newton_schulz import flops

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
    """Return, per grid, bytes and step time over those of ZeRO-1 AdamW on the same grid, with quartiles."""
    lines = ["  dp x tp   Muon: bytes      time (quartiles)   DDP: bytes      time (quartiles)"]
    for row in found["skew"]:
        cells = f"  {row['dp']:2d} x {row['tp']:2d}  "
        for name in ("muon", "ddp"):
            sent = row[name]["sent_bytes"] / row["zero1"]["sent_bytes"]
            cells += f"{sent:12.2f}x{_spread(row[name]['over_zero1']):>22s}"
        lines.append(cells)
    return lines


def quickest_grids(found: Found) -> dict[str, str]:
    """Return for each contender the grid on which its median step was shortest: "4 x 2"."""
    rows = {f"{row['dp']} x {row['tp']}": row for row in found["skew"]}
    return {name: min(rows, key=lambda grid: rows[grid][name]["seconds"]["median"]) for name in SKEW}


# ---- Links ------------------------------------------------------------------------------------------------


def link_lines(found: Found) -> list[str]:
    """Return step time over ZeRO-1 AdamW's, per rate, with quartiles; above it the two limits that it lies between."""
    asked = found["links"]["entrants"]
    names = [name for name in asked if name != "zero1"]
    rows = {_rate(step["rate_mbit"]): step for step in found["links"]["steps"]}
    lines = [_row("", [NAMES[name] for name in names])]
    for label, amount in (("bytes", _sent), ("computed", _computation)):
        lines.append(
            _row(label, [f"{amount(asked[name]) / amount(asked['zero1']):.2f}x            " for name in names])
        )
    return lines + [_row(rate, [_spread(step[name]["over_zero1"]) for name in names]) for rate, step in rows.items()]


def link_curves(found: Found) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (series, bands) for `draw_curves`: step time over ZeRO-1's, over Mbit/s, and the byte ratio of Muon."""
    steps = [step for step in found["links"]["steps"] if step["rate_mbit"] is not None]
    rates, asked = [step["rate_mbit"] for step in steps], found["links"]["entrants"]
    series: dict[str, Any] = {}
    bands = {}
    for name in ("muon", "ddp"):
        ratios = [step[name]["over_zero1"] for step in steps]
        low, high = ([ratio["quartiles"][n] for ratio in ratios] for n in (0, 1))
        series[NAMES[name]] = (rates, [ratio["median"] for ratio in ratios])
        bands[NAMES[name]] = (rates, low, high)
    series["Muon's bytes"] = (rates, [_sent(asked["muon"]) / _sent(asked["zero1"])] * len(rates))
    return series, bands


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


def model_curves(found: Found) -> dict[str, Any]:
    """Return series for `draw_curves`: step time over computation alone, measured and by the model, for two of them."""
    constants, _ = fitted(found)
    series: dict[str, Any] = {}
    for name in ("muon", "muon_small"):
        mine = [p for p in points(found["links"]) if p.entrant == name and p.rate_mbit is not None]
        for label, value in (("measured", lambda p: p.seconds), ("model", constants.seconds)):
            times = [value(point) / point.computation_seconds for point in mine]
            series[f"{NAMES[name]}, {label}"] = ([point.rate_mbit for point in mine], times)
    return series


def held_out(constants: Constants, left: Sequence[Point]) -> dict[str, float]:
    """Return the median absolute error per group of held-out points, and of all: what the model is worth."""
    groups = {
        "Muon, which it never saw": [p for p in left if p.entrant not in FITTED_ENTRANTS],
        "rates it never saw": [p for p in left if p.rate_mbit not in FITTED_RATES],
        "all held out": list(left),
    }
    return {name: statistics.median(abs(constants.error(p)) for p in group) for name, group in groups.items() if group}


def _sent(asked: Mapping[str, Any]) -> float:
    return asked["ring_bytes"] + asked["exchange_bytes"]


def _computation(asked: Mapping[str, Any]) -> float:
    return asked["computation_seconds"]["median"]


def _rate(rate_mbit: float | None) -> str:
    return "no limit" if rate_mbit is None else f"{rate_mbit:g} Mbit"


def _row(label: str, cells: Sequence[str]) -> str:
    return (f"  {label:9s}" + "".join(f"{cell:>21s}" for cell in cells)).rstrip()


def _spread(found: Mapping[str, Any]) -> str:
    low, high = found["quartiles"]
    return f"{found['median']:.2f}x ({low:.2f}-{high:.2f})"


# ---- Planned worlds ---------------------------------------------------------------------------------------


def world_lines(worlds: Found) -> list[str]:
    """Return what the cells of book/results/worlds.json together say of "DP = TP", and how sure that is."""
    said = worlds["verdict"]
    forced = sum(cell.get("square_cost") == 0 and " " not in cell["tp_choices"] for cell in worlds["cells"])
    rows = (
        ("cells with a grid that fits memory and batch", f"{said['with_a_grid']} of {said['cells']}"),
        ("of them with a choice of T", f"{said['with_a_choice']}"),
        ("  the least T that fits has the shortest step", f"{said['least_tp_wins_step']:.0%}"),
        ("  the largest T has", f"{said['most_tp_wins_step']:.0%}"),
        ("  the largest T communicates least", f"{said['most_tp_wins_communication']:.0%}"),
        ("  ZeRO-1 AdamW wants the same T as Muon", f"{said['adamw_wants_the_same']:.0%}"),
        ("with a grid in which D and T are within a factor of two", f"{said['square_possible']}"),
        ("  it has the shortest step", f"{said['square_wins_step']:.0%}"),
        ("  it takes longer than the best by, median", f"{said['square_cost_median']:.0%}"),
        ("  (in further cells it is the only grid that fits)", f"{forced}"),
        (
            "winner unchanged by one assumption doubled or halved",
            f"{1 - max(said['winner_changes'].values()):.0%} or more",
        ),
        ("winner unchanged in every mix of all four", f"{said['winner_holds_in_all_corners']:.0%}"),
    )
    return [f"{label:58s}{value:>14s}" for label, value in rows]


def latency_lines(worlds: Found) -> list[str]:
    """Return, per batch, how many cells add to forward and backward less than, as much as, or more than the claim."""
    lines = ["     tokens   cells   below 1 %   1 to 3 %   above 3 %"]
    for tokens in sorted({cell["tokens"] for cell in worlds["cells"]}):
        extra = [c["over_forward_backward"] for c in worlds["cells"] if c["tokens"] == tokens and c["tp"] is not None]
        low, high = (sum(value < limit for value in extra) / len(extra) for limit in CLAIMED)
        lines.append(f"  {tokens:9,d}{len(extra):8d}{low:12.0%}{high - low:11.0%}{1 - high:12.0%}")
    return lines
