"""The stored race as the page shows it: four optimizers' steps, compared with their bare matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from muonbook.ch16.race.four_ranks import COMPILED
from muonbook.figures.plots import describe_bars, draw_bars
from muonbook.ways import TITLES

SHOWN = {  # what it is called on the page -> name of an entrant; all four leave new parameters on every rank
    TITLES["muon_owner"]: "owner",
    "dion": "dion_replicated",
    TITLES["muon"]: "gather_all",
    "torch.optim.Muon": "torch_replicated",
}


def medians(race: Mapping[str, Any]) -> dict[str, float]:
    """Return time over the bare matrix products', in the median; of what also ran compiled, the faster of the two."""
    found = {}
    for title, name in SHOWN.items():
        variants = (name, name.replace("dion_", f"dion_{COMPILED}"))
        rows = [race["entrants"][variant] for variant in variants if variant in race["entrants"]]
        if rows:
            found[title] = min(row["ratio"]["median"] for row in rows)
    return found


def race_bars(found: Mapping[str, Any]) -> tuple[Figure, str]:
    """Return the picture of the race on four DP ranks, and its alt text. found: what `step_race.measure` returns."""
    rows, title = medians(found["race"]["4x1"]), "One step, over its bare matrix products"
    note = "Four DP ranks on two cores, products in bf16 by the CPU's matrix unit. Dashes: nothing but the products."
    return draw_bars(rows, title, note, unit="x", level=1.0), describe_bars(rows, title, unit="x")
