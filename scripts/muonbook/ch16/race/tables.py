"""The stored race as chapter 16 prints it: one step of six optimizers, and whole training steps. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonbook.ways import TITLES

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


def races(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the races on four DP ranks: how the products were computed -> `medians`."""
    both = (found["race"]["4x1"], found["without_unit"])
    return {_how(race["matrix_unit"]): medians(race) for race in both if race is not None}


def training_steps(found: Mapping[str, Any]) -> list[tuple[str, str, int, dict[str, float]]]:
    """Return (grid, how, tokens, {way: time over ZeRO-1 AdamW's}) for each batch of the whole training steps."""
    stored = [(grid, found["race"][grid]["matrix_unit"], rows) for grid, rows in found["training"].items()]
    if found.get("training_without_unit") is not None:
        stored.insert(1, ("4x1", False, found["training_without_unit"]))
    steps = []
    for grid, unit, rows in stored:
        for row in rows:
            times = {title: row[name]["ratio"]["median"] for title, name in TRAINED.items()}
            steps.append((grid.replace("x", " x "), _how(unit), row["tokens"], times))
    return steps


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return both tables."""
    by_how = races(found)
    printed = [f"{'one step / its bare products':28}" + "".join(f"{how:>16}" for how in by_how)]
    for title in sorted(next(iter(by_how.values())), key=next(iter(by_how.values())).__getitem__):
        printed.append(f"  {title:26}" + "".join(f"{times[title]:16.2f}" for times in by_how.values()))
    printed += ["", "a whole training step / AdamW's", f"  {'grid':7}{'tokens':>6}  {'':14}{'  '.join(TRAINED)}"]
    for grid, how, tokens, times in training_steps(found):
        cells = "  ".join(f"{time:{len(title)}.2f}" for title, time in times.items())
        printed.append(f"  {grid:7}{tokens:6,}  {how:14}{cells}")
    return printed


def _how(matrix_unit: bool) -> str:
    return "matrix unit" if matrix_unit else "no matrix unit"
