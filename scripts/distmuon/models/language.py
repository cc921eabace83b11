"""A language whose physical limit is known: words drawn from a seeded source, written as letters.

Each word of a small lexicon is followed by another with a probability that depends on it alone. The text is the words'
letters, each word ended by a space. Two facts make the limit exact:

- The sequence of words is a Markov chain, so its entropy per word is H = sum_i pi_i sum_j -p_ij log p_ij, with pi the
  chain's stationary distribution (Cover and Thomas 2006, theorem 4.2.4).
- No word occurs twice in the lexicon and each ends with a space, so words and letters tell each other completely: the
  entropy per letter is H over the mean length of a word, in letters, space included.

No predictor, of any size, can have a smaller expected loss on a long text. On a short window one knows less, because
nobody tells which word came before.

Everything here is float64 and on the CPU; entropies are in nats per letter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALPHABET = " abcdefghijklmnopqrstuvwxyz"
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
WORDS = 200  # in a lexicon


@dataclass(frozen=True)
class Language:
    """A lexicon, and which word follows which.

    words: the lexicon. follows: [W, W] float64, row i the distribution of the word after word i. start: [W], the
    stationary distribution, from which a text's first word is drawn.
    """

    words: tuple[str, ...]
    follows: Tensor
    start: Tensor

    @classmethod
    def of(cls, seed: int) -> Language:
        """Return the language of this seed. Frequencies fall like 1/rank (Zipf), and every word has its favourites."""
        lexicon = _lexicon(torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(seed + 1)
        common = _zipf(WORDS)  # of every word, wherever it stands
        favourites = torch.zeros(WORDS, WORDS, dtype=torch.float64)
        for row in favourites:
            row[torch.randperm(WORDS, generator=generator)[:8]] = _zipf(8)
        follows = 0.3 * common + 0.7 * favourites
        return cls(lexicon, follows, stationary(follows))

    @property
    def rate(self) -> float:
        """The entropy rate in nats per letter: what no predictor can undercut in the long run."""
        per_word = self.start @ entropy(self.follows)
        lengths = torch.tensor([len(word) + 1.0 for word in self.words], dtype=torch.float64)
        return float(per_word / (self.start @ lengths))

    def write(self, letters: int, generator: torch.Generator) -> Tensor:
        """Return a text [letters] int64 of letter numbers (places in ALPHABET), beginning with a whole word."""
        longest = 1 + letters // min(len(word) + 1 for word in self.words)
        thresholds, first = self.follows.cumsum(1), self.start.cumsum(0)
        chances = torch.rand(longest, dtype=torch.float64, generator=generator)
        spelled = [torch.tensor([ALPHABET.index(c) for c in word + " "]) for word in self.words]
        text, written, word = [], 0, -1
        for chance in chances:
            row = first if word < 0 else thresholds[word]
            word = min(int(torch.searchsorted(row, chance)), len(self.words) - 1)  # rounding may leave the sum below 1
            text.append(spelled[word])
            written += len(spelled[word])
            if written >= letters:
                break
        return torch.cat(text)[:letters]


def entropy(distributions: Tensor) -> Tensor:
    """Return the entropy in nats of each row of probabilities [..., n] -> [...]."""
    return torch.special.entr(distributions).sum(-1)


def stationary(follows: Tensor) -> Tensor:
    """Return the distribution pi [n] with pi = pi P, for a chain P [n, n] in which every state can be reached."""
    n = len(follows)
    equations = torch.cat([follows.T - torch.eye(n, dtype=follows.dtype), torch.ones(1, n, dtype=follows.dtype)])
    wanted = torch.zeros(n + 1, dtype=follows.dtype)
    wanted[-1] = 1
    return torch.linalg.lstsq(equations, wanted).solution


def spell(letters: Tensor) -> str:
    """Return a text [letters] as a string."""
    return "".join(ALPHABET[number] for number in letters.tolist())


def _zipf(n: int) -> Tensor:
    weights = 1 / torch.arange(1, n + 1, dtype=torch.float64)
    return weights / weights.sum()


def _lexicon(generator: torch.Generator) -> tuple[str, ...]:
    """Return different words of one to three syllables."""
    words: dict[str, None] = {}
    while len(words) < WORDS:
        syllables = 1 + int(torch.randint(3, (), generator=generator))
        pairs = torch.randint(len(CONSONANTS) * len(VOWELS), (syllables,), generator=generator).tolist()
        words["".join(CONSONANTS[n // len(VOWELS)] + VOWELS[n % len(VOWELS)] for n in pairs)] = None
    return tuple(words)
