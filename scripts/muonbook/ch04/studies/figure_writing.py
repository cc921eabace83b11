"""Three models write, after more and more steps: words that exist stand out of those that do not."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from muonbook.ch04.search_space import title as titled
from muonbook.ch04.studies.writing import Word, words_of
from muonbook.figures.player import Frame
from muonbook.figures.plots import head
from muonbook.figures.style import LOOKS, MARGIN, MUTED, ROW, SMALL, TEXT, WIDTH, Block, card, mix, put, wide

from muonbook.figures.style import CARD  # isort: skip

LINES, ACROSS = 3, WIDTH - 2 * MARGIN
PALE = mix(MUTED, CARD, 0.35)  # of words that do not exist
NOTE = "Strong: words that exist. Per cent: letters in such words, median of {} languages."


def frames_of_writing(found: Mapping[str, Any], names: Sequence[str], title: str = "") -> list[Frame]:
    """Return a frame for every look: what each optimizer's model wrote on the first seed.

    found: as `writing.measure` returns it. names: of its writers, in the order of the picture.
    """
    lexicon, frames = frozenset(found["lexicon"]), []
    for n, steps in enumerate(found["steps"]):
        blocks, told = [], []
        for name in names:
            writer = found["writers"][name]
            share = f"{100 * statistics.median(shares[n] for shares in writer['shares']):.0f} %"
            lines = laid(words_of(writer["texts"][n], lexicon))
            blocks.append(_writer(titled(name), share, lines))
            told.append(f"{titled(name)} {share}: {' '.join(word.letters for line in lines for word in line)}")
        figure = card(title, NOTE.format(len(found["seeds"])), *blocks)
        caption = f"After {steps} of {found['steps'][-1]} steps."
        frames.append(Frame(figure, f"{head(title, 'Writing')} {caption} {'. '.join(told)}.", caption))
    return frames


def laid(words: Sequence[Word], lines: int = LINES, room: float = ACROSS) -> list[list[Word]]:
    """Return the first words, without spaces, in lines that fit the card with a space after each word."""
    found: list[list[Word]] = [[]]
    used = 0.0
    for word in words:
        if word.letters.isspace():
            continue
        size = _room(word)
        if used + size > room and found[-1]:
            if len(found) == lines:
                break
            found.append([])
            used = 0.0
        found[-1].append(word)
        used += size
    return found


def _room(word: Word) -> float:
    """Return how wide a word is, with a space after it."""
    return wide(f"{word.letters} ", SMALL, word.exists)


def _writer(name: str, share: str, lines: Sequence[Sequence[Word]]) -> Block:
    colour = LOOKS[name]["color"]

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 6, name, bold=True, size=TEXT, color=colour)
        put(axes, WIDTH - MARGIN, top + 6, share, "right", bold=True, size=TEXT)
        for n, line in enumerate(lines):
            x = MARGIN
            for word in line:
                looks = {"bold": True, "color": colour} if word.exists else {"color": PALE}
                put(axes, x, top + 10 + ROW * (n + 1), word.letters, **looks)
                x += _room(word)

    return 12 + ROW * (LINES + 1) + 6, paint
