"""The best predictor of the language is Bayes' rule, no model can beat it, and models that count are as defined."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from distmuon.models.language import ALPHABET, Language, stationary
from muonbook.ch04 import limits, tasks
from muonbook.ch04.limits import best_losses


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


# ---- Models that count ------------------------------------------------------------------------------------


def windows(*texts: str) -> Tensor:
    return torch.stack([letters(text) for text in texts])


def chance(read: list[str], context: str, letter: str, order: int) -> float:
    """Return p(letter | context) as the module's formula has it, counted letter by letter."""
    shorter = chance(read, context[1:], letter, order - 1) if context else 1 / len(ALPHABET)
    first = max(order - 1, 1)
    after = [window[k] for window in read for k in range(first, len(window)) if window[k - len(context) : k] == context]
    if not after:
        return shorter
    return (after.count(letter) + len(set(after)) * shorter) / (len(after) + len(set(after)))


def test_every_probability_is_the_formulas() -> None:
    read, asked = ["abracadabra", "alakazambra"], ["abradalakab", "zzzzzzabrac"]
    found = limits.ngram_losses(windows(*read), windows(*asked))
    assert tuple(found) == limits.ORDERS
    for order, loss in found.items():
        chances = [
            chance(read, window[max(0, k - order + 1) : k], window[k], min(order, k + 1))
            for window in asked
            for k in range(1, len(window))
        ]
        assert loss == pytest.approx(-sum(map(math.log, chances)) / len(chances))


def test_probabilities_of_all_letters_sum_to_one() -> None:
    read = ["abracadabra", "alakazambra"]
    for start in ("abrac", "zzzzz", "amb z"):
        asked = [start + letter for letter in ALPHABET]
        total = sum(_last(read, window) for window in asked)
        assert total == pytest.approx(1.0)


def _last(read: list[str], window: str) -> float:
    """Return the 6-gram's probability of a window's last letter: the loss with it less the loss without it."""
    whole, but_last = (6 - k for k in (1, 2))
    found = limits.ngram_losses(windows(*read), windows(window))[6] * whole
    return math.exp(limits.ngram_losses(windows(*read), windows(window[:-1]))[6] * but_last - found)


def test_on_the_language_more_letters_come_closer_to_the_floor() -> None:
    task = tasks.TASKS["language"]
    assert task.floor is not None
    found = limits.ngram_losses(*(part.whole() for part in task.examples(task, 0)))
    assert all(longer < shorter for shorter, longer in itertools.pairwise(found.values()))
    assert found[6] > task.floor(0)
