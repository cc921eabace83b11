"""The best predictor of the language is Bayes' rule, no model can beat it, and models that count are as defined."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from distmuon.models.language import ALPHABET, Language, stationary
from muonbook.ch04 import tasks
from muonbook.ch04.tasks import TASKS, best_losses, ngram_losses
from muonbook.measure import results


def letters(*texts: str) -> Tensor:
    return torch.tensor([[ALPHABET.index(c) for c in text] for text in texts])


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


@pytest.mark.parametrize("window", ["ab ba o o o", " bab ba ba "])
def test_the_best_predictor_is_bayes_rule(window: str):
    language = tiny()
    assert best_losses(language, letters(window))[0].tolist() == pytest.approx(brute_force(language, window))


# ---- Models that count ------------------------------------------------------------------------------------


def chance(read: list[str], context: str, letter: str) -> float:
    """Return p(letter | context) as the formula has it, counted letter by letter."""
    shorter = chance(read, context[1:], letter) if context else 1 / len(ALPHABET)
    first = max(len(context), 1)
    after = [window[k] for window in read for k in range(first, len(window)) if window[k - len(context) : k] == context]
    if not after:
        return shorter
    return (after.count(letter) + len(set(after)) * shorter) / (len(after) + len(set(after)))


def test_every_probability_is_the_formulas() -> None:
    read, asked = ["abracadabra", "alakazambra"], ["abradalakab", "zzzzzzabrac"]
    found = ngram_losses(letters(*read), letters(*asked))
    assert tuple(found) == tasks.ORDERS
    for order, loss in found.items():
        places = [(window, k) for window in asked for k in range(1, len(window))]
        chances = [chance(read, window[max(0, k - order + 1) : k], window[k]) for window, k in places]
        assert loss == pytest.approx(-sum(map(math.log, chances)) / len(chances))


def test_the_stored_race_has_this_floor_and_these_counts_which_come_closer_to_it_letter_by_letter() -> None:
    race, language = results.load("race_language"), TASKS["language"]
    assert tasks.language_floor(0) == pytest.approx(race["floor"][0])
    counted = ngram_losses(*tasks.both_windows(language, 0))
    assert {str(order): loss for order, loss in counted.items()} == pytest.approx(
        {order: losses[0] for order, losses in race["ngrams"].items()}
    )
    assert sorted(counted.values(), reverse=True) == list(counted.values())
    assert counted[6] > race["floor"][0]
