"""Fair races: one schedule for all, settings chosen on other seeds than they race on, and claims that need proof."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace

import learning_race_workers as workers
import pytest
import torch
from figure_helpers import assert_readable

from distmuon import launch
from distmuon.optim import newton_schulz
from muonbook.ch04 import figures, search_space, sweep, tables, tasks
from muonbook.ch04.search_space import RACERS, Setting, is_usual, settings
from muonbook.ch04.tasks import TASKS
from muonbook.ch04.training import Outcome, look_at, share_of_lr, train
from muonbook.measure import results

DIGITS = replace(TASKS["digits"], steps=12, dtype=torch.float64)
MUON = Setting("muon", 0.02, 0.1, 0.95)
THREE = ("sgd", "adamw", "muon")
RACES = ("digits", "language", "fashion")


def outcome(setting: Setting, seed: int, loss: float) -> Outcome:
    return Outcome(setting, seed, [1, 2], [loss + 1, loss])


# ---- One run ----------------------------------------------------------------------------------------------


def test_the_learning_rate_rises_and_falls_to_zero():
    shares = [share_of_lr(step, 200) for step in range(200)]
    assert shares[:2] == [0.1, 0.2]
    assert max(shares) == shares[9] == 1.0
    assert shares[9:] == sorted(shares[9:], reverse=True)
    assert 0 < shares[-1] < 1e-3
    assert [share_of_lr(0, steps) for steps in (1, 3)] == [1.0, 1.0]


def test_the_last_step_is_always_looked_at():
    assert all(look_at(steps)[-1] == steps for steps in (1, 7, 20, 110, 1951))
    assert len(look_at(400)) == len(look_at(110)) == 20
    assert look_at(20) == [5, 10, 15, 20]


@pytest.mark.parametrize("name", THREE)
def test_every_racer_learns_and_one_seed_is_one_run(name: str):
    setting = Setting(name, RACERS[name].lrs[3], 0.0, 0.9)
    first, second = train(DIGITS, setting, 0), train(DIGITS, setting, 0)
    assert first == second
    assert first.final < 0.9 * math.log(10)
    assert first != train(DIGITS, setting, 1)


def test_a_run_today_is_the_run_that_is_stored():
    """The digits in float32, by an optimizer without half precision: the same on every machine, to five digits."""
    race = results.load("race_digits")["racers"]["adamw"]
    assert train(TASKS["digits"], Setting(**race["best"]), 0).held_out == pytest.approx(race["held_out"][0], rel=1e-3)


def test_seeds_decide_weights_order_and_split_and_the_optimizer_nothing():
    finals = [train(DIGITS, Setting(name, 1e-9, 0.0, 0.9), 3).final for name in THREE]
    assert finals == pytest.approx([finals[0]] * 3, abs=1e-5)
    assert train(DIGITS, Setting("sgd", 1e-9, 0.0, 0.9), 4).final != pytest.approx(finals[0], abs=1e-3)


def test_a_run_that_diverges_is_an_infinite_loss():
    wild = train(DIGITS, Setting("sgd", 1e6, 0.0, 0.9), 0)
    assert wild.final == math.inf
    assert len(wild.held_out) == len(wild.steps)


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
    assert train(replace(task, steps=1), MUON.at(1e-9), 0).final > 3 > 0.7 > tasks.language_floor(0) > 0.5
    assert tasks.language_floor(0) != tasks.language_floor(1)


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


@pytest.mark.parametrize("lr", [0.016, 0.001, 0.128])
@pytest.mark.parametrize(("momentum", "others"), [(0.9, 1.0), (0.5, 1.0), (0.98, 1 / 64), (0.7, 16.0)])
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


def test_rates_alone_leave_everything_else_as_usual():
    tried: list[sweep.Job] = []
    tuned = sweep.tune("adamw", valley(Setting("adamw", 0.004, 0.0, 0.7), tried), seeds=[0], rates_alone=True)
    assert {is_usual(setting) for setting, _ in tried} == {True}
    assert len(tried) == len(RACERS["adamw"].lrs)
    assert tuned.best == tuned.usual == Setting("adamw", 0.004, 0.1, 0.9)


def test_nobody_is_tuned_harder_than_the_baselines_or_races_on_the_seeds_it_was_tuned_on():
    counts = {name: len(settings(name, RACERS[name].grid())) for name in THREE}
    assert counts["sgd"] >= counts["muon"] <= counts["adamw"]
    assert {name: racer.grid() for name, racer in RACERS.items() if name not in THREE[:2]} == dict.fromkeys(
        RACERS.keys() - set(THREE[:2]), RACERS["muon"].grid()
    )
    assert {racer.usual in racer.momenta for racer in RACERS.values()} == {True}
    assert not set(sweep.TUNING_SEEDS) & set(sweep.RACE_SEEDS)


@pytest.mark.parametrize("name", THREE)
def test_the_other_parameters_have_their_own_rate(name: str):
    model = DIGITS.fresh_model(0)
    setting = Setting(name, 0.01, 0.1, 0.8, others=4.0, second_beta=0.97)
    groups = [group for optimizer in RACERS[name].build(model, setting) for group in optimizer.param_groups]
    hidden, others = groups
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
    own, usual = (
        {key: value for key, value in one.param_groups[0].items() if key != "params"} for one in (changed, muon)
    )
    assert own == usual | options != usual
    assert RACERS[name].title == title


def test_a_diverged_run_counts_in_the_median():
    found = sweep.medians([outcome(MUON, 0, 1.0), outcome(MUON, 1, math.inf), outcome(MUON, 2, math.inf)])
    assert found == {MUON: math.inf}


# ---- Claims -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "claimed"),
    [
        ([1, 1, 1, 1, 1], [2, 2, 2, 2, 2], True),
        ([2, 2, 2, 2, 2], [1, 1, 1, 1, 1], True),
        ([1, 1, 1, 1, 2], [2, 2, 2, 2, 1], False),
        ([1, 1, 1, 1], [2, 2, 2, 2], False),
        ([1, 1, 1, 1, 1], [1, 1, 1, 1, 1], False),
        ([1, 1, 1, 1, 1], [1, 2, 2, 2, 2], False),
        ([1, 1, 1, 1, 1], [math.inf] * 5, True),
    ],
)
def test_a_difference_is_claimed_where_every_seed_says_so(first, second, claimed):
    found = sweep.verdict(first, second)
    assert found.claimed == claimed
    wins = sum(a < b for a, b in zip(first, second, strict=True))
    assert found.as_data() == {"wins": wins, "losses": found.losses, "seeds": len(first), "claimed": claimed}


def test_verdicts_compare_seed_by_seed():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        sweep.verdict([1, 2], [1])


@pytest.mark.parametrize(
    ("floor", "final", "steps"),
    [
        (None, 2.5, 10),
        (None, 1.2, 20),
        (None, 0.5, None),
        ([0.5, 0.7, 0.3], 1.6, 10),
        ([0.5, 0.7, 0.3], 0.6, 20),
        ([0.5, 0.7, 0.3], 0.2, None),
    ],
)
def test_what_it_takes_to_catch_up_is_read_off_the_median_gap(floor, final, steps):
    looks = {"looks": [10, 20, 30], "held_out": [[2.0, 1.0, 1.5], [2.2, 1.2, None], [9.0, 0.8, 1.0]]}
    adamw = {"held_out": [[final + level] for level in floor or [0, 0, 0]], "flops": {"model": 2, "optimizer": 0}}
    racers = {"muon": looks | {"flops": {"model": 2, "optimizer": 4}}, "adamw": adamw}
    found = tables.to_reach({"racers": racers, "seeds": [0, 1, 2], "floor": floor, "steps": 40})
    assert found == {"steps": steps and steps / 40, "operations": steps and 3 * steps / 40}


@pytest.mark.parametrize("name", RACES)
def test_no_stored_race_stopped_tuning_at_an_end_and_one_that_did_says_so(name: str):
    race = results.load(f"race_{name}")
    assert not any(tables.at_an_end(racer) for racer in race["racers"].values())
    muon = race["racers"]["muon"]
    race["racers"]["muon"] = muon | {"grid": muon["grid"] | {"momentum": [0.1, muon["best"]["momentum"]]}}
    assert "  Muon stands at an end of its grid (momentum): tuning stopped too early" in tables.result_lines(race)


# ---- Races ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def raced() -> list[dict]:
    """The same small race on one rank and on two."""
    return [launch.run(workers.small_race, dp=dp)[0] for dp in (1, 2)]


def test_how_many_ranks_share_the_runs_does_not_matter(raced):
    assert raced[0] == raced[1]


def test_a_stored_race_holds_what_its_tables_print(raced):
    race = raced[0]
    lines = tables.result_lines(race) + tables.verdict_lines(race)
    text = "\n".join(lines)
    assert lines[0] == "digits, 8 steps of 128: held-out loss, median [range] of 5 fresh seeds"
    for name, racer in race["racers"].items():
        assert f"{racer['settings']:7d}{racer['best']['lr']:9.3g}{racer['best']['others']:8.2g}" in text
        assert len(racer["held_out"]) == len(racer["usual"]["held_out"]) == len(tables.gaps(race, name)) == 5
        assert f"  {RACERS[name].title}" in text
    assert text.count(" against ") == 3
    assert max(map(len, lines)) <= 100


def test_pictures_show_the_gaps_and_ratios_of_the_stored_races():
    races = {name: results.load(f"race_{name}") for name in RACES}
    language = races["language"]
    picture, told = figures.gaps_over_steps(language)
    assert_readable(picture)
    for name in language["racers"]:
        assert f"to {statistics.median(tables.gaps(language, name)):.3g}, " in told
    picture, told = figures.races_seed_by_seed(races)
    assert_readable(picture)
    for race in races.values():
        ratios = [a / b for a, b in zip(tables.gaps(race, "muon"), tables.gaps(race, "adamw"), strict=True)]
        assert f"{min(ratios):.3g} to {max(ratios):.3g}, {sum(r < 1 for r in ratios)} of 8 below 1" in told


def test_one_learning_rate_for_both_has_a_winner_for_everybody():
    curves: dict[str, dict[str, float | None]]
    curves = {"adamw": {"0.001": 0.25, "0.002": 0.5, "0.004": None}, "muon": {"0.002": 0.75, "0.004": 1, "0.008": 2}}
    race = {"racers": {name: {"curve": curve} for name, curve in curves.items()}}
    (frame,) = figures.frames_at_one_rate(race)
    assert frame.caption == "Both at 0.002: AdamW wins, 0.500 against 0.750."
    curves["muon"]["0.002"] = 0.504
    (frame,) = figures.frames_at_one_rate(race)
    assert frame.caption == "Both at 0.002: a tie (AdamW first), 0.500 against 0.504."
    assert_readable(frame.figure)


def test_operations_are_those_of_newton_schulz_and_times_are_relative_to_adamw(raced):
    counted = sweep.flops(TASKS["digits"], MUON)["optimizer"]
    assert counted == newton_schulz.flops((256, 64)) + newton_schulz.flops((128, 256))
    prices = [racer["flops"] for racer in raced[0]["racers"].values()]
    assert [price["optimizer"] for price in prices] == [0, 0, counted]
    assert len({price["model"] for price in prices}) == 1
    found = sweep.times(DIGITS, {name: Setting(name, 0.001, 0.0, 0.9) for name in THREE}, rounds=4)
    assert found["adamw"]["median"] == pytest.approx(1.0)
    assert set(found) == set(THREE)
