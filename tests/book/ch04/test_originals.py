"""The tutorial's recipe: each rule against one written anew, each run repeatable, each table true to its numbers."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmuon.launch import World
from distmuon.optim import newton_schulz
from muonbook.ch04 import image_datasets, originals
from muonbook.ch04.image_datasets import PIXELS, Images
from muonbook.ch04.originals import OPTIMIZERS, run, tutorial_muon

pytestmark = pytest.mark.usefixtures("one_thread")  # small steps, for which threads cost more than they give


def synthetic(training: int = 200, test: int = 60) -> Images:
    """Return images of ten classes: a pattern for each, under noise."""
    generator = torch.Generator().manual_seed(3)
    patterns = torch.randint(0, 128, (10, PIXELS), generator=generator)
    labels = torch.arange(training + test) % 10
    noise = torch.randint(0, 128, (training + test, PIXELS), generator=generator)
    images = (patterns[labels] + noise).to(torch.uint8)
    return Images(images[:training], labels[:training], images[training:], labels[training:])


DATA = synthetic()
ALONE = World(0, 1, 1, 1, "gloo", "cpu", 60.0, 1, 0.0)

# ---- The recipe -------------------------------------------------------------------------------------------


def rule(weight: Tensor, gradients: list[Tensor], lr: float) -> Tensor:
    """Return the weight after all gradients, by the tutorial's rule."""
    weight, average = weight.clone(), torch.zeros_like(weight)
    for gradient in gradients:
        if weight.ndim == 1:
            average = 0.95 * average + gradient
            weight -= lr * (gradient + 0.95 * average)
            continue
        average = 0.95 * average + 0.05 * gradient
        x = 0.95 * average + 0.05 * gradient
        tall = len(x) > len(x.T)
        x = x.T if tall else x
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        weight -= lr * max(1, len(weight) / len(weight.T)) ** 0.5 * (x.T if tall else x)
    return weight


def test_muon_moves_every_parameter_by_the_tutorials_rule() -> None:
    """Three steps, on wide and tall layers."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(20, 48), nn.Linear(48, 10)).double()
    before = {p: p.detach().clone() for p in ours.parameters()}
    gradients = {p: [torch.randn_like(p) for _ in range(3)] for p in before}
    optimizers = tutorial_muon(ours, 0.01, compute_dtype=torch.float64)
    for step in range(3):
        for parameter in before:
            parameter.grad = gradients[parameter][step]
        for optimizer in optimizers:
            optimizer.step()
    for parameter, start in before.items():
        expected = rule(start, gradients[parameter], 0.01)
        assert (parameter.detach() - expected).norm() <= 1e-12 * (expected - start).norm() > 0


def test_every_step_of_every_epoch_is_at_the_rate_and_on_the_pixels_of_the_recipe(monkeypatch) -> None:
    """Every image once in an epoch, in another order in the next, pixels from 0 to 1; the last batch is short."""
    batches = [list(originals.batches(DATA, seed)) for seed in (1, 1, 2)]
    assert [len(labels) for _, labels in batches[0]] == [64, 64, 64, 8]
    seen = [torch.cat([images for images, _ in epoch]) for epoch in batches]
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert torch.equal(seen[0].sort(0).values, (DATA.train_images / 255).sort(0).values)
    rates: list[float] = []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            rates.append(self.param_groups[0]["lr"])

    spy = OPTIMIZERS["sgd"]._replace(build=lambda model, lr: [Spy(model.parameters(), lr=lr)])
    monkeypatch.setitem(OPTIMIZERS, "sgd", spy)
    found = run("sgd", 0, DATA, 0.5)
    assert rates == [0.5] * found["steps"] == [0.5] * 3 * 4
    assert [len(found[key]) for key in ("training_loss", "test_loss", "test_accuracy")] == [3] * 3


def test_one_seed_means_the_same_weights_and_images_for_everybody() -> None:
    """With next to no learning rate, all see the same losses; another seed sees others."""
    still = [run(optimizer, 0, DATA, 1e-12, epochs=1)["training_loss"] for optimizer in OPTIMIZERS]
    assert all(losses == pytest.approx(still[0], rel=1e-6) for losses in still)
    assert run("sgd", 1, DATA, 1e-12, epochs=1)["training_loss"] != pytest.approx(still[0], rel=1e-6)


def test_a_run_that_diverges_is_infinite_from_there_on() -> None:
    found = run("sgd", 0, DATA, lr=1e30, epochs=2)
    assert found["training_loss"] == found["test_loss"] == [math.inf] * 2
    assert found["test_accuracy"] == [0.0] * 2


def test_a_step_costs_what_its_products_cost() -> None:
    found = originals.step_flops()
    shapes = [(256, 784), (128, 256), (10, 128)]
    products = sum(3 * 2 * 64 * a * b for a, b in shapes) - 2 * 64 * 256 * 784  # the images need no gradient
    assert found == {"network": products, "muon": sum(newton_schulz.flops(shape) for shape in shapes)}
    assert round(found["muon"] / found["network"]) == 20  # as the module's first lines say


# ---- The study --------------------------------------------------------------------------------------------


def test_tuning_sees_no_test_image() -> None:
    found = originals.without_test(DATA, 50)
    assert torch.equal(torch.cat([found.train_images, found.test_images]), DATA.train_images)
    assert torch.equal(torch.cat([found.train_labels, found.test_labels]), DATA.train_labels)
    assert len(found.test_labels) == 50


def test_a_quick_study_races_everybody_at_the_rates_that_it_found_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = synthetic(training=520)
    monkeypatch.setattr(image_datasets, "missing", lambda name: None if name == "fashion" else f"{name} is not here.")
    monkeypatch.setattr(image_datasets, "load", lambda name: images)
    data = originals.study(ALONE, ["mnist", "fashion"], [0, 1, 2], True)
    assert data["mnist"] == {"missing": "mnist is not here."}
    found = data["fashion"]
    assert list(found["as_written"]) == list(found["tuned"]) == list(OPTIMIZERS)
    for name, runs in found["tuned"].items():
        tried = dict(zip(found["tuning"][name]["lrs"], found["tuning"][name]["medians"], strict=True))
        best, first = min(tried, key=lambda lr: tried[lr]), [OPTIMIZERS[name].lr * factor for factor in (0.5, 1, 2)]
        assert [(r["optimizer"], r["lr"], r["seed"]) for r in runs] == [(name, best, 0), (name, best, 1)]
        assert set(tried) >= set(first)
        assert (len(tried) > 3) == (min(first, key=lambda lr: tried[lr]) != first[1])
        assert [(r["lr"], r["seed"]) for r in found["as_written"][name]] == [(first[1], 0), (first[1], 1)]
    assert found["as_written"]["sgd"][0] == run("sgd", 0, images, OPTIMIZERS["sgd"].lr, epochs=1)
    judged = run("sgd", originals.TUNING_SEEDS[0], originals.without_test(images, 400), best, epochs=1)
    assert judged["test_loss"] == [tried[best]]
    ends = (statistics.median(run["test_loss"][-1] for run in found["tuned"][name]) for name in OPTIMIZERS)
    muon, adamw, sgd = (f"{end:.3f}" for end in ends)
    absent, *lines = originals.lines(data)
    assert absent == "mnist is not here."
    (said,) = (line for line in lines if line.startswith("  tuned, test loss: "))
    assert said.startswith(f"  tuned, test loss: Muon {muon}, AdamW {adamw}, SGD {sgd}; Muon beats AdamW on")
