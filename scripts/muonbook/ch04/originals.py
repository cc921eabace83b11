"""A public tutorial's recipe for MNIST, run again: as written over several seeds, and with every learning rate tuned.

Source: JenWei0312/Muon_Tutorial, Muon.ipynb, commit a45b3e199a71. Its numbers are those of its stored outputs: one run
for each optimizer, without a seed. An MLP of 784, 256, 128 and 10 features, torch's own initial weights, pixels from 0
to 1, batches of 64, 3 epochs at a constant learning rate. Reported is the training loss averaged over the steps of
epoch 3; no test image is looked at. Its Muon is given *all* parameters: the output layer is orthogonalized too, and
biases take Nesterov's momentum at the same learning rate. Its SGD has no momentum.

First we tune all learning rates, on training images held out for it and on seeds of its own. The grid doubles, and goes
on beyond either end while the best is there. Tuning runs are as long as the others, for with a constant learning rate a
shorter run asks for a greater one. Then comes the race: the recipe as written, and every optimizer at the learning rate
found, all under the same seeds, on all training images, judged on the test images. Fashion-MNIST has MNIST's size and
format and follows the same recipe; the tutorial's own numbers then stand for other images.

Losses are means in nats. Models are float32. Newton–Schulz runs in bf16, as in the tutorial, where the hardware
multiplies bf16 natively, and in float32 elsewhere (`fast_paths.fast_dtype`). Muon's products take 20 times the
operations of the network's own forward and backward (`step_flops`), so its runs are nearly all of a study: about 12
minutes on two quiet cores that multiply bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from distmuon.launch import World
from distmuon.optim.fast_paths import fast_dtype
from distmuon.optim.muon import Muon
from muonbook.ch04 import image_datasets
from muonbook.ch04.image_datasets import PIXELS, Images
from muonbook.ch04.sweep import best_of, flops_of, shared_out, try_rates, verdict

BATCH, EPOCHS = 64, 3
REPORTED = "Muon 0.0475, AdamW 0.0717, SGD 0.3931"  # training losses of epoch 3, on MNIST
TUNING_SEEDS, HELD_OUT = (1000, 1001), 5000
FARTHEST = 8  # learning rates beyond the first three, at most

Job = tuple[str, float, int]  # optimizer, learning rate, seed
Runs = dict[Job, dict[str, Any]]

# ---- The recipe -------------------------------------------------------------------------------------------


class TutorialOptimizer(NamedTuple):
    """An optimizer and the learning rate at which the tutorial ran it."""

    title: str
    lr: float
    build: Callable[[nn.Module, float], list[Optimizer]]  # (model, lr) -> optimizers, stepped in turn


def tutorial_muon(model: nn.Module, lr: float, compute_dtype: torch.dtype | str = "auto") -> list[Optimizer]:
    """Return Muon as the tutorial has it: every matrix, head included; biases by SGD with Nesterov's momentum."""
    matrices, biases = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
    options: dict[str, Any] = {"momentum_kind": "average", "scale": "original", "compute_dtype": compute_dtype}
    return [
        Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.0, **options),
        SGD(biases, lr=lr, momentum=0.95, nesterov=True),
    ]


OPTIMIZERS = {  # the one whose steps cost most comes first
    "muon": TutorialOptimizer("Muon", 0.01, tutorial_muon),
    "adamw": TutorialOptimizer("AdamW", 0.001, lambda m, lr: [AdamW(m.parameters(), lr=lr, weight_decay=0.01)]),
    "sgd": TutorialOptimizer("SGD", 0.01, lambda m, lr: [SGD(m.parameters(), lr=lr)]),
}


def network(seed: int) -> nn.Module:  # [n, 784] pixels -> [n, 10] logits
    torch.manual_seed(seed)
    hidden = [nn.Linear(PIXELS, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(128, 10))


def run(optimizer: str, seed: int, data: Images, lr: float, epochs: int = EPOCHS, device: str = "cpu") -> dict:
    """Train once. Return optimizer, seed, lr, steps, and for each epoch training_loss, test_loss and test_accuracy.

    The seed decides initial weights and order of the images, alike for all optimizers. training_loss is the mean over
    an epoch's steps, each before its update; the test is taken after the epoch. A run that diverges has infinite losses
    and accuracy 0 from that epoch on.
    """
    model = network(seed).to(device)
    optimizers = OPTIMIZERS[optimizer].build(model, lr)
    looks = []
    for epoch in range(epochs):
        losses = []
        for images, labels in batches(data, seed + 1 + epoch):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                break
            model.zero_grad()
            loss.backward()
            for one in optimizers:
                one.step()
        looks.append((sum(losses) / len(losses), *evaluate(model, data, device)))
        if not math.isfinite(sum(looks[-1])):  # nothing comes back from there
            looks[-1:] = [(math.inf, math.inf, 0.0)] * (epochs - epoch)
            break
    training, test, accuracy = map(list, zip(*looks, strict=True))
    steps = epochs * math.ceil(len(data.train_labels) / BATCH)
    of = {"optimizer": optimizer, "seed": seed, "lr": lr, "steps": steps}
    return of | {"training_loss": training, "test_loss": test, "test_accuracy": accuracy}


def batches(data: Images, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all training images once, shuffled, pixels from 0 to 1; the last batch may be short."""
    order = torch.randperm(len(data.train_labels), generator=torch.Generator().manual_seed(seed))
    for rows in order.split(BATCH):
        yield data.train_images[rows] / 255, data.train_labels[rows]


@torch.no_grad()
def evaluate(model: nn.Module, data: Images, device: str) -> tuple[float, float]:
    """Return (mean loss, accuracy) on the test images."""
    logits, labels = model((data.test_images / 255).to(device)), data.test_labels.to(device)
    return F.cross_entropy(logits, labels).item(), (logits.argmax(-1) == labels).double().mean().item()


def step_flops() -> dict[str, int]:
    """Return the operations of one step's matrix products: the network's forward and backward, and Muon's."""
    images, labels = torch.zeros(BATCH, PIXELS), torch.zeros(BATCH).long()
    model = network(0)
    network_flops = flops_of(lambda: F.cross_entropy(model(images), labels).backward())
    return {"network": network_flops, "muon": sum(flops_of(one.step) for one in tutorial_muon(model, 0.01))}


# ---- All runs ---------------------------------------------------------------------------------------------


def study(world: World, names: Sequence[str], seeds: Sequence[int], quick: bool) -> dict[str, Any]:
    """Return for each data set what `study_of` finds, or {"missing": sentence} where it is not here. Collective.

    seeds: of the race. quick: one epoch on few images, a first impression.
    Ranks wait for each other, so the world's timeout must be longer than the longest run, which is Muon's.
    """
    found = {}
    for name in names:
        if absent := image_datasets.missing(name):
            found[name] = {"missing": absent}
            continue
        data = image_datasets.load(name)
        if quick:
            few = Images(*(part[:count] for part, count in zip(data, (1200, 1200, 500, 500), strict=True)))
            found[name] = study_of(world, few, seeds[:2], 400, TUNING_SEEDS[:1], farthest=1, epochs=1)
        else:
            found[name] = study_of(world, data, seeds)
    return found


def study_of(
    world: World,
    data: Images,
    seeds: Sequence[int],
    held_out: int = HELD_OUT,
    tuning_seeds: Sequence[int] = TUNING_SEEDS,
    farthest: int = FARTHEST,
    epochs: int = EPOCHS,
) -> dict[str, Any]:
    """Tune, then race; return plain data. Collective.

    held_out: the last training images, which tuning is judged on. farthest: how often tuning goes on beyond the first
    three rates, at most. as_written, tuned: optimizer -> runs, by seed. tuning: optimizer -> the learning rates tried,
    rising, and their median held-out losses. compute_dtype: of Newton–Schulz. flops: see `step_flops`.
    """

    def all_of(stage: str, data: Images, jobs: Sequence[Job]) -> Runs:
        def do(job: Job) -> dict[str, Any]:
            optimizer, lr, seed = job
            world.say(f"{stage}, one of {len(jobs)} runs: {OPTIMIZERS[optimizer].title}, lr {lr:g}, seed {seed}")
            return run(optimizer, seed, data, lr, epochs, world.device)

        return dict(zip(jobs, shared_out(world, jobs, do), strict=True))

    def losses(jobs: Sequence[Job]) -> list[float]:
        return [run["test_loss"][-1] for run in all_of("tuning", without_test(data, held_out), jobs).values()]

    first = {name: [one.lr / 2, one.lr, 2 * one.lr] for name, one in OPTIMIZERS.items()}
    curves = try_rates(first, losses, tuning_seeds, farthest)
    lrs = {
        "as_written": {name: one.lr for name, one in OPTIMIZERS.items()},
        "tuned": {name: best_of(curve) for name, curve in curves.items()},
    }
    jobs = dict.fromkeys((o, lr, seed) for of in lrs.values() for o, lr in of.items() for seed in seeds)
    runs = all_of("race", data, list(jobs))  # what is tuned already is run once
    races = {race: {o: [runs[o, lr, seed] for seed in seeds] for o, lr in of.items()} for race, of in lrs.items()}
    tuning = {o: {"lrs": list(curve), "medians": list(curve.values())} for o, curve in curves.items()}
    dtype = str(fast_dtype(torch.device(world.device), torch.float32)).removeprefix("torch.")
    sizes = {"batch": BATCH, "epochs": epochs, "images": len(data.train_labels), "held_out": held_out}
    return sizes | {"compute_dtype": dtype, "flops": step_flops(), "tuning": tuning} | races


def without_test(data: Images, held_out: int) -> Images:
    """Return the training images alone: the last `held_out` of them in the place of the test images."""
    images, labels = data.train_images, data.train_labels
    return Images(images[:-held_out], labels[:-held_out], images[-held_out:], labels[-held_out:])


# ---- In a few numbers -------------------------------------------------------------------------------------


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return every optimizer's medians, and how Muon compares with AdamW. found: as `study_of` returns it."""
    short: dict[str, Any] = {"flops_over_network": found["flops"]["muon"] / found["flops"]["network"]}
    for race in ("as_written", "tuned"):
        ends = {name: _ends(runs) for name, runs in found[race].items()}
        middle = {name: {what: median(values) for what, values in by.items()} for name, by in ends.items()}
        muon, adamw = ends["muon"], ends["adamw"]
        short[race] = {
            "median": middle,
            "muon_over_adamw": {"training_loss": middle["muon"]["training_loss"] / middle["adamw"]["training_loss"]},
            "muon_against_adamw": {what: verdict(muon[what], adamw[what]).as_data() for what in muon},
        }
    return short


def _ends(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return what every run ended with, the smaller the better."""
    losses = {name: [run[name][-1] for run in runs] for name in ("training_loss", "test_loss")}
    return losses | {"test_error": [1 - run["test_accuracy"][-1] for run in runs]}


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return, of every data set, the medians as written and tuned, and on how many seeds Muon beats AdamW."""
    table = []
    for name, found in data.items():
        if "missing" in found:
            table.append(found["missing"])
            continue
        table.append(f"{image_datasets.SOURCES[name].title}, medians; on MNIST the tutorial has {REPORTED}")
        for race, medians in summary(found).items():
            if race == "flops_over_network":
                table.append(f"  Muon's update takes {medians:.1f} times the operations of the network")
                continue
            for what, judged in medians["muon_against_adamw"].items():
                cells = ", ".join(f"{OPTIMIZERS[one].title} {by[what]:.3f}" for one, by in medians["median"].items())
                wins = f"Muon beats AdamW on {judged['wins']} of {judged['seeds']} seeds"
                table.append(f"  {race.replace('_', ' ')}, {what.replace('_', ' ')}: {cells}; {wins}")
    return table
