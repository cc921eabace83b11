"""The tutorial's recipes: each rule against one written anew, each run repeatable, each table true to its numbers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from distmuon import launch
from distmuon.launch import UsageError, World
from distmuon.models.networks import MLP
from distmuon.optim import newton_schulz
from muonbook.ch04 import image_datasets, recipe_study
from muonbook.ch04.image_datasets import Images
from muonbook.ch04.recipe_study import Job, Runs, run
from muonbook.ch04.recipes import (
    RECIPES,
    TutorialOptimizer,
    TutorialRecipe,
    default_weights_,
    step_flops,
    tutorial_muon,
)
from muonbook.ch04.tasks import Convolution

pytestmark = pytest.mark.usefixtures("one_thread")  # small steps, for which threads cost more than they give

MNIST, CIFAR = RECIPES["mnist"], RECIPES["cifar10"]
QUICK_CIFAR = replace(CIFAR, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)))
SMALL = replace(MNIST, model=partial(MLP, (784, 16, 10)), epochs=2)


def synthetic(shape: Sequence[int] = (1, 28, 28), training: int = 200, test: int = 60) -> Images:
    """Return images of ten classes: a pattern for each, under noise."""
    generator = torch.Generator().manual_seed(3)
    patterns = torch.randint(0, 128, (10, *shape), generator=generator)
    labels = torch.arange(training + test) % 10
    noise = torch.randint(0, 128, (training + test, *shape), generator=generator)
    images = (patterns[labels] + noise).to(torch.uint8)
    return Images(images[:training], labels[:training], images[training:], labels[training:])


DATA = synthetic()
COSINE = [1.0, 0.904508, 0.654508, 0.345492, 0.095492]

# ---- The optimizer ----------------------------------------------------------------------------------------


def rule(weights: list[Tensor], gradients: list[list[Tensor]], lr: float, dtype: torch.dtype) -> list[Tensor]:
    """Return the weights after all gradients, by the tutorial's rule; convolutions come as [out, in, 3, 3]."""
    moved = []
    for index, weight in enumerate(weights):
        weight, average = weight.clone(), torch.zeros_like(weight)
        for step in gradients:
            gradient = step[index]
            if weight.ndim == 1:
                average = 0.95 * average + gradient
                weight -= lr * (gradient + 0.95 * average)
                continue
            average = 0.95 * average + 0.05 * gradient
            x = (0.95 * average + 0.05 * gradient).flatten(1).to(dtype)
            x = x.T if len(x) > len(x.T) else x
            x = x / x.norm()
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = x.T if (len(weight) > weight[0].numel()) else x
            factor = max(1, weight.shape[-2] / weight.shape[-1]) ** 0.5
            weight -= lr * factor * x.reshape(weight.shape).to(weight.dtype)
        moved.append(weight)
    return moved


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.06)])
def test_muon_moves_every_parameter_by_the_tutorials_rule(dtype: torch.dtype, tolerance: float) -> None:
    """Three steps, on wide, tall and convolving layers: they differ by at most `tolerance` of the distance moved."""
    torch.manual_seed(0)
    layers = [Convolution(3, 32), Convolution(32, 8), nn.Linear(20, 48), nn.Linear(48, 10)]
    ours = default_weights_(nn.Sequential(*layers)).double()
    convolutions = {id(m.weight) for m in ours.modules() if isinstance(m, Convolution)}
    parameters = list(ours.parameters())
    shapes = [(len(p), -1, 3, 3) if id(p) in convolutions else p.shape for p in parameters]
    before = [p.detach().clone().view(shape) for p, shape in zip(parameters, shapes, strict=True)]
    gradients = [[torch.randn_like(p) for p in before] for _ in range(3)]

    optimizers = tutorial_muon(ours, 0.01, compute_dtype=dtype)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.view(parameter.shape)
        for optimizer in optimizers:
            optimizer.step()

    assert sum(len(g["params"]) for o in optimizers for g in o.param_groups) == len(parameters)
    for start, expected, found in zip(before, rule(before, gradients, 0.01, dtype), parameters, strict=True):
        distance = (expected - start).norm()
        assert distance > 0
        assert (found.detach().view(start.shape) - expected).norm() <= tolerance * distance, tuple(start.shape)


def test_a_convolutions_factor_is_that_of_its_filter() -> None:
    muon, _ = tutorial_muon(CIFAR.model(), 0.01)
    by_shape = {tuple(group["params"][0].shape): group["lr"] for group in muon.param_groups}
    assert by_shape[32, 27] == pytest.approx(0.01 / math.sqrt(32 / 27))
    assert [lr for shape, lr in by_shape.items() if shape != (32, 27)] == [0.01] * 4


def test_bf16_and_float32_newton_schulz_train_alike() -> None:
    def losses(dtype: torch.dtype) -> list[float]:
        optimizer = TutorialOptimizer("Muon", 0.01, partial(tutorial_muon, compute_dtype=dtype))
        return run(replace(SMALL, optimizers={"muon": optimizer}), "muon", 0, DATA, lr=0.04, epochs=4)["training_loss"]

    found = losses(torch.float32)
    assert found[-1] < 1.2  # far from where it began
    assert losses(torch.bfloat16) == pytest.approx(found, rel=0.02)


# ---- The recipe -------------------------------------------------------------------------------------------


def test_initial_weights_are_those_of_torchs_own_layers() -> None:
    torch.manual_seed(5)
    theirs: list[nn.Module] = [nn.Linear(784, 256), nn.Linear(256, 128), nn.Linear(128, 10)]
    assert_same_weights(theirs, MNIST.model())
    torch.manual_seed(5)
    theirs = [nn.Conv2d(a, b, 3) for a, b in ((3, 32), (32, 64), (64, 128))]
    theirs += [nn.Linear(2048, 512), nn.Linear(512, 10)]
    assert_same_weights(theirs, CIFAR.model())


def assert_same_weights(theirs: list[nn.Module], ours: nn.Module) -> None:
    torch.manual_seed(5)
    default_weights_(ours)
    expected = [parameter for layer in theirs for parameter in layer.parameters()]
    for a, b in zip(expected, ours.parameters(), strict=True):
        torch.testing.assert_close(a.flatten(), b.flatten())


def test_pixels_go_in_as_the_tutorial_scales_them() -> None:
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    scaled = CIFAR.inputs(images)
    assert scaled.shape == (4, 3, 32, 32)
    torch.testing.assert_close(scaled[:, 1], (images[:, 1] / 255 - 0.4822) / 0.1994)
    torch.testing.assert_close(MNIST.inputs(images[:, :1]), (images[:, 0] / 255).flatten(1))


class Spy(SGD):
    """Notes the learning rate of every step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[float] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(self.param_groups[0]["lr"])


@pytest.mark.parametrize(("recipe", "shares"), [(MNIST, [1, 1, 1]), (QUICK_CIFAR, COSINE)])
def test_epochs_batches_and_learning_rates_are_the_tutorials(recipe: TutorialRecipe, shares: list[float]) -> None:
    """The last batch is short and kept; the cosine moves once per epoch and ends above zero."""
    spies: list[Spy] = []

    def build(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
        spies.append(Spy(model.parameters(), lr=lr))
        return [spies[0]]

    data = synthetic(recipe.shape, test=10)  # 200 images: no multiple of either batch
    found = run(replace(recipe, optimizers={"spy": TutorialOptimizer("spy", 0.5, build)}), "spy", 0, data)
    per_epoch = math.ceil(200 / recipe.batch)
    expected = [0.5 * share for share in shares for _ in range(per_epoch)]
    assert spies[0].seen == pytest.approx(expected, rel=1e-5)
    assert found["steps"] == len(expected)
    assert len(found["training_loss"]) == len(found["test_loss"]) == len(found["test_accuracy"]) == recipe.epochs


def test_an_epoch_shows_every_image_once_and_later_ones_in_another_order() -> None:
    seen = []
    labels = torch.arange(200)
    for seed in (1, 1, 2):
        order = torch.Generator().manual_seed(seed)
        batches = recipe_study._batches(MNIST, DATA._replace(train_labels=labels), order, "cpu")
        seen.append(torch.cat([numbers for _, numbers in batches]).tolist())
    assert sorted(seen[0]) == labels.tolist()
    assert seen[0] == seen[1] != seen[2]


# ---- A run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", SMALL.optimizers)
def test_every_optimizer_learns_and_a_run_can_be_repeated(optimizer: str) -> None:
    found = run(
        SMALL, optimizer, 0, DATA, lr=None if optimizer.startswith("muon") else 8 * SMALL.optimizers[optimizer].lr
    )
    again = run(SMALL, optimizer, 0, DATA, lr=found["lr"])
    assert found == again
    assert found["training_loss"][1] < found["training_loss"][0]
    assert found["test_loss"][1] < math.log(10)


def test_one_seed_means_the_same_weights_and_images_for_everybody() -> None:
    """With next to no learning rate, all see the same losses; another seed sees others."""
    still = [run(SMALL, optimizer, 0, DATA, lr=1e-12)["training_loss"] for optimizer in SMALL.optimizers]
    assert all(losses == pytest.approx(still[0], rel=1e-6) for losses in still)
    assert run(SMALL, "sgd", 1, DATA, lr=1e-12)["training_loss"] != pytest.approx(still[0], rel=1e-6)


def test_the_cnn_trains_in_training_mode_and_is_tested_without_dropout() -> None:
    data = synthetic((3, 32, 32), training=64, test=20)
    found = run(CIFAR, "adamw", 0, data, epochs=1)
    assert found == run(CIFAR, "adamw", 0, data, epochs=1)
    model = CIFAR.model()
    default_weights_(model)
    assert recipe_study.evaluate(CIFAR, model, data) == recipe_study.evaluate(CIFAR, model, data)
    assert not model.training


def test_a_run_that_diverges_is_infinite_from_there_on() -> None:
    found = run(SMALL, "sgd", 0, DATA, lr=1e30)
    assert found["training_loss"] == found["test_loss"] == [math.inf] * 2
    assert found["test_accuracy"] == [0.0] * 2


def test_what_cannot_be_run_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="no optimizer here is called lion; choose one of muon, muon_adamw, adamw"):
        run(MNIST, "lion", 0, DATA)
    with pytest.raises(UsageError, match="lr -1, epochs 3: lr must be a positive number"):
        run(MNIST, "sgd", 0, DATA, lr=-1.0)
    with pytest.raises(UsageError, match=r"takes images of \(3, 32, 32\), not \(1, 28, 28\)"):
        run(CIFAR, "adamw", 0, DATA)
    with pytest.raises(UsageError, match="200 of 200 training images cannot be held out"):
        recipe_study.for_tuning(DATA, 200)


def test_a_step_costs_what_its_products_cost() -> None:
    found = step_flops(MNIST)
    shapes = [(256, 784), (128, 256), (10, 128)]
    products = sum(3 * 2 * 64 * a * b for a, b in shapes) - 2 * 64 * 256 * 784  # the images need no gradient
    assert found["network"] == products
    assert found["muon"] == sum(newton_schulz.flops(shape) for shape in shapes)
    assert found["muon_adamw"] == sum(newton_schulz.flops(shape) for shape in shapes[:2])
    assert found["sgd"] == found["adamw"] == 0
    assert round(found["muon"] / found["network"]) == 20  # as the module's first lines say


# ---- Tuning and the study ---------------------------------------------------------------------------------


def test_tuning_doubles_until_the_best_rate_is_at_no_end() -> None:
    best = {"muon": 0.02, "sgd": 0.64}  # both begin at 0.01
    recipe = replace(MNIST, optimizers={name: MNIST.optimizers[name] for name in best})
    asked: list[Job] = []

    def run_all(jobs: Sequence[Job]) -> Runs:
        asked.extend(jobs)
        return {job: {"test_loss": [9.0, abs(math.log(job[1] / best[job[0]]))]} for job in jobs}

    tried, curves = recipe_study.tune(recipe, run_all)
    assert [list(curve) for curve in curves.values()] == [sorted(rates) for rates in tried.values()]
    assert sorted(tried["muon"]) == [0.005, 0.01, 0.02, 0.04]
    assert sorted(tried["sgd"]) == pytest.approx([0.005 * 2**n for n in range(9)])
    assert len(set(asked)) == len(asked) == 13 * len(recipe_study.TUNING_SEEDS)
    assert max(recipe_study.tune(recipe, run_all, farthest=2)[1]["sgd"]) == pytest.approx(0.08)


def test_tuning_sees_no_test_image() -> None:
    found = recipe_study.for_tuning(DATA, 50)
    assert torch.equal(torch.cat([found.train_images, found.test_images]), DATA.train_images)
    assert torch.equal(torch.cat([found.train_labels, found.test_labels]), DATA.train_labels)
    assert len(found.test_labels) == 50


def small_study(world: World) -> dict[str, Any]:
    return recipe_study.study_of(world, "fashion", SMALL, DATA, [0, 1], held_out=50, tuning_seeds=[9], farthest=1)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return {"recipe": "mnist"} | launch.run(small_study)[0]


def test_two_ranks_find_what_one_finds(found: dict[str, Any]) -> None:
    assert [{"recipe": "mnist"} | rank for rank in launch.run(small_study, dp=2)] == [found] * 2


def test_a_study_races_everybody_at_the_rates_it_found(found: dict[str, Any]) -> None:
    assert list(found["as_written"]) == ["muon", "adamw", "sgd"]
    assert list(found["tuned"]) == list(SMALL.optimizers)
    for name, runs in found["tuned"].items():
        best = min(found["tuning"][name], key=lambda entry: entry["held_out"][0])
        assert [(r["optimizer"], r["lr"], r["seed"]) for r in runs] == [(name, best["lr"], 0), (name, best["lr"], 1)]
    for name, runs in found["as_written"].items():
        assert [(r["lr"], r["seed"]) for r in runs] == [(SMALL.optimizers[name].lr, 0), (SMALL.optimizers[name].lr, 1)]
    assert found["as_written"]["sgd"][0] == run(SMALL, "sgd", 0, DATA)


def test_a_study_says_what_is_missing_and_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_datasets, "missing", lambda name: None if name == "fashion" else f"{name} is not here.")
    monkeypatch.setattr(image_datasets, "load", lambda name: synthetic(training=1300, test=600))
    monkeypatch.setitem(RECIPES, "mnist", SMALL)
    (data,) = launch.run(recipe_study.study, (["mnist", "fashion"], [0, 1, 2], True))
    assert data["mnist"] == {"missing": "mnist is not here."}
    assert (data["fashion"]["images"], data["fashion"]["epochs"]) == (1200, 1)
    assert len(data["fashion"]["tuned"]["adamw"]) == 2
    told = recipe_study.lines(data)
    assert told[0] == "MNIST: not run here; get the images with"
    with pytest.raises(UsageError, match="no recipe for digits; choose from mnist, fashion, cifar10"):
        recipe_study.study(None, ["digits"], [0], True)  # type: ignore[arg-type]


def test_lines_show_the_medians_the_wins_and_what_was_reported(found: dict[str, Any]) -> None:
    def runs(loss: float, accuracy: float) -> list[dict[str, Any]]:
        ends = [{"training_loss": [9.0, loss + n / 100], "test_loss": [9.0, loss]} for n in range(5)]
        return [end | {"test_accuracy": [0.1, accuracy], "lr": 0.01} for end in ends]

    races = {"as_written": {"muon": runs(0.1, 0.9), "adamw": runs(0.2, 0.8), "sgd": runs(0.3, 0.9)}}
    told = recipe_study.lines({"mnist": found | races})
    assert any("Muon" in line and "0.120 [0.100, 0.140]" in line and "0.100 [0.100, 0.100]" in line for line in told)
    assert told.count("    test loss: Muon's is smaller than AdamW's on 5 of 5 seeds; claimed") == 1
    assert sum(line.endswith("no difference claimed") for line in told) == 3  # tuned: two seeds
    assert "  the tutorial reports of muon: training loss 0.0475, one run" in told
    assert told[-1].startswith("  Muon's update takes")
