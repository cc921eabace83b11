"""Chapter 4 in a few numbers, from the stored studies: what the claims page quotes, and tests hold its verdicts to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from muonbook.ch04 import race_tables
from muonbook.ch04.originals_tables import MEASURES
from muonbook.ch04.sweep import verdict
from muonbook.measure import results


def summarize() -> dict[str, Any]:
    """Return medians over seeds, and of every pair how many seeds the first one wins. Raises UsageError, see `load`."""
    sights = results.load("sights")
    return {
        "races": {name: of_race(race) for name, race in race_tables.stored_races().items()},
        "originals": {
            name: found if "missing" in found else of_originals(found)
            for name, found in results.load("originals").items()
            if isinstance(found, dict) and ("missing" in found or "tuned" in found)
        },
        "finetune": {
            f"{row['pretrained']}_{row['optimizer']}": statistics.median(row["gaps"])
            for row in sights["finetune"]["rows"]
        },
        "finetune_muon_wins": {
            first: wins(*(_gaps(sights["finetune"]["rows"], first, second) for second in ("muon", "adamw")))
            for first in ("adamw", "muon")
        },
        "rms": {f"{row['rms']:g}": statistics.median(row["gaps"]) for row in sights["rms"]["rows"]},
        "rms_tuned": {f"{row['rms']:g}": statistics.median(row["gaps"]) for row in sights["rms"]["tuned"]},
    }


def _gaps(rows: Sequence[Mapping[str, Any]], pretrained: str, optimizer: str) -> list[float]:
    return next(row["gaps"] for row in rows if (row["pretrained"], row["optimizer"]) == (pretrained, optimizer))


def wins(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Return on how many seeds the first has the smaller loss, and whether a difference may be claimed."""
    found = verdict(first, second)
    return {"wins": found.wins, "losses": found.losses, "seeds": found.seeds, "claimed": found.claimed}


def of_race(race: Mapping[str, Any]) -> dict[str, Any]:
    """Return the medians of gaps (of losses, where no floor is known), the pairs, and what it takes to catch AdamW.

    to_adamw: the share of AdamW's steps, and of its operations, after which Muon has AdamW's final loss; None if never.
    """
    target = statistics.median(race_tables.finals(race["racers"]["adamw"]))
    steps = race_tables.steps_until(race, "muon", target)
    muon, adamw = (sum(race["racers"][name]["flops"].values()) for name in ("muon", "adamw"))
    share = None if steps is None else steps / race["steps"]
    pairs = {f"{a}_{b}": (race_tables.gaps(race, a), race_tables.gaps(race, b)) for a, b in race_tables.verdicts(race)}
    return {
        "median": {name: statistics.median(race_tables.gaps(race, name)) for name in race["racers"]},
        "pairs": {names: wins(*both) for names, both in pairs.items()},
        "to_adamw": {"steps": share, "operations": None if share is None else share * muon / adamw},
    }


def of_originals(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return, as written and tuned, every contender's medians and Muon's training loss over AdamW's."""
    told: dict[str, Any] = {"flops_over_network": found["flops"]["muon"] / found["flops"]["network"]}
    for race in ("as_written", "tuned"):
        columns = {
            contender: {measure.replace(" ", "_"): [of(run) for run in runs] for measure, of in MEASURES.items()}
            for contender, runs in found[race].items()
        }
        medians = {
            contender: {measure: statistics.median(values) for measure, values in by.items()}
            for contender, by in columns.items()
        }
        muon, adamw = columns["muon"], columns["adamw"]
        ratio = medians["muon"]["training_loss"] / medians["adamw"]["training_loss"]
        pairs = {measure: wins(muon[measure], adamw[measure]) for measure in muon}
        told[race] = {"median": medians, "muon_over_adamw": {"training_loss": ratio}, "muon_against_adamw": pairs}
    return told
