"""The best predictor of the language is the best: Bayes' rule, and nobody undercuts it."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from distmuon.models.language import ALPHABET, Language, stationary
from muonbook.ch04.best_predictor import best_losses


def letters(text: str) -> Tensor:
    return torch.tensor([ALPHABET.index(c) for c in text])


def tiny() -> Language:
    chain = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], dtype=torch.float64)
    return Language(("ba", "bab", "o"), chain, stationary(chain))


def brute_force(language: Language, window: str) -> list[float]:
    """Sum over all ways to read the window: every word and place to begin with, every word that may follow."""

    def readings(text: str) -> float:
        total = 0.0
        for word, chance in zip(language.words, language.start.tolist(), strict=True):
            whole = word + " "
            for place in range(len(whole)):
                total += chance * rest(text, whole[place:], language.words.index(word))
        return total

    def rest(text: str, ahead: str, word: int) -> float:
        shared = min(len(text), len(ahead))
        if text[:shared] != ahead[:shared]:
            return 0.0
        if len(text) <= len(ahead):
            return 1.0
        follows = language.follows[word].tolist()
        return sum(p * rest(text[shared:], language.words[j] + " ", j) for j, p in enumerate(follows))

    chances = [readings(window[: n + 1]) for n in range(len(window))]
    return [math.log(before / after) for before, after in itertools.pairwise(chances)]


@pytest.mark.parametrize("window", ["ba bab o ba", "ab ba o o o", " bab ba ba "])
def test_the_best_predictor_is_bayes_rule(window: str):
    language = tiny()
    assert best_losses(language, letters(window)[None])[0].tolist() == pytest.approx(brute_force(language, window))


def test_on_long_windows_the_floor_comes_down_to_the_entropy_rate():
    language = Language.of(0)
    text = language.write(40 * 401, torch.Generator().manual_seed(11)).view(40, 401)
    losses = best_losses(language, text)
    assert losses[:, 40:].mean().item() == pytest.approx(language.rate, rel=0.04)
    assert losses[:, :5].mean() > 1.5 * language.rate  # nobody told which word came before


def test_nobody_undercuts_the_floor():
    language = Language.of(0)
    windows = language.write(100 * 65, torch.Generator().manual_seed(12)).view(100, 65)
    floor = best_losses(language, windows).mean().item()
    counts = torch.ones(len(ALPHABET), len(ALPHABET), dtype=torch.float64)
    counts.index_put_(
        (windows[:, :-1].flatten(), windows[:, 1:].flatten()), torch.tensor(1.0).double(), accumulate=True
    )
    pairs = -(counts / counts.sum(1, keepdim=True)).log()[windows[:, :-1], windows[:, 1:]].mean().item()
    assert floor < pairs < math.log(len(ALPHABET))
