"""What chapter 4b's page says is what its stored studies say."""

import statistics

import pytest

from muonbook.ch04 import sweep
from muonbook.measure import results


def test_what_the_page_says_of_spectra() -> None:
    ranks = results.load("sights")["spectra"]["ranks"]
    last = {
        (name, matrix, kind): [seed[-1] for seed in seeds]
        for name, matrices in ranks.items()
        for matrix, kinds in matrices.items()
        for kind, seeds in kinds.items()
    }
    for matrix in ("up", "out"):
        assert max(statistics.median(last[name, matrix, "momentum"]) for name in ("sgd", "adamw")) < 6
        assert 8 < statistics.median(last["muon", matrix, "momentum"]) < 16
        assert min(last["muon", matrix, "weight"]) > max(last["adamw", matrix, "weight"])
        assert ranks["sgd"][matrix]["weight"][0][0] == pytest.approx(ranks["sgd"][matrix]["weight"][0][-1], rel=0.01)
    assert 59 < statistics.median(last["muon", "up", "update"]) < 61
    assert 56 < statistics.median(last["muon", "out", "update"]) < 58
    assert 40 < ranks["muon"]["out"]["update"][0][0] < 43


def test_what_the_page_says_of_rms_and_decay() -> None:
    sights = results.load("sights")
    rows = {row["rms"]: row["gaps"] for row in sights["rms"]["rows"]}
    assert not sweep.verdict(rows[0.1], rows[0.2]).claimed
    assert all(sweep.verdict(rows[0.2], rows[other]).wins == 5 for other in (0.05, 0.4, 0.8))
    tuned = {row["rms"]: row for row in sights["rms"]["tuned"]}
    assert tuned[0.05]["lr"] == pytest.approx(4 * tuned[0.2]["lr"])
    assert sweep.verdict(tuned[0.05]["gaps"], tuned[0.2]["gaps"]).wins == 5
    decay = {(row["optimizer"], row["steps"], row["weight_decay"]): row for row in sights["decay"]["rows"]}
    assert sweep.verdict(decay["muon", 300, 0.1]["gaps"], decay["muon", 300, 0.0]["gaps"]).claimed
    sizes = {key: statistics.median(row["sizes"]) for key, row in decay.items()}
    assert 1.4 < sizes["muon", 300, 0.0] / sizes["muon", 300, 0.1] < 1.6
    gaps = {key: statistics.median(row["gaps"]) for key, row in decay.items()}
    assert 0.2 < gaps["adamw", 900, 0.1] / gaps["adamw", 300, 0.1] < 0.3
    assert 0.45 < gaps["muon", 900, 0.1] / gaps["adamw", 900, 0.1] < 0.6
    assert decay["muon", 900, 0.1]["lr"] == pytest.approx(0.5 * decay["muon", 300, 0.1]["lr"])


def test_what_the_page_says_of_routing_batch_and_fine_tuning() -> None:
    sights = results.load("sights")
    hidden, *others = (row["gaps"] for row in sights["routing"]["rows"])
    assert not any(sweep.verdict(hidden, other).claimed for other in others)
    batch = {(row["optimizer"], row["batch"]): row["gaps"] for row in sights["batch"]["rows"]}
    sizes = sorted({size for _, size in batch})
    assert all(sweep.verdict(batch["muon", size], batch["adamw", size]).wins == 5 for size in sizes)
    ratios = [statistics.median(batch["adamw", s]) / statistics.median(batch["muon", s]) for s in sizes]
    assert ratios == sorted(ratios, reverse=True)
    rows = {(row["pretrained"], row["optimizer"]): row["gaps"] for row in sights["finetune"]["rows"]}
    for first in ("adamw", "muon"):
        assert sweep.verdict(rows[first, "muon"], rows[first, "adamw"]).wins == 5
    assert max(rows["muon", "adamw"]) < min(rows["adamw", "muon"])
