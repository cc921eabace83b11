"""The race as the page shows it: a bar for everybody, and a line for everybody on every grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from muonbook.ch16.race import step_race
from muonbook.ch16.race.four_ranks import COMPILED
from muonbook.figures.plots import describe_bars, describe_curves, draw_bars, draw_curves

OURS, OTHERS = "ours", "theirs"
NOTHING_BACK = "nothing sent back"
DRAWN_BELOW = 4.0  # times the floor; who takes longer is named, so that the others can be told apart
TITLES = {  # name of an entrant -> whose it is, and what it is called on the page
    "gather_all": (OURS, "gather_all"),
    "gather_cut": (OURS, "gather_cut"),
    "owner": (OURS, "owner"),
    "owner_pipelined": (OURS, "owner, pipelined"),
    "owner_bfloat16_model": (OURS, "owner, bf16 model"),
    "owner_updates": (OURS, "owner, updates"),
    "owner_updates_pipelined": (OURS, "owner, updates, pipelined"),
    "owner_unpublished": (OURS, f"owner, {NOTHING_BACK}"),
    "owner_unpublished_standard_form": (OURS, f"owner, {NOTHING_BACK}, standard form"),
    "keller_jordan": (OTHERS, "Keller Jordan's"),
    "dion_replicated": (OTHERS, "dion, replicated"),
    "dion_rows": (OTHERS, f"dion, rows, {NOTHING_BACK}"),
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
    """Return the picture of the race on four DP ranks, the quickest first, and its alt text.

    Where the CPU has a matrix unit, with two bars for everybody: products made in it, and without it.
    """
    medians = {kind: {n: row["median"] for n, row in ratios(race).items()} for kind, race in _on_four(found).items()}
    first = next(iter(medians.values()))
    by_time = sorted(first, key=lambda name: first[name])
    rows = {TITLES[n][1]: {kind: medians[kind][n] for kind in medians} for n in by_time if first[n] < DRAWN_BELOW}
    others = ", ".join(
        f"{TITLES[n][1]} {' / '.join(f'{of[n]:.2f}' for of in medians.values())}"
        for n in by_time
        if first[n] >= DRAWN_BELOW
    )
    title = "One step over the floor"
    note = f"Four ranks, DP alone. Nothing sent back: new parameters stay where they were made. Off the card: {others}."
    alt = f"{describe_bars(rows, title, unit='x')} Off the card: {others}."
    return draw_bars(rows, title, note, unit="x", grouped=True), alt


def _on_four(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return kind of products -> the race on four DP ranks with them."""
    if found["without_unit"] is None:
        return {"": found["race"]["4x1"]}
    return {"products in the matrix unit": found["race"]["4x1"], "without it": found["without_unit"]}


def floors(found: Mapping[str, Any]) -> str:
    """Return how much longer the floor is without the matrix unit, in a line."""
    times = [race["floor_milliseconds"] for race in _on_four(found).values()]
    return f"the floor without the matrix unit, over the floor with it: {times[-1] / times[0]:.0f}"


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the table: medians of everybody, grid by grid, quartiles on the first."""
    columns = {grid.replace("x", " x "): ratios(race) for grid, race in found["race"].items()}
    if found["without_unit"] is not None:
        columns["no unit"] = ratios(found["without_unit"])
    first = next(iter(columns.values()))
    table = [f"{'':45s}" + "".join(f"{name:>8s}" for name in columns) + "   half of all rounds"]
    for name in sorted(first, key=lambda name: first[name]["median"]):
        cells = "".join(f"{of[name]['median']:8.2f}" if name in of else f"{'-':>8s}" for of in columns.values())
        low, high = first[name]["quartiles"]
        whose, title = TITLES[name]
        table.append(f"{f'{whose} {title}':45s}{cells}   {low:.2f} to {high:.2f}")
    return table


def growth(found: Mapping[str, Any]) -> tuple[Figure, str]:
    """Return how the step grows, over its floor, with the number of ranks, and alt text."""
    rows = found["growth"]["ranks"]
    ranks = [dp for dp, *_ in step_race.GROWING["ranks"]]
    curves = {
        TITLES[name][1]: (ranks, [row["entrants"][name]["ratio"]["median"] for row in rows])
        for name in ("gather_all", "owner")
    }
    curves["the floor"] = (ranks, [1.0] * len(ranks))
    shown = curves, "DP ranks, on two cores" if found["machine"]["cores"] == 2 else "DP ranks", "times the floor"
    title = "The same matrices on more ranks"
    return draw_curves(*shown, title), describe_curves(*shown, title)


def growth_lines(found: Mapping[str, Any]) -> list[str]:
    """Return medians over the floor as ranks, layers and widths grow."""
    table = [f"{'':34s}" + "".join(f"{TITLES[name][1]:>17s}" for name in step_race.GROWN[:-1])]
    for what, sizes in step_race.GROWING.items():
        for (dp, layers, width), row in zip(sizes, found["growth"][what], strict=True):
            cells = (row["entrants"][name]["ratio"]["median"] for name in step_race.GROWN[:-1])
            place = f"{dp} ranks, {6 * layers} matrices, width {width}"
            table.append(f"{place:34s}" + "".join(f"{cell:17.2f}" for cell in cells))
    return table


def training_lines(found: Mapping[str, Any]) -> list[str]:
    """Return time and bytes of whole training steps over those of ZeRO-1 AdamW."""
    names = ("gather_all", "owner", "owner_pipelined", "owner_updates")
    table = [f"{'':8s}{'tokens':>8s}" + "".join(f"{TITLES[name][1]:>18s}" for name in names)]
    table += [f"{'':16s}" + f"{'time':>11s}{'bytes':>7s}" * 4]
    for grid, rows in found["training"].items():
        for row in rows:
            cells = (row[name] for name in names)
            shown = "".join(f"{cell['ratio']['median']:11.2f}{cell['bytes_ratio']:7.3f}" for cell in cells)
            table.append(f"{grid.replace('x', ' x '):8s}{row['tokens']:8,}{shown}")
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
