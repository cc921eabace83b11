"""A public tutorial's recipes, run again: as written over several seeds, and with every learning rate tuned.

The recipes and their source are in `recipes`.

A study takes, for each data set: first, the tuning of all learning rates, on training images held out for it and
on seeds of its own. The grid doubles, and goes on beyond either end while the best is there. Tuning runs are as long as
the others, for with a constant learning rate a shorter run asks for a greater one. Second, the race: the recipe as
written, and every optimizer at the learning rate found, all under the same seeds, on all training images, judged on
the test images. Only learning rates are tuned. Fashion-MNIST, which has MNIST's size and format, follows MNIST's
recipe; the tutorial's own numbers then stand for other images.

Cost: on images of 28 x 28, Muon's products take 20 times the operations of the network's own forward and backward on 64
images (`step_flops`), so Muon's runs are nearly all of a study: about 12 minutes on two quiet cores that multiply bf16.
CIFAR-10 takes hours there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from distmuon.launch import UsageError, World
from distmuon.optim.fast_paths import fast_dtype
from muonbook.ch04 import image_datasets
from muonbook.ch04.image_datasets import Images
from muonbook.ch04.recipes import RECIPES, TutorialRecipe, default_weights_, step_flops
from muonbook.ch04.sweep import Curve, best_of, shared_out, span, try_rates, verdict
from muonbook.ch04.tasks import Examples, evaluated

RECIPE_OF = {"mnist": "mnist", "fashion": "mnist", "cifar10": "cifar10"}  # data set -> recipe
TUNING_SEEDS, HELD_OUT = (1000, 1001), 5000
FARTHEST = 8  # learning rates beyond the first three, at most
QUICK, QUICK_HELD_OUT = (1200, 500), 400  # training and test images; of the training images

# ---- One run ----------------------------------------------------------------------------------------------


def run(
    recipe: TutorialRecipe,
    optimizer: str,
    seed: int,
    data: Images,
    lr: float | None = None,
    epochs: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train once. Return optimizer, seed, lr, steps, and for each epoch training_loss, test_loss and test_accuracy.

    The seed decides initial weights, order of the images, dropout and shifts: all alike for all optimizers.
    training_loss is the mean over an epoch's steps, each before its update; the test is taken after the epoch. A run
    that diverges has infinite losses and accuracy 0 from that epoch on. lr, epochs: by default the recipe's.
    Raises UsageError, before anything is trained, for an unknown optimizer, impossible numbers or other images.
    """
    if optimizer not in recipe.optimizers:
        raise UsageError(f"no optimizer here is called {optimizer}; choose one of {', '.join(recipe.optimizers)}.")
    chosen = recipe.optimizers[optimizer]
    lr, epochs = chosen.lr if lr is None else lr, recipe.epochs if epochs is None else epochs
    if not 0 < lr < math.inf or epochs < 1:
        raise UsageError(f"lr {lr:g}, epochs {epochs}: lr must be a positive number, epochs at least 1.")
    if tuple(data.train_images.shape[1:]) != recipe.shape:
        raise UsageError(f"this recipe takes images of {recipe.shape}, not {tuple(data.train_images.shape[1:])}.")

    model = recipe.model()
    torch.manual_seed(seed)  # here, so that the weights are those of torch's own layers under this seed
    model = default_weights_(model).to(device)
    optimizers = chosen.build(model, lr)
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    looks = []
    for epoch in range(epochs):
        for group, full in groups:
            group["lr"] = full * recipe.share_of_lr(epoch, epochs)
        training = _epoch(recipe, model, optimizers, data, torch.Generator().manual_seed(seed + 1 + epoch), device)
        looks.append((training, *evaluate(recipe, model, data, device)))
        if not math.isfinite(training + looks[-1][1]):  # nothing comes back from there
            looks[-1:] = [(math.inf, math.inf, 0.0)] * (epochs - epoch)
            break
    steps = epochs * math.ceil(len(data.train_labels) / recipe.batch)
    found = dict(zip(("training_loss", "test_loss", "test_accuracy"), map(list, zip(*looks, strict=True)), strict=True))
    return {"optimizer": optimizer, "seed": seed, "lr": lr, "steps": steps} | found


def _epoch(
    recipe: TutorialRecipe,
    model: nn.Module,
    optimizers: list[Optimizer],
    data: Images,
    order: torch.Generator,
    device: str,
) -> float:
    """Take an epoch's steps; return the mean of their losses, infinite as soon as one is not finite."""
    model.train()
    losses = []
    for images, labels in _batches(recipe, data, order, device):
        loss = F.cross_entropy(model(images), labels)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return math.inf
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return sum(losses) / len(losses)


def _batches(
    recipe: TutorialRecipe, data: Images, order: torch.Generator, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all training images once, shuffled; the last batch may be short."""
    for rows in torch.randperm(len(data.train_labels), generator=order).split(recipe.batch):
        images = data.train_images[rows]
        images = images if recipe.augment is None else recipe.augment(images)
        yield recipe.inputs(images.to(device)), data.train_labels[rows].to(device)


def evaluate(recipe: TutorialRecipe, model: nn.Module, data: Images, device: str = "cpu") -> tuple[float, float]:
    """Return (mean loss, accuracy) on the test images."""
    test = Examples(data.test_images, data.test_labels)
    return evaluated(model, test, lambda images: recipe.inputs(images.to(device)))


# ---- All runs ---------------------------------------------------------------------------------------------

Job = tuple[str, float, int]  # optimizer, learning rate, seed
Runs = dict[Job, dict[str, Any]]


def study(world: World, names: Sequence[str], seeds: Sequence[int], quick: bool) -> dict[str, Any]:
    """Return for each data set what `study_of` finds, or {"missing": sentence} where it is not here. Collective.

    names: of data sets, keys of RECIPE_OF. seeds: of the race. quick: one epoch on few images, a first impression.
    Ranks wait for each other, so the world's timeout must be longer than the longest run, which is Muon's.
    """
    for name in names:
        if name not in RECIPE_OF:
            raise UsageError(f"no recipe for {name}; choose from {', '.join(RECIPE_OF)}.")
    found = {}
    for name in names:
        absent = image_datasets.missing(name)
        if absent:
            found[name] = {"missing": absent}
            continue
        recipe, data = RECIPES[RECIPE_OF[name]], image_datasets.load(name)
        if quick:
            recipe, data = replace(recipe, epochs=1), fewer(data, *QUICK)
            of = study_of(world, name, recipe, data, seeds[:2], QUICK_HELD_OUT, TUNING_SEEDS[:1], farthest=1)
        else:
            of = study_of(world, name, recipe, data, seeds)
        found[name] = {"recipe": RECIPE_OF[name]} | of
    return found


def study_of(
    world: World,
    name: str,
    recipe: TutorialRecipe,
    data: Images,
    seeds: Sequence[int],
    held_out: int = HELD_OUT,
    tuning_seeds: Sequence[int] = TUNING_SEEDS,
    farthest: int = FARTHEST,
) -> dict[str, Any]:
    """Tune, then race; return plain data. Collective.

    held_out: the last training images, which tuning is judged on. farthest: see `tune`.
    as_written, tuned: optimizer -> runs, by seed. tuning: optimizer -> the learning rates tried, rising, each with its
    held-out losses. compute_dtype: of Newton–Schulz. flops: see `step_flops`.
    """

    def all_of(stage: str, data: Images) -> Callable[[Sequence[Job]], Runs]:
        def run_all(jobs: Sequence[Job]) -> Runs:
            def do(numbered: tuple[int, Job]) -> dict[str, Any]:
                number, (optimizer, lr, seed) = numbered
                title = recipe.optimizers[optimizer].title
                world.say(f"{name}, {stage}, run {number} of {len(jobs)}: {title}, lr {lr:g}, seed {seed}")
                return run(recipe, optimizer, seed, data, lr, device=world.device)

            return dict(zip(jobs, shared_out(world, list(enumerate(jobs, 1)), do), strict=True))

        return run_all

    tried, curves = tune(recipe, all_of("tuning", for_tuning(data, held_out)), tuning_seeds, farthest)
    best = {optimizer: best_of(curve) for optimizer, curve in curves.items()}
    lrs = {"as_written": {o: c.lr for o, c in recipe.optimizers.items() if c.written}, "tuned": best}
    chosen = [(o, lr[o]) for o in recipe.optimizers for lr in lrs.values() if o in lr]
    jobs = dict.fromkeys((o, lr, seed) for o, lr in chosen for seed in seeds)  # what is tuned already is run once
    runs = all_of("race", data)(list(jobs))
    races = {race: {o: [runs[o, lr, seed] for seed in seeds] for o, lr in of.items()} for race, of in lrs.items()}
    tuning = {o: [{"lr": lr, "held_out": losses[lr]} for lr in sorted(losses)] for o, losses in tried.items()}
    dtype = str(fast_dtype(torch.device(world.device), torch.float32)).removeprefix("torch.")
    sizes = {"batch": recipe.batch, "epochs": recipe.epochs, "images": len(data.train_labels), "held_out": held_out}
    return sizes | {"compute_dtype": dtype, "flops": step_flops(recipe), "tuning": tuning} | races


def tune(
    recipe: TutorialRecipe,
    run_all: Callable[[Sequence[Job]], Runs],
    seeds: Sequence[int] = TUNING_SEEDS,
    farthest: int = FARTHEST,
) -> tuple[dict[str, dict[float, list[float]]], dict[str, Curve]]:
    """Tune every learning rate: three rates first, then beyond either end. farthest: how often, at most.

    Return optimizer -> learning rate -> held-out losses, by seed; and the same with their medians, rates rising.
    """
    tried: dict[str, dict[float, list[float]]] = {optimizer: {} for optimizer in recipe.optimizers}

    def losses(points: Sequence[tuple[str, float]]) -> list[float]:
        found = run_all([(optimizer, lr, seed) for optimizer, lr in points for seed in seeds])
        for optimizer, lr in points:
            tried[optimizer][lr] = [found[optimizer, lr, seed]["test_loss"][-1] for seed in seeds]
        return [statistics.median(tried[optimizer][lr]) for optimizer, lr in points]

    first = {name: [optimizer.lr / 2, optimizer.lr, 2 * optimizer.lr] for name, optimizer in recipe.optimizers.items()}
    return tried, try_rates(first, losses, farthest)


def for_tuning(data: Images, held_out: int) -> Images:
    """Return the training images alone: the last `held_out` of them in the place of the test images."""
    if not 0 < held_out < len(data.train_labels):
        raise UsageError(f"{held_out} of {len(data.train_labels)} training images cannot be held out.")
    images, labels = data.train_images, data.train_labels
    return Images(images[:-held_out], labels[:-held_out], images[-held_out:], labels[-held_out:])


def fewer(data: Images, training: int, test: int) -> Images:
    """Return the first images of each kind."""
    return Images(
        data.train_images[:training], data.train_labels[:training], data.test_images[:test], data.test_labels[:test]
    )


# ---- What is printed --------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {  # the smaller the better
    "training loss": lambda run: run["training_loss"][-1],
    "test loss": lambda run: run["test_loss"][-1],
    "test error": lambda run: 1 - run["test_accuracy"][-1],
}


def lines(data: dict[str, Any]) -> list[str]:
    """Return, of every data set, the medians as written and tuned, and on how many seeds Muon beats AdamW."""
    told = []
    for name, found in data.items():
        if "missing" in found:
            told += image_datasets.not_run_lines(name)
            continue
        recipe = RECIPES[found["recipe"]]
        seeds = len(found["as_written"]["muon"])
        told.append(f"{image_datasets.SOURCES[name].title}: medians of {seeds} seeds [least, greatest]")
        for race in ("as_written", "tuned"):
            told.append(f"  {race.replace('_', ' '):14}{'lr':>7}" + "".join(f"  {measure:24}" for measure in MEASURES))
            for optimizer, runs in found[race].items():
                cells = "".join(f"  {span([of(run) for run in runs]):24}" for of in MEASURES.values())
                told.append(f"  {recipe.optimizers[optimizer].title:14}{runs[0]['lr']:7g}{cells}".rstrip())
            for measure, of in MEASURES.items():
                muon, adamw = ([of(run) for run in found[race][one]] for one in ("muon", "adamw"))
                judged = verdict(muon, adamw)
                claimed = "claimed" if judged.claimed else "no difference claimed"
                told.append(
                    f"    {measure}: Muon's is smaller than AdamW's on {judged.wins} of {seeds} seeds; {claimed}"
                )
        for optimizer, reported in recipe.reported.items():
            told.append(f"  the tutorial reports of {optimizer}: training loss {reported.training_loss:.4f}, one run")
        update = found["flops"]["muon"] / found["flops"]["network"]
        told.append(f"  Muon's update takes {update:.1f} times the operations of the network's forward and backward")
    return told
