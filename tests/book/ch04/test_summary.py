"""What the claims page quotes of chapter 4 is what the stored studies say."""

import json
import statistics

import pytest

from muonbook.ch04 import jobs, tables
from muonbook.measure import results


def test_the_stored_summary_is_drawn_from_the_stored_studies() -> None:
    stored = {k: v for k, v in results.load("learning").items() if k not in ("machine", "commit", "command")}
    assert stored == json.loads(json.dumps(jobs.summarize()))


def test_medians_and_wins_are_counted_over_seeds() -> None:
    race = results.load("race_language")
    found = jobs.of_race(race)
    both = zip(race["racers"]["muon"]["held_out"], race["floor"], strict=True)
    finals = [losses[-1] - floor for losses, floor in both]
    assert found["median"]["muon"] == pytest.approx(statistics.median(finals))
    assert set(found["pairs"]) == {f"{a}_{b}" for a, b in tables.verdicts(race)}
    share = found["to_adamw"]
    muon, adamw = (sum(race["racers"][name]["flops"].values()) for name in ("muon", "adamw"))
    assert share["operations"] / share["steps"] == pytest.approx(muon / adamw)


def test_wins_name_both_sides() -> None:
    assert jobs.wins([1, 1, 3], [2, 2, 2]) == {"wins": 2, "losses": 1, "seeds": 3, "claimed": False}
