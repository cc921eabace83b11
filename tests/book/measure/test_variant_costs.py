"""What variants of Muon cost: none sends or keeps more but NorMuon, and each is timed beside Muon."""

from __future__ import annotations

import pytest

from tools import variant_costs


def test_no_variant_but_normuon_sends_or_keeps_more_than_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant_costs, "GRIDS", {"gather_all": (1, 2), "muonw": (2, 1)})  # two ranks tell it all
    for way, by_name in variant_costs.counted().items():
        assert by_name.keys() == variant_costs.variants().keys()
        muon, normuon = by_name["muon"], by_name["normuon"]
        assert muon["sent_bytes"] > 10**6
        for name, costs in by_name.items():
            if name != "normuon":
                assert costs == muon, name
        assert muon["state_elements"] < normuon["state_elements"] < 1.1 * muon["state_elements"]
        more = normuon["sent_bytes"] - muon["sent_bytes"], normuon["collectives"] - muon["collectives"]
        if way == "muonw":  # both ranks keep all, by one sum over both, in which each sends as much as it keeps
            rows = (normuon["state_elements"] - muon["state_elements"]) / 2
            assert more == (2 * 4 * rows, 2)
        else:
            assert more == (0, 0)


def test_every_variant_is_timed_beside_muon() -> None:
    found = variant_costs.times((6, 10), rounds=2)
    assert found.keys() == variant_costs.variants().keys()
    assert found["muon"]["median"] == 1
    assert all(ratio["median"] > 0 for ratio in found.values())
