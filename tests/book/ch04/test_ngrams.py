"""Models that count: every probability letter by letter, and the known order on the language."""

import math
from itertools import pairwise

import pytest
import torch

from distmuon.models.language import ALPHABET
from muonbook.ch04 import ngrams, tasks
from muonbook.ch04.tasks import Examples


def examples(*windows: str) -> Examples:
    letters = torch.tensor([[ALPHABET.index(letter) for letter in window] for window in windows])
    return Examples(letters[:, :-1], letters[:, 1:])


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
    found = ngrams.losses(examples(*read), examples(*asked))
    assert tuple(found) == ngrams.ORDERS
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
    found = ngrams.losses(examples(*read), examples(window))[6] * whole
    return math.exp(ngrams.losses(examples(*read), examples(window[:-1]))[6] * but_last - found)


def test_on_the_language_more_letters_come_closer_to_the_floor() -> None:
    task = tasks.TASKS["language"]
    assert task.floor is not None
    found = ngrams.losses(*task.examples(task, 0))
    assert all(longer < shorter for shorter, longer in pairwise(found.values()))
    assert found[6] > task.floor(0)
