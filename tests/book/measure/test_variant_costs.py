"""What variants of Muon cost: none sends or keeps more but NorMuon, and each is timed beside Muon."""

from __future__ import annotations

from tools import variant_costs


def test_no_variant_but_normuon_sends_or_keeps_more_than_muon() -> None:
    for way, by_name in variant_costs.counted().items():
        assert by_name.keys() == variant_costs.variants().keys()
        muon, normuon = by_name["muon"], by_name["normuon"]
        assert muon["sent_bytes"] > 10**6
        for name, costs in by_name.items():
            if name != "normuon":
                assert costs == muon, name
        assert muon["state_elements"] < normuon["state_elements"] < 1.1 * muon["state_elements"]
        more = normuon["sent_bytes"] - muon["sent_bytes"], normuon["collectives"] - muon["collectives"]
        if way == "muonw":  # every rank keeps all, and gets it by one sum over 4 ranks, each of which sends 3/2 of it
            rows = (normuon["state_elements"] - muon["state_elements"]) / 4
            assert more == (2 * 3 * 4 * rows, 4)
        else:
            assert more == (0, 0)


def test_every_variant_is_timed_beside_muon() -> None:
    found = variant_costs.times((6, 10), rounds=2)
    assert found.keys() == variant_costs.variants().keys()
    assert found["muon"]["median"] == 1
    assert all(ratio["median"] > 0 for ratio in found.values())
