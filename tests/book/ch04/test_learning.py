"""Fair races: one schedule for all, settings chosen on other seeds than they race on, and claims that need proof."""

import math
from collections.abc import Sequence
from dataclasses import replace

import learning_race_workers as workers
import pytest
import torch

from distmuon import launch
from distmuon.models.networks import initial_weights
from distmuon.optim import newton_schulz
from muonbook.ch04 import sweep, tables, tasks
from muonbook.ch04.tasks import TASKS
from muonbook.ch04.training import CANDIDATES, Outcome, Setting, look_at, share_of_lr, train
from muonbook.measure import results

DIGITS = replace(TASKS["digits"].shorter(12), dtype=torch.float64)
MUON = Setting("muon", 0.02, 0.1, 0.95)


def outcome(setting: Setting, seed: int, loss: float) -> Outcome:
    return Outcome(setting, seed, [1, 2], [loss + 1, loss], [loss], 0.5)


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


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_racer_learns_and_one_seed_is_one_run(name: str):
    setting = CANDIDATES[name].settings(name, CANDIDATES[name].lrs[3])[0]
    first, second = train(DIGITS, setting, 0), train(DIGITS, setting, 0)
    assert first == second
    assert first.final < 0.9 * math.log(10)
    assert first != train(DIGITS, setting, 1)


def test_seeds_decide_weights_order_and_split_and_the_optimizer_nothing():
    runs = {name: train(DIGITS, CANDIDATES[name].settings(name, 1e-9)[0], 3) for name in CANDIDATES}
    assert len({run.training[0] for run in runs.values()}) == 1
    assert max(run.final for run in runs.values()) == pytest.approx(min(run.final for run in runs.values()), abs=1e-5)


def test_a_run_that_diverges_is_an_infinite_loss():
    wild = train(DIGITS, Setting("sgd", 1e6, 0.0, 0.9), 0)
    assert wild.final == math.inf
    assert len(wild.held_out) == len(wild.steps)
    assert wild.accuracy == 0.0


def test_the_language_reads_no_window_twice():
    task = tasks.speech(batch=4, steps=6)
    training, held_out = task.examples(task, 0)
    assert len(training) == 24
    assert len(held_out) == tasks.HELD_OUT_WINDOWS
    assert torch.equal(training.inputs[:, 1:], training.targets[:, :-1])
    assert len(training.inputs.unique(dim=0)) == 24


def test_an_untrained_model_is_far_above_the_floor():
    task = tasks.speech(batch=2, steps=1)
    found = train(task, MUON.at(1e-9), 0)
    assert task.floor is not None
    assert 0.5 < task.floor() < 0.7
    assert found.final > 3


def test_shifting_and_flipping_keeps_pixels():
    torch.manual_seed(0)
    images = torch.rand(64, 3, 32, 32)
    changed = tasks.shifted_and_flipped(images)
    assert changed.shape == images.shape
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    moves = set()
    for image, found in zip(padded, changed, strict=True):
        crops = {(y, x): image[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)}
        fits = [(place, flip) for place, crop in crops.items() for flip in (0, 1) if is_crop(found, crop, flip)]
        assert len(fits) == 1
        moves.add(fits[0])
    assert {flip for _, flip in moves} == {0, 1}
    assert len({place for place, _ in moves}) > 30


def is_crop(image: torch.Tensor, crop: torch.Tensor, flip: int) -> bool:
    return torch.equal(image, crop.flip(-1) if flip else crop)


# ---- The network for CIFAR-10 -----------------------------------------------------------------------------


def test_a_convolution_is_torchs_own_with_its_weight_held_as_a_matrix() -> None:
    ours, torchs = tasks.Convolution(3, 8), torch.nn.Conv2d(3, 8, 3, padding=1)
    assert torchs.bias is not None
    ours.load_state_dict({"weight": torchs.weight.detach().flatten(1), "bias": torchs.bias.detach()})
    images = torch.randn(5, 3, 6, 7)
    torch.testing.assert_close(ours(images), torchs(images))


def test_every_weight_of_the_cnn_is_a_matrix() -> None:
    model = tasks.CNN()
    model.load_state_dict(initial_weights(model, 0))
    assert [tuple(p.shape) for name, p in model.named_parameters() if name.endswith("weight")] == [
        (32, 27), (64, 288), (128, 576), (512, 2048), (10, 512),
    ]  # fmt: skip
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


# ---- Tuning -----------------------------------------------------------------------------------------------


def valley(best: float, tried: list[Setting]) -> sweep.Runner:
    """A made-up optimizer whose loss grows with the distance, in doublings, from its best learning rate."""

    def run(jobs: Sequence[sweep.Job]) -> list[Outcome]:
        tried.extend(setting for setting, _ in jobs)
        return [outcome(s, seed, abs(math.log2(s.lr / best)) + s.weight_decay + s.option + seed) for s, seed in jobs]

    return run


@pytest.mark.parametrize(
    ("best", "found", "rates"), [(0.016, 0.016, 6), (0.001, 0.001, 9), (2.0, 2.048, 11), (1e-9, 0, 12)]
)
def test_tuning_goes_on_while_the_best_learning_rate_is_at_an_end(best: float, found: float, rates: int):
    tried: list[Setting] = []
    tuned = sweep.tune("muon", valley(best, tried), seeds=[0, 1])
    assert len(tuned.curve()) == rates <= 6 + sweep.FARTHEST
    assert tuned.best.lr == pytest.approx(found or min(tuned.curve()))
    assert tuned.best.weight_decay == 0.0
    assert len(tried) == 2 * len(set(tried)) == 2 * len(tuned.medians())


def test_nobody_is_tuned_harder_than_the_baselines():
    counts = {name: len(racer.lrs) * len(racer.settings(name, 1.0)) for name, racer in CANDIDATES.items()}
    assert counts["sgd"] >= counts["muon"] <= counts["adamw"]
    for racer in CANDIDATES.values():
        assert [b / a for a, b in zip(racer.lrs, racer.lrs[1:], strict=False)] == [2.0] * (len(racer.lrs) - 1)


def test_nobody_races_on_the_seeds_it_was_tuned_on():
    assert not set(sweep.TUNING_SEEDS) & set(sweep.RACE_SEEDS)
    assert len(sweep.RACE_SEEDS) >= 5


def test_a_diverged_run_counts_in_the_median():
    found = sweep.medians([outcome(MUON, 0, 1.0), outcome(MUON, 1, math.inf), outcome(MUON, 2, math.inf)])
    assert found == {MUON: math.inf}


# ---- Claims -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "claimed", "chance"),
    [
        ([1, 1, 1, 1, 1], [2, 2, 2, 2, 2], True, 2 / 32),
        ([2, 2, 2, 2, 2], [1, 1, 1, 1, 1], True, 2 / 32),
        ([1, 1, 1, 1, 2], [2, 2, 2, 2, 1], False, 12 / 32),
        ([1, 1, 1, 1], [2, 2, 2, 2], False, 2 / 16),
        ([1, 1, 1, 1, 1], [1, 1, 1, 1, 1], False, 1.0),
        ([1, 1, 1, 1, 1], [1, 2, 2, 2, 2], False, 2 / 16),
        ([1, 1, 1, 1, 1], [math.inf] * 5, True, 2 / 32),
    ],
)
def test_a_difference_is_claimed_where_every_seed_says_so(first, second, claimed, chance):
    found = sweep.verdict(first, second)
    assert found.claimed == claimed
    assert found.chance == pytest.approx(chance)


def test_verdicts_compare_seed_by_seed():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        sweep.verdict([1, 2], [1])


def test_steps_to_a_target_are_read_off_the_median_curve():
    racer = {"looks": [10, 20, 30], "held_out": [[2.0, 1.0, 1.5], [2.2, 1.2, None], [9.0, 0.8, 1.0]]}
    found = [tables.steps_until({"racers": {"muon": racer}}, "muon", target) for target in (2.5, 1.2, 0.5)]
    assert found == [10, 20, None]


def test_a_best_rate_at_an_end_of_its_grid_is_told():
    racer = {"curve": {"0.1": 1.0, "0.2": 0.5, "0.4": 2.0}, "best": {"lr": 0.2}}
    assert not tables.at_an_end(racer)
    assert tables.at_an_end(racer | {"best": {"lr": 0.4}})


@pytest.mark.parametrize("name", ["digits", "language", "fashion"])
def test_no_stored_race_stopped_tuning_at_an_end(name: str):
    assert not any(tables.at_an_end(racer) for racer in results.load(f"race_{name}")["racers"].values())


# ---- Races ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def raced() -> list[dict]:
    """The same small race on one rank and on two."""
    return [launch.run(workers.small_race, dp=dp)[0] for dp in (1, 2)]


def test_how_many_ranks_share_the_runs_does_not_matter(raced):
    assert raced[0] == raced[1]


def test_a_stored_race_holds_what_its_tables_print(raced):
    race = raced[0]
    assert race["task"] == "digits"
    lines = "\n".join(tables.result_lines(race) + tables.verdict_lines(race))
    for name, racer in race["racers"].items():
        assert f"lr {racer['best']['lr']:g}" in lines
        assert racer["runs"] == racer["settings"]  # one tuning seed
        assert len(racer["held_out"]) == len(racer["seeds"]) == 5
        assert CANDIDATES[name].title in lines
    assert len(tables.verdicts(race)) == 3


def test_prices_are_steps_operations_and_time(raced):
    race = raced[0]
    for racer in race["racers"].values():
        assert racer["flops"]["model"] == race["racers"]["sgd"]["flops"]["model"] > 0
    assert race["racers"]["muon"]["flops"]["optimizer"] > 0 == race["racers"]["adamw"]["flops"]["optimizer"]
    times = {name: {"median": n + 1.0} for n, name in enumerate(("sgd", "adamw", "muon"))}
    lines = tables.price_lines(race, times)
    (own,) = (line for line in lines[1:] if line.strip().startswith("AdamW"))
    steps, operations, seconds = map(float, own.split()[1:])
    assert steps == operations == seconds <= 1.0


def test_muons_operations_are_those_of_newton_schulz():
    counted = sweep.flops(TASKS["digits"], MUON)["optimizer"]
    assert counted == newton_schulz.flops((256, 64)) + newton_schulz.flops((128, 256))


def test_times_are_relative_to_adamw():
    best = {name: racer.settings(name, 0.001)[0] for name, racer in CANDIDATES.items()}
    found = sweep.times(DIGITS, best, rounds=4)
    assert found["adamw"]["median"] == pytest.approx(1.0)
    assert set(found) == set(CANDIDATES)
