"""Texts to train on, as tokens: a book that comes along, a language whose entropy is known, any file of one's own.

The last tenth of a text is held out. A batch is drawn by its step's number alone, the same on every grid, so that a
training which is resumed, on however many ranks, goes on with what would have come.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from distmuon.launch import UsageError
from distmuon.models import language

ALICE, LANGUAGE = "alice", "language"
LETTERS = 400_000  # of the language: about as many bytes of Alice are three times as hard to learn
HELD_OUT = 0.1  # of a text, at its end


@dataclass(frozen=True)
class Corpus:
    """A text in two parts, each [tokens], uint8. vocabulary: tokens there are. unit: what one is. floor: nats per token
    below which no model gets in the long run, where that is known."""

    training: Tensor
    held_out: Tensor
    vocabulary: int
    unit: str
    floor: float | None = None

    def __len__(self) -> int:
        return len(self.training) + len(self.held_out)

    @cached_property
    def sha256(self) -> str:
        """The digest of all tokens: what tells a text from another one of the same name."""
        digest = hashlib.sha256(self.training.numpy().data)
        digest.update(self.held_out.numpy().data)
        return digest.hexdigest()

    @cached_property
    def known(self) -> list[int]:
        """The tokens that occur in the training text, ascending: what a model can learn anything about."""
        return self.training.unique().tolist()

    def batch(
        self, step: int, count: int, length: int, seed: int, part: int = 0, parts: int = 1
    ) -> tuple[Tensor, Tensor]:  # tokens, and what follows each: [count / parts, length], int64
        """Return one of several equal parts of a step's `count` windows, cut from the training text anywhere."""
        mixed = zlib.crc32(f"{seed} {step}".encode())  # of a seed, torch takes 32 bits and drops the others
        generator = torch.Generator().manual_seed(mixed)
        starts = torch.randint(len(self.training) - length, (count,), generator=generator)
        return _windows(self.training, starts.chunk(parts)[part], length)

    def held_out_windows(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return `count` windows of the held-out text, evenly spread, as `batch` does."""
        starts = torch.arange(count) * (len(self.held_out) - length) // count
        return _windows(self.held_out, starts, length)


def corpus(name: str) -> Corpus:
    """Return the text of this name: "alice", "language", or a file's, whose bytes are the tokens.

    Raises UsageError, naming it, for a file that cannot be read, or that is too short to learn from.
    """
    if name == LANGUAGE:
        spoken = language.Language.of(0)
        letters = spoken.write(LETTERS, torch.Generator().manual_seed(0)).to(torch.uint8)
        return _divided(letters, len(language.ALPHABET), "letter", spoken.rate)
    return _divided(torch.frombuffer(bytearray(_bytes(name)), dtype=torch.uint8), 256, "byte")


def encode(written: str, name: str, known: Collection[int]) -> Tensor:  # [tokens], int64
    """Return what is written as tokens of the text of this name.

    known: tokens that the model has seen, see `Corpus.known`. Raises UsageError for characters made of others.
    """
    known_tokens = set(known)
    missing = {letter for letter in written if not known_tokens.issuperset(_tokens_of(letter, name))}
    if missing:
        shown = ", ".join(map(repr, sorted(missing, key=written.index)))
        raise UsageError(
            f"--prompt {written!r}: the text that the model was trained on contains no {shown}; write a prompt "
            f"without {'it' if len(missing) == 1 else 'them'}."
        )
    return torch.tensor(_tokens_of(written, name), dtype=torch.long)


def decode(tokens: Sequence[int], name: str) -> str:
    """Return tokens of the text of this name as one reads them; bytes that are no UTF-8 become \ufffd."""
    if name == LANGUAGE:
        return "".join(language.ALPHABET[token] for token in tokens)
    return bytes(tokens).decode(errors="replace")


def _tokens_of(written: str, name: str) -> list[int]:
    """Return tokens; -1 for a letter that the language lacks."""
    if name == LANGUAGE:
        return [language.ALPHABET.find(letter) for letter in written]
    return list(written.encode(errors="surrogateescape"))  # what a shell hands over that is no UTF-8


def _bytes(name: str) -> bytes:
    """Alice: Lewis Carroll, "Alice's Adventures in Wonderland" (1865), Millennium Fulcrum Edition 2.9, which is in the
    public domain; the text that compressors are measured by, as alice29.txt of the Canterbury Corpus (1997)."""
    if name == ALICE:
        return resources.files("distmuon.models").joinpath("alice.txt").read_bytes()
    try:
        text = Path(name).read_bytes()
    except OSError as error:
        raise UsageError(
            f"text {name}: cannot be read ({error.strerror}); name a file, or {ALICE}, or {LANGUAGE}."
        ) from error
    if len(text) < (least := 10_000):
        raise UsageError(f"text {name}: {len(text):,} bytes; there must be {least:,} at least to learn from.")
    return text


def _divided(tokens: Tensor, vocabulary: int, unit: str, floor: float | None = None) -> Corpus:
    cut = round(len(tokens) * (1 - HELD_OUT))
    return Corpus(tokens[:cut], tokens[cut:], vocabulary, unit, floor)


def _windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    rows = text[starts[:, None] + torch.arange(length + 1)].long()
    return rows[:, :-1], rows[:, 1:]
