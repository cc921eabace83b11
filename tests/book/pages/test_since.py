"""Muon since the blueprint: what the page says of our own counts and races is stored."""

from __future__ import annotations

import statistics

from muonbook.ch04 import tables
from muonbook.measure import results


def test_only_normuon_keeps_or_sends_more_and_only_in_muonw_it_sends() -> None:
    for way, by_name in results.load("variant_costs")["counted"].items():
        muon = by_name.pop("muon")
        normuon = by_name.pop("normuon")
        assert all(found == muon for found in by_name.values()), way
        assert normuon["state_elements"] > muon["state_elements"]
        assert (normuon["sent_bytes"] > muon["sent_bytes"]) == (way == "muonw")


def test_both_muons_of_the_two_races_end_with_the_same_median() -> None:
    medians = [statistics.median(tables.gaps(results.load(race), "muon")) for race in ("race_variants", "race_normuon")]
    assert f"{medians[0]:.3f}" == f"{medians[1]:.3f}"
