"""The studies beside the race: that each changes what it says it changes, and nothing else."""

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from once import once

from distmuon import launch
from distmuon.extras.metrics.matrix import rms, update_of
from distmuon.launch import World
from muonbook.ch04 import sweep, tasks
from muonbook.ch04.search_space import Setting
from muonbook.ch04.studies import ablations, spectra, tables
from muonbook.ch04.studies.ablations import MATCHED, ROUTES, RunCache, RunSpec, carry_out, retune
from muonbook.ch04.training import look_at
from muonbook.figures import plots

BEST = {
    "sgd": Setting("sgd", 0.2, 0.0, 0.9),
    "adamw": Setting("adamw", 0.004, 0.0, 0.9),
    "muon": Setting("muon", 0.008, 0.1, 0.95),
}
ALONE = World(0, 1, 1, 1, "gloo", "cpu", 60.0, 1, 0.0)
SHORT = RunSpec(BEST["muon"], seed=0, steps=2)


@once
def measured() -> list[dict[str, Any]]:
    """Return what both ranks of a world say in a quick measurement."""
    return launch.run(ablations.measure, (BEST, ("spectra", *ablations.STUDIES), ablations.QUICK), dp=2, timeout=1700.0)


# ---- What a run changes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ablations.FULL.levels)
def test_muons_update_has_the_rms_asked_for_and_decays_as_before(level: float):
    spec = replace(SHORT, rms=level)
    model = spec.task.fresh_model(0).double()
    muon, adamw = spec.optimizers(model, spec.setting)
    lr, decay = spec.setting.lr, spec.setting.weight_decay
    matrices = muon.param_groups[0]["params"]
    before = [matrix.detach().clone() for matrix in matrices]
    for seed, matrix in enumerate(matrices):
        matrix.grad = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(seed)).double()
    muon.step()
    for old, new in zip(before, matrices, strict=True):
        assert 0.75 * level < rms(update_of(old, new.detach(), lr, decay)) < 1.25 * level
    for group in muon.param_groups:
        assert group["lr"] * group["weight_decay"] == pytest.approx(lr * decay)
    assert [(group["lr"], group["weight_decay"]) for group in adamw.param_groups] == [(lr, decay)]


@pytest.mark.parametrize(
    ("route", "joining"),
    [
        ("hidden", set()),
        ("hidden + embeddings", {"tokens.weight", "positions.weight"}),
        ("hidden + head", {"head.weight"}),
        ("all matrices", {"tokens.weight", "positions.weight", "head.weight"}),
    ],
)
def test_a_route_gives_muon_what_it_says_and_says_nothing_else(route: str, joining: set[str]):
    model = SHORT.task.fresh_model(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        muon, adamw = replace(SHORT, route=route).optimizers(model, SHORT.setting)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moved, rest = ([names[id(p)] for g in optimizer.param_groups for p in g["params"]] for optimizer in (muon, adamw))
    hidden = {name for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2}
    assert set(moved) == hidden | joining
    assert sorted(moved + rest) == sorted(names.values())


def test_sgd_and_adamw_are_the_races_own():
    for name in ("sgd", "adamw"):
        spec = RunSpec(BEST[name], 0, 2, rms=0.8, route="all matrices")
        (optimizer,) = spec.optimizers(spec.task.fresh_model(0), spec.setting)
        assert type(optimizer).__name__.lower() == name
        moved = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert len(moved) == len(list(spec.task.fresh_model(0).parameters()))


def test_a_run_that_diverges_is_kept_with_infinite_norms():
    found, _ = carry_out(RunSpec(replace(BEST["sgd"], lr=1e9), 0, 6))
    assert found.gap == math.inf
    assert len(found.steps) == len(found.gaps) == len(found.spectral) == len(found.rms) == len(look_at(6))
    assert found.spectral[-1] == found.rms[-1] == math.inf
    assert sweep.span([found.gap, 1.0, math.inf]) == "inf [1.000, inf]"


# ---- Pretrained, then fine-tuned --------------------------------------------------------------------------


def test_fine_tuning_starts_from_the_pretrained_weights_of_its_seed(one_thread: None):
    still = RunSpec(replace(BEST["adamw"], lr=0.0), seed=0, steps=1, spoken_otherwise=True, before=SHORT)
    cache = RunCache(ALONE)
    gaps = cache.gaps([still, still.at(0.0, 1)])
    assert set(cache.weights) == {SHORT, SHORT.at(SHORT.setting.lr, 1)}
    for seed, ((pretrained, weights), gap) in enumerate(zip(cache.weights.items(), gaps, strict=True)):
        _, again = carry_out(pretrained)
        assert all(torch.equal(weights[name], again[name]) for name in again)
        model = still.task.fresh_model(5)
        model.load_state_dict(weights)
        _, held_out = still.task.examples(still.task, seed)
        with torch.no_grad():
            loss = tasks.loss_of(model, held_out).item()
        assert loss - tasks.language_floor(seed, spoken_otherwise=True) == pytest.approx(gap, rel=1e-5)
    assert gaps[0] != gaps[1]
    assert gaps[0] != pytest.approx(carry_out(replace(still, before=None))[0].gap, rel=1e-3)


def test_the_lab_carries_out_nothing_twice(monkeypatch: pytest.MonkeyPatch):
    done = []

    def count(spec: RunSpec, start: ablations.Weights | None = None) -> tuple[ablations.Finding, ablations.Weights]:
        done.append(spec)
        return ablations.Finding([1], [spec.setting.lr], [1.0], [1.0]), {}

    monkeypatch.setattr(ablations, "carry_out", count)
    cache, after = RunCache(ALONE), RunSpec(BEST["adamw"], 0, 1, before=SHORT)
    assert cache.gaps([after, after.at(0.5, 0), after]) == [0.004, 0.5, 0.004]
    assert cache.gaps([SHORT, after]) == [0.008, 0.004]
    assert sorted(done, key=repr) == sorted([SHORT, after, after.at(0.5, 0)], key=repr)


# ---- Retuning ---------------------------------------------------------------------------------------------


class Valley(RunCache):
    """A made-up cache in which `best` is the best learning rate."""

    def __init__(self, best: float) -> None:
        super().__init__(ALONE)
        self.best = best

    def gaps(self, wanted: Sequence[RunSpec]) -> list[float]:
        return [abs(math.log2(spec.setting.lr / self.best)) for spec in wanted]


@pytest.mark.parametrize(
    ("factor", "farthest", "found", "tried"),
    [(1, 3, 1, 3), (4, 3, 4, 5), (1 / 4, 3, 1 / 4, 5), (2, 0, 2, 3), (64, 3, 16, 6)],
)
def test_retuning_goes_on_while_the_best_is_at_an_end(factor: float, farthest: int, found: float, tried: int):
    lr = SHORT.setting.lr
    tuned = retune(Valley(factor * lr), {"one": SHORT}, [1000, 1001], farthest)["one"]
    assert tuned.best == SHORT.at(found * lr, SHORT.seed)
    assert list(tuned.curve) == sorted(tuned.curve)
    assert len(tuned.curve) == tried


# ---- Spectra ----------------------------------------------------------------------------------------------


def test_effective_rank_counts_directions_that_share_equally():
    orthogonal = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    assert spectra.effective_rank(orthogonal) == pytest.approx(6)
    assert spectra.effective_rank(1e-30 * orthogonal[:, :4]) == pytest.approx(4)
    assert spectra.effective_rank(torch.outer(torch.arange(1.0, 5), torch.ones(7))) == pytest.approx(1)
    unequal = torch.diag(torch.tensor([3.0, 1.0, 0.0]))  # shares 0.9 and 0.1 of the squares
    assert spectra.effective_rank(unequal) == pytest.approx(0.9**-0.9 * 0.1**-0.1)
    for bad in (torch.zeros(2, 3), torch.full((2, 2), math.nan)):
        with pytest.raises(ValueError, match="effective rank"):
            spectra.effective_rank(bad)


def test_moments_begin_with_the_first_step_and_end_with_the_last():
    assert spectra.moments(400) == [1, 50, 200, 350, 400]
    assert spectra.moments(1) == [1]


def test_what_is_watched_is_momentum_and_update_of_that_matrix():
    seen = {}
    for name, setting in BEST.items():
        found = spectra.watched(setting, 0, 3)
        assert all(len(found["values"][m][k]) == 3 for m in spectra.WATCHED for k in spectra.KINDS)
        seen[name] = found
    for matrix in spectra.WATCHED:
        first = {name: found["values"][matrix] for name, found in seen.items()}
        # the same first gradient: SGD's and AdamW's momenta are multiples of it, and so is Muon's
        for name in ("adamw", "muon"):
            assert first[name]["momentum"][0] == pytest.approx(first["sgd"]["momentum"][0], abs=1e-3)
        # SGD's first step is along it; Muon's spreads over directions that the gradient hardly has
        assert first["sgd"]["update"][0] == pytest.approx(first["sgd"]["momentum"][0], abs=1e-3)
        ranks = seen["muon"]["ranks"][matrix]
        assert all(2 * used < spread for used, spread in zip(ranks["momentum"], ranks["update"], strict=True))


# ---- All of it --------------------------------------------------------------------------------------------


def test_a_batch_study_reads_the_same_windows():
    data = measured()[0]["batch"]
    assert {row["batch"] * row["steps"] for row in data["rows"]} == {data["windows"]}
    assert all(ablations.FULL.windows % batch == 0 for batch in ablations.FULL.batches)
    read = [tasks.speech(batch=b, steps=data["windows"] // b) for b in ablations.QUICK.batches]
    texts = [task.examples(task, 0)[0].inputs for task in read]
    assert all(torch.equal(texts[0], text) for text in texts)


def test_every_rank_has_everything_and_it_is_plain_data():
    first, second = measured()
    assert first == second == json.loads(json.dumps(first))
    assert list(first) == ["best", "spectra", *ablations.STUDIES]
    size = ablations.QUICK
    rows = {name: first[name]["rows"] for name in ablations.STUDIES}
    assert all(len(row["gaps"]) == len(size.seeds) for found in rows.values() for row in found)
    assert all(math.isfinite(gap) and gap > 0 for found in rows.values() for row in found for gap in row["gaps"])
    assert [row["rms"] for row in rows["rms"]] == list(size.levels)
    assert [row["route"] for row in rows["routing"]] == list(ROUTES)
    assert {(row["pretrained"], row["optimizer"]) for row in rows["finetune"]} == {
        (a, b) for a in ablations.PAIR for b in ablations.PAIR
    }
    assert {(row["optimizer"], row["steps"], row["weight_decay"]) for row in rows["decay"]} == {
        (name, steps, rate)
        for name in ablations.PAIR
        for steps in (size.steps, 2 * size.steps)
        for rate in ablations.DECAYS
    }
    for row in rows["routing"] + rows["batch"] + rows["finetune"] + first["rms"]["tuned"]:
        assert row["lr"] == row["lrs"][row["medians"].index(min(row["medians"]))]


def test_two_ranks_find_what_one_finds(one_thread: None):
    data = measured()[0]
    seeds, matched = ablations.QUICK.seeds, ablations.QUICK.levels.index(MATCHED)
    alone = RunCache(ALONE).gaps([RunSpec(BEST["muon"], seed, ablations.QUICK.steps) for seed in seeds])
    assert data["rms"]["rows"][matched]["gaps"] == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("name", tables.LINES)
def test_tables_fit_the_page(name: str):
    data = measured()[0]
    lines = tables.LINES[name](data[name])
    assert len(lines) >= 3
    assert max(map(len, lines)) <= 78
    assert lines == [line.rstrip() for line in lines]


def test_figures_take_what_the_helpers_return():
    data = measured()[0]
    curves = [
        tables.rms_curves(data["rms"]),
        *(tables.decay_curves(data["decay"], "muon", what) for what in ("gaps", "spectral", "rms")),
    ]
    assert all(plots.describe_curves(found, "x", "y").count(":") >= len(found) for found in curves)
    spectrum = tables.spectra_curves(data["spectra"], "out", "update")
    assert "Muon: largest 1," in plots.describe_spectra(spectrum)


# ---- What tables say --------------------------------------------------------------------------------------


def test_only_all_of_five_seeds_are_a_claim():
    low, high = [0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.4, 0.5, 0.6]
    assert tables.ahead("Muon", low, high) == "Muon ahead on 5 of 5: claimed"
    assert tables.ahead("Muon", high, low) == "Muon behind on 5 of 5: claimed"
    assert tables.ahead("Muon", low, [*high[:4], 0.4]) == "Muon ahead on 4 of 5: no claim"
    assert tables.ahead("Muon", low[:4], high[:4]) == "Muon ahead on 4 of 4: no claim"


def test_the_batch_table_pairs_seeds():
    gaps = {"adamw": [0.2, 0.3, 0.8], "muon": [0.1, 0.1, 0.2]}
    rows = [{"optimizer": name, "batch": 4, "steps": 8, "lr": 0.004, "gaps": g} for name, g in gaps.items()]
    lines = tables.batch_lines({"windows": 32, "rows": rows})
    assert lines[2].split() == ["4", "8", "0.300", "[0.200,", "0.800]", "0.100", "[0.100,", "0.200]", "3.00"]
    assert lines[-1].strip() == "Muon ahead on 3 of 3: no claim"
