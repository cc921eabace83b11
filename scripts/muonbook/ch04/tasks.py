"""What is learned: handwritten digits, images of clothes, and a language with a known limit.

A task says how to make a model and where its batches come from; who trains it, and how, is for `training`.
One seed decides the initial weights, the order of the batches, on digits which images are held out, and of the language
everything: its words, which follows which, and both texts. So two optimizers under one seed differ in nothing but
themselves, and their results may be compared in pairs. Images that are fetched have one test set for all seeds; tuning
never sees it (`LearningTask.tuning`).
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distmuon.models import digits, networks
from distmuon.models.language import ALPHABET, Language
from distmuon.sharding.grid import Grid
from muonbook.ch04 import image_datasets

CONTEXT = 64  # letters
HELD_OUT_WINDOWS, HELD_OUT_IMAGES = 256, 10_000
ORDERS = (2, 3, 5, 6)  # of the models that count letters
Letters = tuple[int, ...]
Examples = tuple[Tensor, Tensor]  # inputs [n, ...], and targets [n] or [n, length] int64


@dataclass(frozen=True)
class LearningTask:
    """One thing to learn.

    model: () -> model whose logits are [..., classes]. examples: seed -> (training, held-out) examples in `dtype`.
    batch, steps: of one run. floor: seed -> the loss that no predictor can undercut on the held-out examples, in nats,
    where it is known. tuning: where all seeds share one test set, hold out training images in its place.
    """

    name: str
    model: Callable[[], nn.Module]
    examples: Callable[[LearningTask, int], tuple[Examples, Examples]]
    batch: int
    steps: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    floor: Callable[[int], float] | None = None
    tuning: bool = False

    def fresh_model(self, seed: int) -> nn.Module:
        """Return a whole model with the initial weights of this seed, in the task's dtype."""
        model = self.model().to(self.device, self.dtype)
        model.load_state_dict(networks.initial_weights(model, seed))
        return model


def loss_of(model: nn.Module, examples: Sequence[Tensor]) -> Tensor:
    """Return the mean cross-entropy in nats per prediction."""
    inputs, targets = examples
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


# ---- Images -----------------------------------------------------------------------------------------------

_split_digits = functools.lru_cache(maxsize=32)(functools.partial(digits.digits, Grid.alone()))


def _digits(task: LearningTask, seed: int) -> tuple[Examples, Examples]:
    training, held_out = ((split.images.to(task.dtype), split.labels) for split in _split_digits(seed))
    return training, held_out


@functools.lru_cache(maxsize=1)
def _images(name: str, dtype: torch.dtype) -> tuple[Examples, Examples]:
    """Return (training, test) images, scaled so that the training pixels have mean 0 and variance 1."""
    found = image_datasets.load(name)
    scaled = found.train_images.to(dtype)
    mean, std = scaled.mean(), scaled.std()
    test = ((found.test_images.to(dtype) - mean) / std, found.test_labels)
    return ((scaled - mean) / std, found.train_labels), test


def _fetched(task: LearningTask, seed: int) -> tuple[Examples, Examples]:
    training, test = _images(task.name, task.dtype)
    if not task.tuning:
        return training, test
    images, labels = (part.tensor_split([len(part) - HELD_OUT_IMAGES]) for part in training)
    return (images[0], labels[0]), (images[1], labels[1])


# ---- The language -----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def windows(count: int, seed: int, held_out: bool) -> Tensor:
    """Return windows [count, CONTEXT + 1], cut from one text one after the other."""
    generator = torch.Generator().manual_seed(2 * seed + held_out)
    return Language.of(seed).write(count * (CONTEXT + 1), generator).view(count, CONTEXT + 1)


def both_windows(task: LearningTask, seed: int) -> tuple[Tensor, Tensor]:
    """Return the (training, held-out) windows. Each is read once, so no run sees the same text again."""
    return windows(task.batch * task.steps, seed, held_out=False), windows(HELD_OUT_WINDOWS, seed, held_out=True)


def _speech(task: LearningTask, seed: int) -> tuple[Examples, Examples]:
    training, held_out = ((whole[:, :-1], whole[:, 1:]) for whole in both_windows(task, seed))
    return training, held_out


@functools.cache
def language_floor(seed: int) -> float:
    """Return what the best predictor loses on the held-out windows of this seed, in nats per letter."""
    return float(best_losses(Language.of(seed), windows(HELD_OUT_WINDOWS, seed, held_out=True)).mean())


def best_losses(language: Language, windows: Tensor) -> Tensor:  # [n, L] -> [n, L - 1]
    """Return what the best predictor pays for every letter of a window but the given first one.

    windows: cut anywhere from a text. The predictor knows the language, sees nothing outside of
    the window, and keeps a probability for every state, which is a word and a place in it.
    """
    spelled = [word + " " for word in language.words]
    letter = torch.tensor([ALPHABET.index(c) for word in spelled for c in word])  # [S]
    length = torch.tensor([len(word) for word in spelled])  # [W]
    last = length.cumsum(0) - 1  # [W]: the state in which each word ends
    first = last - length + 1  # [W]: the state in which each word begins
    belief = language.start.repeat_interleave(length)  # [S]: frequent words fill more of the text
    belief = (belief / belief.sum()).expand(len(windows), -1)  # [n, S]
    losses = []
    for seen in windows.T:  # [n]: the next letter of every window
        fits = belief * (letter == seen[:, None])  # [n, S]: the states that write this letter
        chance = fits.sum(1, keepdim=True)  # [n, 1]: the probability that it got
        losses.append(-chance.log().squeeze(1))
        now = fits / chance  # [n, S]: Bayes' rule
        belief = now.roll(1, dims=1)  # one letter further in the same word,
        belief[:, first] = now[:, last] @ language.follows  # or at the start of the next one
    return torch.stack(losses[1:], dim=1)


def ngram_losses(training: Tensor, held_out: Tensor) -> dict[int, float]:
    """Return order -> mean loss on the held-out windows, in nats per letter, of a model that only counts letters.

    It reads the training windows [n, L] once. After a context h that came c(h) times, followed by t(h) different
    letters, it gives letter w the probability (c(hw) + t(h) p(w | h')) / (c(h) + t(h)), with h' = h without its oldest
    letter, and p(w | h') where h never came (Witten and Bell 1991). Below the empty context all letters are alike.
    """
    followers: defaultdict[Letters, Counter[int]] = defaultdict(Counter)  # context -> how often each letter came
    for window in map(tuple, training.tolist()):
        for k in range(1, len(window)):
            for before in range(min(k + 1, max(ORDERS))):
                followers[window[k - before : k]][window[k]] += 1

    @functools.cache  # a text says the same again and again
    def chance(context: Letters, letter: int) -> float:
        shorter = chance(context[1:], letter) if context else 1 / len(ALPHABET)
        if context not in followers:
            return shorter
        found = followers[context]
        return (found[letter] + len(found) * shorter) / (found.total() + len(found))

    asked = [(window, k) for window in map(tuple, held_out.tolist()) for k in range(1, len(window))]
    return {
        order: -sum(math.log(chance(w[max(0, k - order + 1) : k], w[k])) for w, k in asked) / len(asked)
        for order in ORDERS
    }


def _transformer() -> nn.Module:
    return networks.Transformer(len(ALPHABET), width=64, layers=2, heads=4, context=CONTEXT)


# ---- All of them ------------------------------------------------------------------------------------------

TASKS: dict[str, LearningTask] = {
    "digits": LearningTask("digits", lambda: networks.MLP((64, 256, 128, 10)), _digits, batch=128, steps=110),
    "language": LearningTask("language", _transformer, _speech, batch=16, steps=300, floor=language_floor),
    **{
        name: LearningTask(name, lambda: networks.MLP((784, 256, 128, 10)), _fetched, batch=128, steps=468)
        for name in image_datasets.SOURCES
    },
}
