"""The language: its entropy is exact, and its texts follow it."""

import itertools
import math

import pytest
import torch

from distmuon.models.language import Language, entropy, spell, stationary


def tiny(words: tuple[str, ...] = ("ba", "bab", "o"), follows: list[list[float]] | None = None) -> Language:
    chain = torch.tensor(follows or [[0.1, 0.6, 0.3], [0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], dtype=torch.float64)
    return Language(words, chain, stationary(chain))


def test_entropies_that_are_known():
    assert entropy(torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)).item() == pytest.approx(math.log(2))
    chain = torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=torch.float64)
    assert stationary(chain).tolist() == pytest.approx([0.75, 0.25])  # balance: 0.75 * 0.1 = 0.25 * 0.3


def test_the_rate_is_the_entropy_per_word_over_the_letters_per_word():
    fair = tiny(("ba", "do"), [[0.5, 0.5], [0.5, 0.5]])
    assert fair.rate == pytest.approx(math.log(2) / 3)  # one coin per word of three letters, space included
    certain = tiny(("ba", "do"), [[0.0, 1.0], [1.0, 0.0]])
    assert certain.rate == 0.0


def test_a_text_is_made_of_words_that_follow_each_other_as_often_as_they_should():
    language = tiny()
    text = language.write(200_000, torch.Generator().manual_seed(3))
    assert len(text) == 200_000
    words = spell(text).split(" ")[:-1]  # the last one may be cut
    assert set(words) == set(language.words)
    follows = torch.zeros(3, 3, dtype=torch.float64)
    for first, second in itertools.pairwise(language.words.index(word) for word in words):
        follows[first, second] += 1
    follows /= follows.sum(1, keepdim=True)
    assert (follows - language.follows).abs().max() < 0.01


def test_one_seed_one_language_and_one_text():
    first, second, other = Language.of(0), Language.of(0), Language.of(1)
    assert first.words == second.words != other.words
    assert len(set(first.words)) == 200
    assert not any(" " in word for word in first.words)
    assert torch.equal(first.follows, second.follows)
    assert (first.follows.sum(1) - 1).abs().max() < 1e-12
    assert (first.start @ first.follows - first.start).abs().max() < 1e-12
    texts = [first.write(500, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
