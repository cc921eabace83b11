"""The language: its entropy is exact, its texts follow it, and the best predictor is the best."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from distmuon.models.language import ALPHABET, Language, best_losses, entropy, spell, stationary


def letters(text: str) -> Tensor:
    return torch.tensor([ALPHABET.index(c) for c in text])


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


def test_another_grammar_keeps_the_words():
    plain, other = Language.of(0), Language.of(0, grammar_seed=7)
    assert plain.words == other.words
    assert not torch.equal(plain.follows, other.follows)


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
