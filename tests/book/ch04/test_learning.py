"""Fair races: one schedule for all, settings chosen on other seeds than they race on, and claims that need proof."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
import torch

from distmuon import launch
from distmuon.launch import World
from distmuon.optim import newton_schulz
from muonbook.ch04 import search_space, sweep, tables, tasks
from muonbook.ch04.search_space import RACERS, Setting, is_usual, settings
from muonbook.ch04.tasks import TASKS
from muonbook.ch04.training import Outcome, look_at, share_of_lr, train
from muonbook.measure import results

DIGITS = replace(TASKS["digits"], steps=12, dtype=torch.float64)
MUON = Setting("muon", 0.02, 0.1, 0.95)
THREE = ("sgd", "adamw", "muon")


def outcome(setting: Setting, seed: int, loss: float) -> Outcome:
    return Outcome(setting, seed, [1, 2], [loss + 1, loss])


# ---- One run ----------------------------------------------------------------------------------------------


def test_the_learning_rate_rises_and_falls_to_zero_and_the_last_step_is_looked_at():
    shares = [share_of_lr(step, 200) for step in range(200)]
    assert shares[:2] == [0.1, 0.2]
    assert max(shares) == shares[9] == 1.0
    assert shares[9:] == sorted(shares[9:], reverse=True)
    assert 0 < shares[-1] < 1e-3
    assert all(look_at(steps)[-1] == steps for steps in (1, 7, 20, 110, 1951))
    assert look_at(20) == [5, 10, 15, 20]


def test_a_run_today_is_the_run_that_is_stored():
    """The digits in float32, by an optimizer without half precision: the same on every machine, to five digits."""
    race = results.load("race_digits")["racers"]["adamw"]
    assert train(TASKS["digits"], Setting(**race["best"]), 0).held_out == pytest.approx(race["held_out"][0], rel=1e-3)


def test_seeds_decide_weights_order_and_split_and_the_optimizer_nothing():
    finals = [train(DIGITS, Setting(name, 1e-9, 0.0, 0.9), 3).final for name in THREE]
    assert finals == pytest.approx([finals[0]] * 3, abs=1e-5)
    assert train(DIGITS, Setting("sgd", 1e-9, 0.0, 0.9), 4).final != pytest.approx(finals[0], abs=1e-3)


def test_a_run_that_diverges_is_an_infinite_loss_and_counts_in_the_median():
    wild = train(DIGITS, Setting("sgd", 1e6, 0.0, 0.9), 0)
    assert wild.final == math.inf
    assert len(wild.held_out) == len(wild.steps)
    found = sweep.medians([outcome(MUON, 0, 1.0), outcome(MUON, 1, math.inf), outcome(MUON, 2, math.inf)])
    assert found == {MUON: math.inf}


def test_every_seed_has_a_language_of_its_own_and_reads_no_window_twice():
    task = replace(TASKS["language"], batch=4, steps=6)
    read = []
    for seed in (0, 1, sweep.TUNING_SEEDS[0]):
        training, held_out = task.examples(task, seed)
        assert (len(training[0]), len(held_out[0])) == (24, tasks.HELD_OUT_WINDOWS)
        assert torch.equal(training[0][:, 1:], training[1][:, :-1])
        read.append(torch.cat([training[0], held_out[0]]))
    windows = torch.cat(read)
    assert len(windows.unique(dim=0)) == len(windows)


def test_tuning_does_not_see_the_images_that_the_race_is_judged_on(monkeypatch: pytest.MonkeyPatch):
    images = torch.arange(30_000, dtype=torch.float32).view(-1, 1)
    training, test = ((part, part.flatten()) for part in (images[:20_000], images[20_000:]))
    monkeypatch.setattr(tasks, "_images", lambda name, dtype: (training, test))
    task = TASKS["fashion"]
    (read, judged), (tuned, held_out) = (one.examples(one, 0) for one in (task, replace(task, tuning=True)))
    assert torch.equal(read[1], training[1])
    assert torch.equal(judged[1], test[1])
    for both, whole in zip(zip(tuned, held_out, strict=True), training, strict=True):
        assert torch.equal(torch.cat(both).flatten(), whole.flatten())
    assert len(held_out[1]) == tasks.HELD_OUT_IMAGES


# ---- Tuning -----------------------------------------------------------------------------------------------


def valley(best: Setting, tried: list[sweep.Job]) -> sweep.Runner:
    """A made-up optimizer whose loss grows with the distance from its best setting, and a little with the seed."""

    def loss(setting: Setting, seed: int) -> float:
        away = abs(math.log2(setting.lr / best.lr)) + abs(math.log2(setting.others / best.others))
        return away + abs(setting.momentum - best.momentum) + setting.weight_decay + seed

    def run(jobs: Sequence[sweep.Job]) -> list[Outcome]:
        tried.extend(jobs)
        return [outcome(setting, seed, loss(setting, seed)) for setting, seed in jobs]

    return run


@pytest.mark.parametrize(("lr", "momentum", "others"), [(0.016, 0.9, 1.0), (0.001, 0.5, 16.0), (0.128, 0.98, 1 / 64)])
def test_the_grid_is_widened_until_the_best_stands_between_others(lr: float, momentum: float, others: float):
    tried: list[sweep.Job] = []
    wanted = Setting("muon", lr, 0.0, momentum, others)
    tuned = sweep.tune("muon", valley(wanted, tried), seeds=[0, 1, 2])
    assert tuned.best == wanted
    assert search_space.widened(tuned.grid, tuned.best) == tuned.grid
    assert len(tried) == len(set(tried)) == len(tuned.tried)
    medians = [tuned.curve()[lr] for lr in tuned.grid["lr"]]
    assert medians == [min(loss for one, loss in tuned.medians.items() if one.lr == lr) for lr in tuned.grid["lr"]]


def test_a_best_that_is_nowhere_ends_the_search_and_is_named():
    tuned = sweep.tune("muon", valley(Setting("muon", 1e-30, 0.0, 0.95), []), seeds=[0])
    assert len(tuned.grid["lr"]) == 6 + sweep.FARTHEST
    assert "lr" in tables.at_an_end({"grid": tuned.grid, "best": asdict(tuned.best)})
    races = [results.load(f"race_{name}") for name in ("digits", "language", "fashion")]
    assert not any(tables.at_an_end(racer) for race in races for racer in race["racers"].values())
    muon = races[0]["racers"]["muon"]
    muon["grid"]["momentum"] = [0.1, muon["best"]["momentum"]]
    assert "  Muon stands at an end of its grid (momentum): tuning stopped too early" in tables.result_lines(races[0])


def test_the_first_seed_sorts_out_and_the_others_decide():
    tried: list[sweep.Job] = []
    best = Setting("adamw", 0.004, 0.0, 0.8)
    flipped = valley(replace(best, momentum=0.7, others=4.0), tried)

    def run(jobs: Sequence[sweep.Job]) -> list[Outcome]:
        fair = valley(best, tried)
        return [(fair if seed else flipped)([(setting, seed)])[0] for setting, seed in jobs]

    tuned = sweep.tune("adamw", run, seeds=[0, 1, 2])
    everything = settings("adamw", tuned.grid)
    on_all = {setting for setting, seed in tried if seed == 2}
    assert {setting for setting, seed in tried if seed == 0} == set(everything)
    on_first = sweep.medians(one for one in tuned.tried if one.seed == 0)
    assert set(tuned.medians) == set(sweep.finalists(on_first)) <= on_all
    assert {setting.lr for setting in tuned.medians} == set(tuned.grid["lr"])
    assert len(everything) / sweep.FINALISTS <= len(tuned.medians) < 0.3 * len(everything)
    assert is_usual(tuned.usual)


def test_nobody_is_tuned_harder_than_the_baselines_or_races_on_the_seeds_it_was_tuned_on():
    counts = {name: len(settings(name, RACERS[name].grid())) for name in THREE}
    assert counts["sgd"] >= counts["muon"] <= counts["adamw"]
    assert all(RACERS[name].grid() == RACERS["muon"].grid() for name in search_space.VARIANT_OPTIONS)
    assert not set(sweep.TUNING_SEEDS) & set(sweep.RACE_SEEDS)


@pytest.mark.parametrize("name", THREE)
def test_the_other_parameters_have_their_own_rate(name: str):
    setting = Setting(name, 0.01, 0.1, 0.8, others=4.0, second_beta=0.97)
    optimizers = RACERS[name].build(DIGITS.fresh_model(0), setting)
    hidden, others = (group for optimizer in optimizers for group in optimizer.param_groups)
    assert {tuple(p.shape) for p in hidden["params"]} == {(256, 64), (128, 256)}
    assert (hidden["lr"], others["lr"]) == (0.01, 0.04)
    assert hidden["weight_decay"] == others["weight_decay"] == 0.1
    assert hidden.get("momentum", hidden.get("betas", [None])[0]) == 0.8
    if name == "adamw":
        assert others["betas"] == (0.8, 0.97)


@pytest.mark.parametrize("name", search_space.VARIANT_OPTIONS)
def test_a_variant_is_muon_but_for_what_it_changes(name: str):
    title, options = search_space.VARIANT_OPTIONS[name]
    (changed, _), (muon, _) = (RACERS[one].build(DIGITS.fresh_model(0), MUON) for one in (name, "muon"))
    own, usual = ({key: one.param_groups[0][key] for key in one.defaults} for one in (changed, muon))
    assert own == usual | options != usual
    assert RACERS[name].title == title


# ---- Claims and prices ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "claimed"),
    [
        ([1, 1, 1, 1, 1], [2, 2, 2, 2, 2], True),
        ([2, 2, 2, 2, 2], [1, 1, 1, 1, 1], True),
        ([1, 1, 1, 1, 2], [2, 2, 2, 2, 1], False),
        ([1, 1, 1, 1], [2, 2, 2, 2], False),
        ([1, 1, 1, 1, 1], [1, 2, 2, 2, 2], False),
        ([1, 1, 1, 1, 1], [math.inf] * 5, True),
    ],
)
def test_a_difference_is_claimed_where_every_seed_says_so(first, second, claimed):
    assert sweep.verdict(first, second).claimed == claimed


def test_a_verdict_is_of_as_many_seeds_on_either_side():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        sweep.verdict([1, 2], [1])


@pytest.mark.parametrize(
    ("floor", "final", "steps"), [(None, 1.2, 20), ([0.5, 0.7, 0.3], 1.6, 10), ([0.5, 0.7, 0.3], 0.2, None)]
)
def test_what_it_takes_to_catch_up_is_read_off_the_median_gap(floor, final, steps):
    looks = {"looks": [10, 20, 30], "held_out": [[2.0, 1.0, 1.5], [2.2, 1.2, None], [9.0, 0.8, 1.0]]}
    adamw = {"held_out": [[final + level] for level in floor or [0, 0, 0]], "flops": {"model": 2, "optimizer": 0}}
    racers = {"muon": looks | {"flops": {"model": 2, "optimizer": 4}}, "adamw": adamw}
    found = tables.to_reach({"racers": racers, "seeds": [0, 1, 2], "floor": floor, "steps": 40})
    assert found == {"steps": steps and steps / 40, "operations": steps and 3 * steps / 40}


def test_operations_are_those_of_newton_schulz_and_times_are_relative_to_adamw():
    counted = [sweep.flops(DIGITS, Setting(name, 0.001, 0.0, 0.9)) for name in THREE]
    products = newton_schulz.flops((256, 64)) + newton_schulz.flops((128, 256))
    assert [count["optimizer"] for count in counted] == [0, 0, products]
    assert len({count["model"] for count in counted}) == 1
    found = sweep.times(DIGITS, {name: Setting(name, 0.001, 0.0, 0.9) for name in THREE}, rounds=4)
    assert found["adamw"]["median"] == pytest.approx(1.0)


def share(world: World) -> list[int]:
    return sweep.shared_out(world, range(5), lambda job: job * 10 + world.rank)


def test_runs_are_shared_out_over_ranks_and_every_rank_gets_all_in_their_order():
    assert launch.run(share, dp=2) == [[0, 11, 20, 31, 40]] * 2
