"""The race as chapter 16 prints it: one step of six optimizers, and whole training steps. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonbook.baselines import TITLES

SHOWN = {  # what it is called on the page -> name of a baseline; all of them leave new parameters on every rank
    TITLES["muon_owner"]: "owner",
    TITLES["muon_cut"]: "gather_cut",
    "dion": "dion_compiled_replicated",
    TITLES["muon"]: "gather_all",
    "KellerJordan/Muon": "keller_jordan",
    "torch.optim.Muon": "torch_replicated",
}
TRAINED = {TITLES["muon"]: "gather_all", TITLES["muon_owner"]: "owner", "owner, sends updates": "owner_updates"}


def races(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return {grid: {title: time over the bare matrix products', in the median}} of those who ran there."""
    return {
        grid.replace("x", " x "): {
            title: race["baselines"][name]["ratio"]["median"]
            for title, name in SHOWN.items()
            if name in race["baselines"]
        }
        for grid, race in found["race"].items()
    }


def training_steps(found: Mapping[str, Any]) -> list[tuple[str, int, dict[str, float]]]:
    """Return (grid, tokens, {way: time over ZeRO-1 AdamW's}) for each batch of the whole training steps."""
    return [
        (
            grid.replace("x", " x "),
            row["tokens"],
            {title: row[name]["ratio"]["median"] for title, name in TRAINED.items()},
        )
        for grid, rows in found["training"].items()
        for row in rows
    ]


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return both tables."""
    raced = races(found)
    printed = [f"{'one step / its bare products':28}" + "".join(f"{grid:>16}" for grid in raced)]
    for title in sorted(raced["4 x 1"], key=raced["4 x 1"].__getitem__):
        cells = (f"{times[title]:16.2f}" if title in times else f"{'-':>16}" for times in raced.values())
        printed.append(f"  {title:26}" + "".join(cells))
    if not all(race["fast_bfloat16"] for race in found["race"].values()):
        printed.append("No fast bfloat16 here: products and ours are in float32, torch's and others' are not.")
    printed += ["", "a whole training step / AdamW's", f"  {'DP x TP':14}{'tokens':>7}  {'  '.join(TRAINED)}"]
    for grid, tokens, times in training_steps(found):
        cells = (f"{time:{len(title)}.2f}" for title, time in times.items())
        printed.append(f"  {grid:14}{tokens:7,}  {'  '.join(cells)}")
    return printed
