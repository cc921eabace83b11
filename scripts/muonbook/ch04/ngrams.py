"""Models that only count: how often which letter followed the last few, smoothed after Witten and Bell (1991).

An n-gram model predicts a letter from the n - 1 before it. After a context h that was read c(h) times and followed by
t(h) different letters, it gives letter w

    p(w | h) = (c(hw) + t(h) p(w | h')) / (c(h) + t(h)),    h' being h without its oldest letter,

and p(w | h') where h was never read; below the empty context all letters are equally likely. Trained in one pass over
the windows that a network reads, it is the yardstick of a loss: who is above the 3-gram has not learned a word.
"""

from __future__ import annotations

import numpy as np
import torch

from distmuon.models.language import ALPHABET
from muonbook.ch04.tasks import Examples

ORDERS = (2, 3, 5, 6)
LETTERS = len(ALPHABET)


def losses(training: Examples, held_out: Examples) -> dict[int, float]:
    """Return order -> mean loss in nats per letter on the held-out windows, after reading the training windows."""
    read, asked = (_letters(examples) for examples in (training, held_out))
    chances = np.full(asked[:, 1:].shape, 1 / LETTERS)
    found = {}
    for order in range(1, max(ORDERS) + 1):
        chances = _smoothed(read, asked, order, chances)
        if order in ORDERS:
            found[order] = float(-np.log(chances).mean())
    return found


def _letters(examples: Examples) -> np.ndarray:
    """Return whole windows [n, length + 1]."""
    return torch.cat([examples.inputs[:, :1], examples.targets], dim=1).cpu().numpy()


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
