"""The study of logits: they grow under Muon at a rate too high, and the clip holds them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from distmuon.launch import World
from muonbook.ch17 import logit_growth
from muonbook.ch17.logit_growth import DRAWN, LAST, SETTINGS, GrowthSetting, LogitRun, table, train
from muonbook.measure.workload import Workload

SMALL = Workload(vocabulary=18, width=32, layers=1, heads=2, sequences=2)


def test_logits_grow_under_muon_and_stay_near_the_threshold_with_the_clip() -> None:
    free, held = (
        train(GrowthSetting("muon", 0.1, threshold=threshold), seed=0, steps=45, workload=SMALL)
        for threshold in (math.inf, 10.0)
    )
    assert free.peak > 3 * 10.0
    assert sum(free.clipped) == 0
    assert 10.0 < held.peak < 2 * 10.0
    assert sum(held.clipped) > LAST
    first = next(step for step, heads in enumerate(held.clipped) if heads)
    assert held.largest[: first + 1] == free.largest[: first + 1]
    assert held.loss < free.loss + 0.05


def test_two_processes_share_the_runs_and_no_run_is_trained_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_growth, "train", lambda setting, seed: (setting, seed))
    shares: list[Any] = [
        logit_growth.share(World(rank, 2, 2, 1, "gloo", "cpu", 60.0, 1, 0.0), DRAWN, (0, 1, 2)) for rank in range(2)
    ]
    assert {job: run for share in shares for job, run in share.items()} == {
        (name, seed): (SETTINGS[name], seed) for name in DRAWN for seed in range(3)
    }
    assert sum(map(len, shares)) == 9


def test_the_table_has_a_row_for_each_setting_with_the_numbers_of_its_runs() -> None:
    runs = [LogitRun([5.0, *[seed + 7.0] * LAST], 1.5 + seed / 10, [0, *[2] * LAST]) for seed in range(3)]
    (row,) = table({"Muon, clip": runs})
    assert row | {"loss": None} == {
        "run": "Muon, clip", "rate": 0.03, "first": 5.0, "in_the_end": 8.0, "clipped_heads": 40 / 21, "loss": None
    }  # fmt: skip
    assert row["loss"] == pytest.approx([1.6, 1.5, 1.7])
