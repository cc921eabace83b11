"""What nobody can undercut: the loss of the best predictor of the language, on the very windows that are read."""

from __future__ import annotations

import torch
from torch import Tensor

from distmuon.models.language import ALPHABET, Language


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
