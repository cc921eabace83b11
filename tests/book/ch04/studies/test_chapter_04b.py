"""What chapter 4b's page says is what its stored studies say."""

from __future__ import annotations

import statistics

import pytest

from muonbook.ch04 import sweep
from muonbook.ch04.studies.ablations import MATCHED
from muonbook.measure import results


@pytest.fixture(scope="module")
def studies() -> dict:
    return results.load("sights")


def test_what_the_page_says_of_spectra(studies: dict) -> None:
    ranks = studies["spectra"]["ranks"]
    last = {
        (name, matrix, kind): [seed[-1] for seed in seeds]
        for name, matrices in ranks.items()
        for matrix, kinds in matrices.items()
        for kind, seeds in kinds.items()
    }
    for matrix in ("up", "out"):
        middle = {name: statistics.median(last[name, matrix, "momentum"]) for name in ranks}
        assert 6 < middle["sgd"] < 8 < 10 < middle["adamw"] < 15.5 > 15 < middle["muon"] < 18.5
        assert not all(
            m > a for m, a in zip(last["muon", matrix, "weight"], last["adamw", matrix, "weight"], strict=True)
        )
        assert ranks["sgd"][matrix]["weight"][0][0] == pytest.approx(ranks["sgd"][matrix]["weight"][0][-1], rel=0.01)
    assert round(statistics.median(last["muon", "up", "update"])) == 60
    assert round(statistics.median(last["muon", "out", "update"])) == 58


def test_what_the_page_says_of_the_rms(studies: dict) -> None:
    rows = {row["rms"]: row["gaps"] for row in studies["rms"]["rows"]}
    assert not sweep.verdict(rows[0.1], rows[MATCHED]).claimed
    assert all(sweep.verdict(rows[MATCHED], rows[other]).wins == 5 for other in (0.05, 0.4, 0.8))
    tuned = {row["rms"]: row for row in studies["rms"]["tuned"]}
    rates = {rms: row["lr"] / tuned[MATCHED]["lr"] for rms, row in tuned.items()}
    assert rates == {0.05: 2, MATCHED: 1, 0.8: 0.25}
    assert not sweep.verdict(tuned[0.05]["gaps"], tuned[MATCHED]["gaps"]).claimed
    assert statistics.median(tuned[0.8]["gaps"]) < 1.1 * statistics.median(tuned[MATCHED]["gaps"])


def test_what_the_page_says_of_decay(studies: dict) -> None:
    rows = studies["decay"]["rows"]
    gaps = {(row["optimizer"], row["steps"], row["weight_decay"]): row["gaps"] for row in rows}
    decays = {key: sweep.verdict(gaps[*key, 0.1], gaps[*key, 0.0]) for key in {key[:2] for key in gaps}}
    assert {key for key, found in decays.items() if found.claimed} == {("muon", 300)}
    middle = {key: statistics.median(values) for key, values in gaps.items()}
    assert middle["muon", 300, 0.1] / middle["muon", 300, 0.0] == pytest.approx(0.9, abs=0.02)
    lead = [middle["adamw", steps, 0.1] - middle["muon", steps, 0.1] for steps in (300, 900)]
    share = [middle["muon", steps, 0.1] / middle["adamw", steps, 0.1] for steps in (300, 900)]
    assert lead[0] == pytest.approx(1 / 3, abs=0.03)
    assert lead[1] < 0.1
    assert share == pytest.approx([0.5, 0.6], abs=0.04)
    norms = {row["weight_decay"]: row for row in rows if (row["optimizer"], row["steps"]) == ("muon", 900)}
    assert min(norms[0.0]["spectral"]) > 2 * max(norms[0.1]["spectral"])


def test_what_the_page_says_of_routing_batch_and_fine_tuning(studies: dict) -> None:
    hidden, *others = (row["gaps"] for row in studies["routing"]["rows"])
    assert [sweep.verdict(hidden, other).claimed for other in others] == [False, True, True]
    worse = [statistics.median(other) - statistics.median(hidden) for other in others[1:]]
    assert all(0.005 < more < 0.025 for more in worse)
    batch = {(row["optimizer"], row["batch"]): row["gaps"] for row in studies["batch"]["rows"]}
    assert all(sweep.verdict(batch["muon", size], batch["adamw", size]).wins == 5 for size in (4, 16, 64))
    middle = {key: statistics.median(gaps) for key, gaps in batch.items()}
    less = [1 - middle["muon", size] / middle["adamw", size] for size in (4, 16, 64)]
    assert less == pytest.approx([0.5, 0.5, 0.25], abs=0.04)
    rows = {(row["pretrained"], row["optimizer"]): row["gaps"] for row in studies["finetune"]["rows"]}
    for first in ("adamw", "muon"):
        assert sweep.verdict(rows[first, "muon"], rows[first, "adamw"]).wins == 5
    assert max(rows["muon", "adamw"]) < min(rows["adamw", "muon"])
