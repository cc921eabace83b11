"""What blocks cost in learning: that every arm is what it says, that they are tuned alike, and compared in pairs."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from typing import Any

import pytest
from once import once

from distmuon.launch import World
from distmuon.optim.muon import Muon
from distmuon.verify.blocks import BlockMuon
from muonbook.ch04 import tasks
from muonbook.ch04.search_space import Setting
from muonbook.ch04.studies import blocks
from muonbook.ch04.studies.blocks import WHOLE, Arm
from muonbook.ch04.training import train
from muonbook.measure import results

BEST = Setting("muon", 0.02, 0.1, 0.95)
ALONE = World(0, 1, 1, 1, "gloo", "cpu", 60.0, 1, 0.0)
TASK, TUNING, SEEDS = tasks.TASKS["language"].shorter(3), [1000], [0, 1]
TRIED = (WHOLE, Arm(2, 2), Arm(2, 0), Arm(2, 4))


@once
def found() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "FARTHEST", 1)
        return blocks.measure(ALONE, BEST, TASK, TUNING, SEEDS, TRIED)


@pytest.mark.parametrize("arm", blocks.ARMS)
def test_an_arm_is_what_it_says(arm: Arm) -> None:
    muon, adamw = arm.optimizers(tasks.TASKS["language"].fresh_model(0), BEST)
    assert type(muon) is (Muon if arm == WHOLE else BlockMuon)
    (group,) = muon.param_groups
    assert len(group["params"]) == 12  # of two blocks: query, key, value, out, up, down
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.02, 0.1, 0.95)
    assert adamw.param_groups[0]["lr"] == 0.02
    if arm != WHOLE:
        assert (group["blocks"], group["whole_every"]) == (arm.blocks, arm.whole_every)
        assert group["block_lr_ratio"] == (1.0 if arm.title == "blockwise" else "shape")


@pytest.mark.usefixtures("one_thread")
def test_whole_is_the_muon_of_the_race_and_blocks_are_not() -> None:
    assert TASK.floor is not None
    whole, _, blockwise, _ = found()["rows"]
    for row in (whole, blockwise):
        gaps = [train(TASK, BEST.at(row["lr"]), seed).final - TASK.floor(seed) for seed in SEEDS]
        assert (row["gaps"] == gaps) == (row is whole)


def test_a_run_that_diverges_has_an_infinite_gap() -> None:
    assert blocks.final_gap(TASK, BEST, (WHOLE, 1e30, 0)) == math.inf


def test_all_are_tuned_on_the_same_rates_and_compared_on_the_same_seeds() -> None:
    rows = found()["rows"]
    assert [(row["blocks"], row["whole_every"]) for row in rows] == [tuple(arm) for arm in TRIED]
    for row in rows:
        assert set(row["lrs"]) >= {BEST.lr * factor for factor in blocks.FACTORS}
        assert row["lr"] == row["lrs"][row["medians"].index(min(row["medians"]))]
        assert len(row["gaps"]) == len(SEEDS)
        assert row["more_than_whole"] == [a - b for a, b in zip(row["gaps"], rows[0]["gaps"], strict=True)]
        assert not row["claimed"]  # two seeds say nothing
    assert not set(found()["seeds"]) & set(found()["tuning_seeds"])
    ratios = [b / a for a, b in pairwise(blocks.FACTORS)]
    assert ratios == pytest.approx([math.sqrt(2)] * len(ratios))


def test_the_table_has_a_line_for_every_arm() -> None:
    lines = blocks.lines(found())
    assert len(lines) == 2 + len(TRIED)
    assert max(map(len, lines)) <= 92
    assert "whole" in lines[2]
    assert all("no claim" in line for line in lines[3:])


def test_what_is_stored_is_whole_and_its_claims_follow_from_its_numbers() -> None:
    stored = results.load("blocks")
    assert [Arm(row["blocks"], row["whole_every"]) for row in stored["rows"]] == list(blocks.ARMS)
    whole = stored["rows"][0]["gaps"]
    for row in stored["rows"]:
        found = blocks.against(row["gaps"], whole)
        assert {name: row[name] for name in found} == found
        assert len(row["gaps"]) == len(stored["seeds"]) >= 3
    assert max(map(len, blocks.lines(stored))) <= 92


def test_worse_on_every_seed_of_five_may_be_said_and_less_may_not() -> None:
    whole = [0.1, 0.2, 0.3, 0.4, 0.5]
    worse = blocks.against([gap + 0.1 for gap in whole], whole)
    assert (worse["worse"], worse["better"], worse["claimed"]) == (5, 0, True)
    assert statistics.median(worse["more_than_whole"]) == pytest.approx(0.1)
    mixed = blocks.against([0.2, 0.3, 0.4, 0.5, 0.4], whole)
    assert (mixed["worse"], mixed["better"], mixed["claimed"]) == (4, 1, False)
