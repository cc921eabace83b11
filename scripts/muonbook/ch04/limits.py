"""What is possible on the language: the loss of the best predictor, which is the floor, and of models that only count.

An n-gram model predicts a letter from the n - 1 letters before it. After a context h that was read c(h) times and
followed by t(h) different letters, it gives letter w the probability

    p(w | h) = (c(hw) + t(h) p(w | h')) / (c(h) + t(h)),    h' being h without its oldest letter,

and p(w | h') where h was never read (Witten and Bell 1991). Below the empty context all letters are equally likely. It
reads the windows of the network once, and a network whose loss is above the 3-gram's has not learned a word.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from distmuon.models.language import ALPHABET, Language

ORDERS = (2, 3, 5, 6)
LETTERS = len(ALPHABET)


def best_losses(language: Language, windows: Tensor) -> Tensor:  # [windows, length - 1]
    """Return the loss of the best predictor that sees a window alone, letter by letter.

    windows: [windows, length] int64, cut anywhere from a text. The first letter is given, not predicted. The predictor
    is Bayes' rule: it knows the language, and keeps the probability of every state, which is a word and a place in it.
    """
    lengths = torch.tensor([len(word) + 1 for word in language.words])
    letter = torch.tensor([ALPHABET.index(c) for word in language.words for c in word + " "])  # of each state
    last = lengths.cumsum(0) - 1  # state of each word
    first = last - lengths + 1
    per_letter = language.start.repeat_interleave(lengths)
    belief = (per_letter / per_letter.sum()).expand(len(windows), -1)  # a window begins anywhere in the text
    losses = []
    for place in range(windows.shape[1]):
        said = belief * (letter == windows[:, place, None])
        chance = said.sum(1, keepdim=True)
        losses.append(-chance.log().squeeze(1))
        known = said / chance
        belief = known.roll(1, dims=1)
        belief[:, first] = known[:, last] @ language.follows
    return torch.stack(losses[1:], dim=1)


# ---- Models that count ------------------------------------------------------------------------------------


def ngram_losses(training: Tensor, held_out: Tensor) -> dict[int, float]:
    """Return order -> mean loss in nats per letter on the held-out windows, after reading the training windows.

    Both: [windows, length] int64, as in `best_losses`.
    """
    read, asked = (windows.cpu().numpy() for windows in (training, held_out))
    chances = np.full(asked[:, 1:].shape, 1 / LETTERS)
    found = {}
    for order in range(1, max(ORDERS) + 1):
        chances = _smoothed(read, asked, order, chances)
        if order in ORDERS:
            found[order] = float(-np.log(chances).mean())
    return found


def _smoothed(read: np.ndarray, asked: np.ndarray, order: int, shorter: np.ndarray) -> np.ndarray:
    """Return p(w | h) of every predicted letter [n, length] from `shorter`, that of contexts one letter shorter.

    Where a window has too few letters for the context, `shorter` is all there is.
    """
    first = max(order - 1, 1)  # the first place that is predicted from a whole context
    pairs, counts = np.unique(_codes(read, order)[:, first - order + 1 :], return_counts=True)
    contexts, followers = np.unique(pairs // LETTERS, return_counts=True)  # pairs are sorted, so contexts are too
    total = np.bincount(np.searchsorted(contexts, pairs // LETTERS), weights=counts)

    wanted = _codes(asked, order)[:, first - order + 1 :]
    seen = _at(contexts, wanted // LETTERS, total)
    kinds = _at(contexts, wanted // LETTERS, followers)
    together = _at(pairs, wanted, counts)
    chances = shorter.copy()
    rest = chances[:, first - 1 :]
    known = seen > 0
    rest[known] = ((together + kinds * rest) / np.maximum(seen + kinds, 1))[known]
    return chances


def _codes(windows: np.ndarray, order: int) -> np.ndarray:
    """Return a number [n, places] for every `order` letters one after the other: the context's, then the letter's."""
    places = windows.shape[1] - order + 1
    return sum(windows[:, k : k + places] * LETTERS ** (order - 1 - k) for k in range(order))


def _at(known: np.ndarray, wanted: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the value of each wanted number, 0 where it is not among the known ones, which are sorted."""
    places = np.searchsorted(known, wanted).clip(max=len(known) - 1)
    return np.where(known[places] == wanted, values[places], 0)
