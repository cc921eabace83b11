"""The studies beside the race: each changes what it says and nothing else, and all are tuned and compared alike."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from distmuon.extras.metrics.matrix import rms, update_of
from distmuon.launch import World
from distmuon.optim.muon import Muon
from distmuon.verify.blocks import BlockMuon
from muonbook.ch04 import studies, tasks
from muonbook.ch04.search_space import Setting
from muonbook.ch04.studies import MATCHED, ROUTES, WHOLE, Blocking, StudySize, Variation
from muonbook.ch04.training import train
from muonbook.measure import results

BEST = {"adamw": Setting("adamw", 0.004, 0.0, 0.9), "muon": Setting("muon", 0.02, 0.1, 0.95)}
ALONE = World(0, 1, 1, 1, "gloo", "cpu", 60.0, 1, 0.0)
TASK = replace(tasks.TASKS["language"], batch=4, steps=2)
SIZE = StudySize(TASK, seeds=[0, 1], tuning=[1000], farthest=0)


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[str, Any]]:
    """What all studies find in two steps, judged on few windows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "HELD_OUT_WINDOWS", 8)
        tasks.language_floor.cache_clear()
        found = {name: study(ALONE, BEST, SIZE) for name, study in studies.STUDIES.items()}
        yield found | {"blocks": studies.blocks(ALONE, BEST["muon"], SIZE, (WHOLE, Blocking(2, 2), Blocking(2, 0)))}
    tasks.language_floor.cache_clear()


# ---- What a variation changes -----------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.05, 0.8])
def test_muons_update_has_the_rms_asked_for_and_decays_as_before(level: float) -> None:
    setting = BEST["muon"]
    muon, adamw = studies.with_rms(level)(TASK.fresh_model(0).double(), setting)
    matrices = muon.param_groups[0]["params"]
    before = [matrix.detach().clone() for matrix in matrices]
    for seed, matrix in enumerate(matrices):
        matrix.grad = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(seed)).double()
    muon.step()
    for old, new in zip(before, matrices, strict=True):
        assert 0.75 * level < rms(update_of(old, new.detach(), setting.lr, setting.weight_decay)) < 1.25 * level
    assert all(group["lr"] * group["weight_decay"] == pytest.approx(0.02 * 0.1) for group in muon.param_groups)
    assert [(group["lr"], group["weight_decay"]) for group in adamw.param_groups] == [(0.02, 0.1)]


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_gives_muon_what_it_says_and_says_nothing_else(route: str) -> None:
    joining = {"tokens.weight", "positions.weight"} if route in ("hidden + embeddings", "all matrices") else set()
    joining |= {"head.weight"} if route in ("hidden + head", "all matrices") else set()
    model = TASK.fresh_model(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        muon, adamw = studies.routed(route)(model, BEST["muon"])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moved, rest = ([names[id(p)] for g in optimizer.param_groups for p in g["params"]] for optimizer in (muon, adamw))
    hidden = {name for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2}
    assert set(moved) == hidden | joining
    assert sorted(moved + rest) == sorted(names.values())


@pytest.mark.parametrize("blocking", [WHOLE, Blocking(2, 5), Blocking(8, 0)])
def test_a_blocking_is_what_it_says(blocking: Blocking) -> None:
    muon, adamw = blocking.optimizers(TASK.fresh_model(0), BEST["muon"])
    assert type(muon) is (Muon if blocking == WHOLE else BlockMuon)
    (group,) = muon.param_groups
    assert len(group["params"]) == 12  # of two blocks: query, key, value, out, up, down
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.02, 0.1, 0.95)
    assert adamw.param_groups[0]["lr"] == 0.02
    if blocking != WHOLE:
        assert (group["blocks"], group["whole_every"]) == (blocking.blocks, blocking.whole_every)
        assert group["block_lr_ratio"] == ("shape" if blocking.whole_every else 1.0)


def test_a_batch_study_reads_the_same_windows() -> None:
    full = tasks.TASKS["language"]
    assert all(full.batch * full.steps % batch == 0 for batch in studies.BATCHES)
    read = [replace(full, batch=n, steps=full.batch * full.steps // n) for n in studies.BATCHES]
    texts = [task.examples(task, 0)[0][0] for task in read]
    assert all(torch.equal(texts[0], text) for text in texts)


# ---- Tuned and compared alike -----------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "farthest", "found", "tried"), [(4, 3, 4, 5), (1 / 4, 3, 1 / 4, 5), (64, 3, 16, 6)])
def test_tuning_goes_on_while_the_best_is_at_an_end(
    monkeypatch: pytest.MonkeyPatch, factor: float, farthest: int, found: float, tried: int
) -> None:
    asked: list[int] = []

    def valley(world: World, runs: Sequence[tuple[Variation, int]]) -> list[float]:
        asked.extend(seed for _, seed in runs)
        return [abs(math.log2(one.setting.lr / (factor * BEST["muon"].lr))) for one, _ in runs]

    monkeypatch.setattr(studies, "final_gaps", valley)
    size = replace(SIZE, farthest=farthest, tuning=[1000, 1001])
    row = studies.retuned(ALONE, {"one": Variation(BEST["muon"], TASK)}, size)["one"]
    assert row["lr"] == found * BEST["muon"].lr
    assert row["lrs"] == sorted(row["lrs"])
    assert len(row["lrs"]) == len(row["medians"]) == tried
    assert asked == [1000, 1001] * tried + [0, 1]


def test_what_is_found_is_plain_data_at_the_best_rate_of_each(measured: dict[str, Any]) -> None:
    assert measured == json.loads(json.dumps(measured))
    rows = {name: measured[name]["rows"] for name in measured}
    assert all(len(row["gaps"]) == 2 and min(row["gaps"]) > 0 for found in rows.values() for row in found)
    for name in ("routing", "batch", "decay", "blocks"):
        for row in rows[name]:
            assert row["lr"] == row["lrs"][row["medians"].index(min(row["medians"]))]
    for row in rows["blocks"]:
        assert row["lrs"] == pytest.approx([BEST["muon"].lr * math.sqrt(2) ** n for n in (-1, 0, 1)])
        assert not row["claimed"]  # two seeds say nothing


def test_what_is_unchanged_is_the_muon_of_the_race_and_blocks_are_not(measured: dict[str, Any]) -> None:
    assert TASK.floor is not None
    whole, _, blockwise = measured["blocks"]["rows"]
    matched = {"lr": BEST["muon"].lr, **measured["rms"]["rows"][studies.RMS.index(MATCHED)]}
    for row in (whole, blockwise, matched, measured["routing"]["rows"][0]):
        gaps = [train(TASK, BEST["muon"].at(row["lr"]), seed).final - TASK.floor(seed) for seed in SIZE.seeds]
        assert (row["gaps"] == pytest.approx(gaps, rel=1e-5)) == (row is not blockwise)


def test_the_claims_of_the_stored_blocks_follow_from_their_numbers() -> None:
    stored = results.load("blocks")
    assert [Blocking(row["blocks"], row["whole_every"]) for row in stored["rows"]] == list(studies.BLOCKINGS)
    assert not set(stored["seeds"]) & set(stored["tuning_seeds"])
    for row in stored["rows"]:
        found = studies.against(row["gaps"], stored["rows"][0]["gaps"])
        assert {name: row[name] for name in found} == found
    worse = studies.against([0.2, 0.3, 0.4, 0.5, 0.4], [0.1, 0.2, 0.3, 0.4, 0.5])
    assert (worse["worse"], worse["better"], worse["claimed"]) == (4, 1, False)
