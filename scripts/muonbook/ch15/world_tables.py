"""Chapter 15's planned worlds as lines of text: what its page prints of book/results/worlds.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonbook.ch15.links import NODE

CLAIMED = (0.01, 0.03)  # of forward and backward: Moonlight (Liu et al. 2025)

Found = Mapping[str, Any]


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
        ("of all with a grid: with endless memory another T would win", f"{said['memory_decides']:.0%}"),
        ("with a choice, and D and T within a factor of two possible", f"{said['square_possible']}"),
        ("  that many pairs of a model and a number of ranks", f"{said['square_worlds']}"),
        ("  it has the shortest step", f"{said['square_wins_step']:.0%}"),
        ("  it takes longer than the best by, median", f"{said['square_cost_median']:.0%}"),
        ("  the optimizer communicates least there", f"{said['square_wins_communication']:.0%}"),
        ("  the same, where T > D is possible too", f"{said['square_wins_communication_then']:.0%}"),
        ("  (in further cells it is the only grid that fits)", f"{forced}"),
        (
            "winner unchanged by one assumption doubled or halved, at least",
            f"{1 - max(said['winner_changes'].values()):.0%}",
        ),
        ("winner unchanged in every mix of all four", f"{said['winner_holds_in_all_corners']:.0%}"),
    )
    return [f"{value:>5s}  {label}" for label, value in rows]


def latency_lines(worlds: Found) -> list[str]:
    """Return, per batch, how many cells add to forward and backward less than, as much as, or more than the claim."""
    lines = ["      tokens   cells   below 1 %   1 to 3 %   above 3 %"]
    for tokens in sorted({cell["tokens"] for cell in worlds["cells"]}):
        extra = [c["over_forward_backward"] for c in worlds["cells"] if c["tokens"] == tokens and c["tp"] is not None]
        low, high = (sum(value < limit for value in extra) / len(extra) for limit in CLAIMED)
        lines.append(f"  {tokens:10,d}{len(extra):8d}{low:12.0%}{high - low:11.0%}{1 - high:12.0%}")
    return lines


def moonlight_lines(worlds: Found) -> list[str]:
    """Return, for Moonlight's own batches, the optimizer's time over forward and backward, by ranks: all of it, and
    what Muon adds to AdamW's."""
    batches = sorted({row["tokens"] for row in worlds["moonlight"]})
    lines = ["  ranks" + "".join(f"{f'{tokens:,} tokens: optimizer':>34s}{'extra':>8s}" for tokens in batches)]
    for ranks in sorted({row["ranks"] for row in worlds["moonlight"]}):
        rows = {row["tokens"]: row for row in worlds["moonlight"] if row["ranks"] == ranks}
        cells = (f"{rows[tokens]['optimizer']:34.1%}{rows[tokens]['extra']:8.1%}" for tokens in batches)
        lines.append(f"  {ranks:5d}" + "".join(cells))
    return lines


def reported_lines(worlds: Found) -> list[str]:
    """Return what the report's own world sends on each grid of its four ranks."""
    lines = ["  dp x tp   MiB sent   sending over PCIe / the quickest grid's"]
    for row in worlds["reported"]:
        lines.append(f"  {row['dp']:2d} x {row['tp']:2d}{row['bytes'] / 2**20:11.1f}{row['seconds']:11.2f}x")
    return lines


def dearest_lines(worlds: Found, tokens: int, count: int) -> list[str]:
    """Return the cells in which Muon's step is longest over AdamW's, among those whose rows stay within a node."""
    cells = [c for c in worlds["cells"] if c["tp"] and c["tp"] <= NODE and c["tokens"] == tokens]
    lines = [f"  {'':48s}best T   on that grid   best grids   Newton-Schulz"]
    for cell in sorted(cells, key=lambda cell: -cell["over_adamw"])[:count]:
        fabric = worlds["assumptions"]["fabrics"][cell["fabric"]]["title"]
        place = f"{worlds['models'][cell['model']]['title']}, {cell['ranks']:,} ranks, {fabric}"
        ratios = f"{cell['over_adamw']:13.2f}x{cell['over_best_adamw']:12.2f}x"
        lines.append(f"  {place:48s}{cell['tp']:6d}{ratios}{cell['newton_schulz_share']:15.0%}")
    return lines
