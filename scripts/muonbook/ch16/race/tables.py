"""The stored race as chapter 16 prints it: one step of six optimizers, and whole training steps. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonbook.ways import TITLES

NO_UNIT = "4x1 without the matrix unit"
COMPILED = "compiled_"  # in the names of entrants that torch.compile has compiled
SHOWN = {  # what it is called on the page -> name of an entrant; all of them leave new parameters on every rank
    TITLES["muon_owner"]: "owner",
    TITLES["muon_cut"]: "gather_cut",
    "dion": "dion_replicated",
    TITLES["muon"]: "gather_all",
    "KellerJordan/Muon": "keller_jordan",
    "torch.optim.Muon": "torch_replicated",
}
TRAINED = {TITLES["muon"]: "gather_all", TITLES["muon_owner"]: "owner", "owner, sends updates": "owner_updates"}


def medians(race: Mapping[str, Any]) -> dict[str, float]:
    """Return time over the bare matrix products', in the median; of what also ran compiled, the faster of the two."""
    found = {}
    for title, name in SHOWN.items():
        variants = (name, name.replace("dion_", f"dion_{COMPILED}"))
        rows = [race["entrants"][variant] for variant in variants if variant in race["entrants"]]
        if rows:
            found[title] = min(row["ratio"]["median"] for row in rows)
    return found


def by_grid(found: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return what was measured on each grid; of a CPU with a unit for bf16, four DP ranks without it (NO_UNIT) as well.

    what: "race" or "training".
    """
    again = found[{"race": "without_unit", "training": "training_without_unit"}[what]]
    return dict(found[what]) | ({} if again is None else {NO_UNIT: again})


def races(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return grid -> `medians`."""
    return {_head(grid): medians(race) for grid, race in by_grid(found, "race").items()}


def training_steps(found: Mapping[str, Any]) -> list[tuple[str, int, dict[str, float]]]:
    """Return (grid, tokens, {way: time over ZeRO-1 AdamW's}) for each batch of the whole training steps."""
    return [
        (_head(grid), row["tokens"], {title: row[name]["ratio"]["median"] for title, name in TRAINED.items()})
        for grid, rows in by_grid(found, "training").items()
        for row in rows
    ]


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return both tables."""
    raced = races(found)
    printed = [f"{'one step / its bare products':28}" + "".join(f"{grid:>16}" for grid in raced)]
    for title in sorted(raced["4 x 1"], key=raced["4 x 1"].__getitem__):
        cells = (f"{times[title]:16.2f}" if title in times else f"{'-':>16}" for times in raced.values())
        printed.append(f"  {title:26}" + "".join(cells))
    printed += ["", "a whole training step / AdamW's", f"  {'DP x TP':14}{'tokens':>7}  {'  '.join(TRAINED)}"]
    for grid, tokens, times in training_steps(found):
        cells = (f"{time:{len(title)}.2f}" for title, time in times.items())
        printed.append(f"  {grid:14}{tokens:7,}  {'  '.join(cells)}")
    return printed


def _head(grid: str) -> str:
    return "4 x 1, no unit" if grid == NO_UNIT else grid.replace("x", " x ")
