"""The race as the page shows it: a bar for everybody, and a line for everybody on every grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from muonbook.ch16.race.four_ranks import COMPILED
from muonbook.figures.plots import describe_bars, draw_bars

OURS, OTHERS = "this book's", "others'"
OWNERS_KEEP = "unpublished, "
DRAWN_BELOW = 2.0  # times the floor; who takes longer is named, so that the others can be told apart
TITLES = {  # name of an entrant -> whose it is, and what it is called on the page
    "gather_all": (OURS, "gather_all"),
    "gather_cut": (OURS, "gather_cut"),
    "owner": (OURS, "owner"),
    "owner_bfloat16_model": (OURS, "owner, bf16 model"),
    "owner_updates": (OURS, "owner, publishes updates"),
    "owner_unpublished": (OURS, OWNERS_KEEP + "owner"),
    "owner_unpublished_standard_form": (OURS, OWNERS_KEEP + "owner without Gram form"),
    "keller_jordan": (OTHERS, "Keller Jordan's"),
    "dion_replicated": (OTHERS, "dion, replicated"),
    "dion_rows": (OTHERS, OWNERS_KEEP + "dion, rows"),
    "dion_rows_published": (OTHERS, "dion, rows, in bf16"),
    "torch_replicated": (OTHERS, "torch.optim.Muon, replicated"),
    "torch_dtensor": (OTHERS, "torch.optim.Muon, DTensor"),
}


def ratios(race: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return name -> spread of everybody on one grid; of what also ran compiled, the faster of the two."""
    found = {}
    for name in TITLES:
        variants = (name, name.replace("dion_", f"dion_{COMPILED}"))
        rows = [race["entrants"][variant]["ratio"] for variant in variants if variant in race["entrants"]]
        if rows:
            found[name] = min(rows, key=lambda row: row["median"])
    return found


def bars(found: Mapping[str, Any]) -> tuple[Figure, str]:
    """Return the picture of the race on four DP ranks, the quickest first, and its alt text."""
    medians = {name: row["median"] for name, row in ratios(found["race"]["4x1"]).items()}
    by_time = sorted(medians, key=lambda name: medians[name])
    rows = {TITLES[n][1]: {TITLES[n][0]: medians[n]} for n in by_time if medians[n] < DRAWN_BELOW}
    others = ", ".join(f"{TITLES[n][1]} {medians[n]:.2f}" for n in by_time if medians[n] >= DRAWN_BELOW)
    title = "One step over the floor"
    note = f"Four ranks, DP alone. Unpublished: owners keep their new parameters. Off the card: {others}."
    alt = f"{describe_bars(rows, title, unit='x')} Off the card: {others}."
    return draw_bars(rows, title, note, unit="x"), alt


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the table: medians of everybody, grid by grid, quartiles on the first."""
    grids = list(found["race"])
    table = [f"{'':50s}" + "".join(f"{grid.replace('x', ' x '):>8s}" for grid in grids) + "   half of all rounds"]
    columns = [ratios(found["race"][grid]) for grid in grids]
    for name in sorted(columns[0], key=lambda name: columns[0][name]["median"]):
        cells = "".join(f"{column[name]['median']:8.2f}" if name in column else f"{'-':>8s}" for column in columns)
        low, high = columns[0][name]["quartiles"]
        whose, title = TITLES[name]
        table.append(f"{f'{whose} {title}':50s}{cells}   {low:.2f} to {high:.2f}")
    return table


def alone_lines(found: Mapping[str, Any]) -> list[str]:
    """Return what one device takes, over torch.optim.Muon: whole steps, and Newton–Schulz of one matrix."""
    alone = found["one_device"]
    kinds = {"steps": "whole step", "newton_schulz": "Newton–Schulz"}
    return [
        f"{title:14s} {shape:16s}{ratio['median']:6.2f}"
        for kind, title in kinds.items()
        for shape, ratio in alone[kind].items()
    ]
