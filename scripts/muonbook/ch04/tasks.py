"""What is learned: handwritten digits, other people's images, and a language with a known limit.

A task says how to make a model and where its batches come from; who trains it, and how, is for `training`.
One seed decides the initial weights, the order of the batches, on digits which images are held out, and of the language
everything: its words, which follows which, and both texts. So two optimizers under one seed differ in nothing but
themselves, and their results may be compared in pairs. Images that are fetched have one test set for all seeds; tuning
never sees it (`LearningTask.for_tuning`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distmuon.models import digits, networks
from distmuon.models.language import ALPHABET, Language
from distmuon.sharding.grid import Grid
from muonbook.ch04 import image_datasets
from muonbook.ch04.limits import best_losses

HELD_OUT_WINDOWS, HELD_OUT_IMAGES = 256, 10_000


@dataclass(frozen=True)
class Examples:
    """Inputs [n, ...] and targets [n] or [n, length] int64."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def rows(self, rows: Tensor | slice) -> Examples:
        return Examples(self.inputs[rows], self.targets[rows])

    def to(self, device: str) -> Examples:
        return Examples(self.inputs.to(device), self.targets.to(device))

    def whole(self) -> Tensor:
        """Return the windows [n, length + 1] that inputs and targets, one letter further, were cut from."""
        return torch.cat([self.inputs[:, :1], self.targets], dim=1)


@dataclass(frozen=True)
class LearningTask:
    """One thing to learn.

    model: () -> model whose logits are [..., classes]. examples: seed -> (training, held-out) examples in
    `dtype`. batch, steps: of one run. floor: seed -> the loss that no predictor can undercut on the held-out examples,
    in nats, where it is known. augment: changes the inputs of a training batch, drawing from torch's generator. tuning:
    where all seeds share one test set, hold out training images in its place.
    """

    name: str
    model: Callable[[], nn.Module]
    examples: Callable[[LearningTask, int], tuple[Examples, Examples]]
    batch: int
    steps: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    floor: Callable[[int], float] | None = None
    augment: Callable[[Tensor], Tensor] | None = None
    tuning: bool = False

    def weights(self, seed: int) -> dict[str, Tensor]:
        """Return the whole initial weights of this seed, in the task's dtype."""
        return {n: w.to(self.dtype) for n, w in networks.initial_weights(self.model(), seed).items()}

    def fresh_model(self, seed: int) -> nn.Module:
        """Return a whole model with these weights."""
        model = self.model().to(self.device, self.dtype)
        model.load_state_dict(self.weights(seed))
        return model

    def shorter(self, steps: int) -> LearningTask:
        return replace(self, steps=steps)

    def for_tuning(self) -> LearningTask:
        return replace(self, tuning=True)

    def with_dtype(self, dtype: str) -> LearningTask:
        """Return the task in "float32" or "float64"."""
        return replace(self, dtype=getattr(torch, dtype))


def loss_of(model: nn.Module, examples: Examples) -> Tensor:
    """Return the mean cross-entropy in nats per prediction."""
    logits = model(examples.inputs)
    return F.cross_entropy(logits.flatten(0, -2), examples.targets.flatten())


@torch.no_grad()
def evaluated(
    model: nn.Module, examples: Examples, prepare: Callable[[Tensor], Tensor] = lambda inputs: inputs
) -> tuple[float, float]:
    """Return the mean cross-entropy in nats, and the share of predictions whose likeliest class is the right one.

    Without dropout, in which mode the model stays, and a thousand rows at a time: the test images of CIFAR-10 would
    fill gigabytes. prepare: what the model takes of as many inputs, on its device.
    """
    loss = right = 0.0
    model.eval()
    for inputs, targets in zip(examples.inputs.split(1000), examples.targets.split(1000), strict=True):
        logits = model(prepare(inputs)).flatten(0, -2)
        wanted = targets.flatten().to(logits.device)
        loss += F.cross_entropy(logits, wanted, reduction="sum").item()
        right += (logits.argmax(-1) == wanted).sum().item()
    return loss / examples.targets.numel(), right / examples.targets.numel()


# ---- Digits -----------------------------------------------------------------------------------------------


_split_digits = functools.lru_cache(maxsize=32)(functools.partial(digits.digits, Grid.alone()))


def _digits(task: LearningTask, seed: int) -> tuple[Examples, Examples]:
    training, held_out = (Examples(split.images.to(task.dtype), split.labels) for split in _split_digits(seed))
    return training, held_out


# ---- Images that have to be fetched -----------------------------------------------------------------------


class Convolution(nn.Module):
    """A convolution of 3 x 3 whose weight is held as the matrix [outputs, 9 inputs] that Muon takes it for.

    [rows, inputs, height, width] -> [rows, outputs, height, width]
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, 9 * inputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.view(len(self.weight), -1, 3, 3), self.bias, padding=1)


class CNN(nn.Module):
    """A small network for CIFAR-10: [rows, 3, 32, 32] -> [rows, 10]. Not cut over TP.

    Three convolutions, each with ReLU and 2 x 2 max pooling, then two linear layers with dropout between: the sizes of
    JenWei0312/Muon_Tutorial.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(Convolution(*sizes) for sizes in ((3, 32), (32, 64), (64, 128)))
        self.hidden = nn.Linear(128 * 4 * 4, 512)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = F.max_pool2d(F.relu(convolution(x)), 2)
        return self.head(self.dropout(F.relu(self.hidden(x.flatten(1)))))


@functools.lru_cache(maxsize=1)
def _images(name: str, dtype: torch.dtype) -> tuple[Examples, Examples]:
    """Return (training, test) images as MNIST-like networks take them, scaled to mean 0 and variance 1."""
    found = image_datasets.load(name)
    scaled = found.train_images.to(dtype)
    dims = (0, 2, 3)  # one mean and deviation per colour, of the training images
    mean, std = scaled.mean(dims, keepdim=True), scaled.std(dims, keepdim=True)
    sets = ((found.train_images, found.train_labels), (found.test_images, found.test_labels))
    training, test = (Examples((images.to(dtype) - mean) / std, labels) for images, labels in sets)
    return training, test


def _colour_images(task: LearningTask, seed: int) -> tuple[Examples, Examples]:
    training, test = _images(task.name, task.dtype)
    if not task.tuning:
        return training, test
    first = len(training) - HELD_OUT_IMAGES
    return training.rows(slice(first)), training.rows(slice(first, None))


def _flat_images(task: LearningTask, seed: int) -> tuple[Examples, Examples]:
    training, test = _colour_images(task, seed)
    return Examples(training.inputs.flatten(1), training.targets), Examples(test.inputs.flatten(1), test.targets)


def shifted_and_flipped(images: Tensor) -> Tensor:
    """Return images [n, channels, 32, 32], each moved by up to 4 pixels and mirrored by a coin's toss."""
    padded = F.pad(images, (4, 4, 4, 4))
    moves, mirrored = torch.randint(9, (len(images), 2)).tolist(), (torch.rand(len(images)) < 0.5).to(images.device)
    cut = torch.stack([image[:, y : y + 32, x : x + 32] for image, (y, x) in zip(padded, moves, strict=True)])
    return torch.where(mirrored.view(-1, 1, 1, 1), cut.flip(-1), cut)


# ---- The language -----------------------------------------------------------------------------------------

CONTEXT = 64  # letters


@functools.lru_cache(maxsize=16)
def _language(seed: int) -> Language:
    return Language.of(seed)


@functools.lru_cache(maxsize=16)
def windows(count: int, seed: int, held_out: bool) -> Tensor:
    """Return windows [count, CONTEXT + 1], cut from one text one after the other."""
    generator = torch.Generator().manual_seed(2 * seed + held_out)
    return _language(seed).write(count * (CONTEXT + 1), generator).view(count, CONTEXT + 1)


def held_out_windows(seed: int) -> Tensor:
    return windows(HELD_OUT_WINDOWS, seed, held_out=True)


def _speech(task: LearningTask, seed: int) -> tuple[Examples, Examples]:
    """Every window is read once: a run of this many steps never sees the same text again."""
    sets = (windows(task.batch * task.steps, seed, held_out=False), held_out_windows(seed))
    training, held_out = (Examples(whole[:, :-1], whole[:, 1:]) for whole in sets)
    return training, held_out


@functools.cache
def language_floor(seed: int) -> float:
    """Return what the best predictor loses on the held-out windows of this seed, in nats per letter."""
    return float(best_losses(_language(seed), held_out_windows(seed)).mean())


def _transformer() -> nn.Module:
    return networks.Transformer(len(ALPHABET), width=64, layers=2, heads=4, context=CONTEXT)


# ---- All of them ------------------------------------------------------------------------------------------

TASKS: dict[str, LearningTask] = {
    "digits": LearningTask("digits", lambda: networks.MLP((64, 256, 128, 10)), _digits, batch=128, steps=110),
    "language": LearningTask("language", _transformer, _speech, batch=16, steps=300, floor=language_floor),
    **{
        name: LearningTask(name, lambda: networks.MLP((784, 256, 128, 10)), _flat_images, batch=128, steps=468)
        for name in ("fashion", "mnist")
    },
    "cifar10": LearningTask("cifar10", CNN, _colour_images, 128, 1950, augment=shifted_and_flipped),
}
