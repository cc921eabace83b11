"""What a model has learned of the language, in its own letters: it writes, and its words exist or do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distmuon.launch import World
from distmuon.models.language import Language, spell
from muonbook.ch04.search_space import Setting
from muonbook.ch04.sweep import shared_out
from muonbook.ch04.tasks import CONTEXT, LearningTask
from muonbook.ch04.training import train

TEXTS, LETTERS = 16, 300  # that a model writes at every look
LOOKS = (0.25, 0.5, 0.75, 1.0)  # when it writes, as shares of the run


class Word(NamedTuple):
    """A run of letters without a space, or of spaces. exists: in the lexicon."""

    letters: str
    exists: bool


def words_of(text: str, lexicon: frozenset[str]) -> list[Word]:
    """Return a text cut into its words and the spaces between, each once."""
    found = ("".join(letters) for _, letters in groupby(text, key=str.isspace))
    return [Word(letters, letters in lexicon) for letters in found]


def share_in_words(texts: Sequence[str], lexicon: frozenset[str]) -> float:
    """Return the share of letters, spaces left out, that stand in words of the lexicon.

    A text's first and last word are left out, too: where a text is cut, a word may be.
    """
    inner = [word for text in texts for word in words_of(text, lexicon)[1:-1] if not word.letters.isspace()]
    written = sum(len(word.letters) for word in inner)
    return sum(len(word.letters) for word in inner if word.exists) / written if written else 0.0


@torch.no_grad()
def write(model: nn.Module, texts: int, letters: int, generator: torch.Generator) -> Tensor:
    """Return texts [texts, letters] int64, letter by letter drawn from what the model predicts after a space."""
    written = torch.zeros(texts, 1, dtype=torch.long)  # a space, ALPHABET[0]
    for _ in range(letters):
        chances = model(written[:, -CONTEXT:])[:, -1].softmax(-1)
        written = torch.cat([written, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return written[:, 1:]


def measure(world: World, task: LearningTask, settings: Mapping[str, Setting], seeds: Sequence[int]) -> dict[str, Any]:
    """Train every optimizer at its setting on every seed's language, and let it write on the way. Collective.

    Returns seeds, the steps after which they wrote, and "writers": optimizer -> the first seed's first text at each of
    them, and every seed's shares of letters in words that exist; "lexicon" is the first seed's.
    """
    looks = [max(1, round(share * task.steps)) for share in LOOKS]

    def job(asked: tuple[str, int]) -> tuple[list[str], list[float]]:
        name, seed = asked
        lexicon, firsts, shares = frozenset(Language.of(seed).words), [], []

        def watch(model: nn.Module, step: int) -> None:
            if step in looks:
                written = write(model, TEXTS, LETTERS, torch.Generator().manual_seed(seed))
                texts = [spell(text) for text in written]
                firsts.append(texts[0])
                shares.append(share_in_words(texts, lexicon))

        train(task, settings[name], seed, watch=watch)
        return firsts, shares

    found = iter(shared_out(world, [(name, seed) for name in settings for seed in seeds], job))
    writers = {}
    for name in settings:
        (texts, first), *others = (next(found) for _ in seeds)
        writers[name] = {"texts": texts, "shares": [first, *(shares for _, shares in others)]}
    return {"seeds": list(seeds), "steps": looks, "lexicon": list(Language.of(seeds[0]).words), "writers": writers}
