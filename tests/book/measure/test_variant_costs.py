"""What variants of Muon cost: none sends or keeps more, and each is timed beside Muon."""

from __future__ import annotations

from distmuon import launch
from tools import variant_costs


def test_no_variant_sends_or_keeps_more_than_muon() -> None:
    dp, tp = variant_costs.GRID
    for by_name in variant_costs.together(launch.run(variant_costs.count, dp=dp, tp=tp)).values():
        assert by_name.keys() == variant_costs.variants().keys()
        assert by_name["muon"]["sent_bytes"] > 10**6
        for name, costs in by_name.items():
            assert costs == by_name["muon"], name


def test_every_variant_is_timed_beside_muon() -> None:
    found = variant_costs.times((6, 10), rounds=2)
    assert found.keys() == variant_costs.variants().keys()
    assert found["muon"]["median"] == 1
    assert all(ratio["median"] > 0 for ratio in found.values())
