"""Chapter 4's pictures: two optimizers at one learning rate, what three models write, gaps over steps, races."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.ch04 import tables
from muonbook.ch04.search_space import RACERS
from muonbook.ch04.writing import Word, words_of
from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_curves, describe_dots, draw_curves, draw_dots, head
from muonbook.figures.style import LOOKS, MARGIN, MUTED, ROW, SMALL, TEXT, WIDTH, Block, card, mix, put, wide

from muonbook.figures.style import CARD  # isort: skip

Race = Mapping[str, Any]
PICTURES = {"digits": "digits", "language": "the language", "fashion": "Fashion-MNIST"}

# ---- Races ------------------------------------------------------------------------------------------------


def frames_at_one_rate(race: Race, first: str = "adamw", second: str = "muon") -> list[Frame]:
    """Return a frame for every learning rate that both were tuned at: the best median losses there, and who is ahead.

    Where the two are within one per cent, it is called a tie.
    """
    at = {
        RACERS[name].title: {float(lr): loss for lr, loss in race["racers"][name]["curve"].items() if loss is not None}
        for name in (first, second)
    }
    curves = {name: (list(losses), list(losses.values())) for name, losses in at.items()}
    words: dict[str, Any] = dict(
        x_label="learning rate",
        y_label="held-out loss (nats per letter)",
        title="Two optimizers, one learning rate",
    )
    frames = []
    for lr in sorted(set.intersection(*map(set, at.values()))):
        (least, winner), (greater, _) = sorted((losses[lr], name) for name, losses in at.items())
        says = f"{winner} wins" if greater > 1.01 * least else f"a tie ({winner} first)"
        told = f"Both at {lr:g}: {says}, {least:.3f} against {greater:.3f}."
        figure = draw_curves(curves, **words, log_x=True, marks=[(lr, f"{lr:g}")])
        frames.append(Frame(figure, f"{describe_curves(curves, **words)} {told}", told))
    return frames


def gaps_over_steps(race: Race) -> tuple[Figure, str]:
    """Return the median gaps of all racers over the steps, with a band that holds all seeds, and models that count."""
    curves, bands = {}, {}
    for name in tables.by_median(race):
        looks, columns = race["racers"][name]["looks"], tables.gaps_by_look(race, name)
        curves[RACERS[name].title] = (looks, [statistics.median(column) for column in columns])
        bands[RACERS[name].title] = (looks, [min(column) for column in columns], [max(column) for column in columns])
    words: dict[str, Any] = dict(
        x_label="steps",
        y_label="gap (nats per letter)",
        title="The language: gap to the floor",
        note="Medians of eight fresh seeds, each with its own language, at the best settings of each optimizer; "
        "the bands hold all eight. Level lines: models that only count letters.",
        levels=[(tables.ngram_gap(race, order), f"{order}-gram") for order in (3, 5, 6)],
    )
    return draw_curves(curves, **words, bands=bands, log_y=True), describe_curves(curves, **words)


def races_seed_by_seed(races: Mapping[str, Race], first: str = "muon", second: str = "adamw") -> tuple[Figure, str]:
    """Return a dot for every race and fresh seed: the first optimizer's loss over the second's, or its gap."""
    ratios = {
        PICTURES[name]: [a / b for a, b in zip(tables.gaps(race, first), tables.gaps(race, second), strict=True)]
        for name, race in races.items()
    }
    words: dict[str, Any] = dict(
        title="Three races, seed by seed",
        note="Muon's held-out loss (language: gap) / AdamW's. Red, left of the dashes: Muon is better.",
    )
    return draw_dots(ratios, **words), describe_dots(ratios, **words)


# ---- What models write ------------------------------------------------------------------------------------

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
            blocks.append(_writer(RACERS[name].title, share, lines))
            told.append(f"{RACERS[name].title} {share}: {' '.join(word.letters for line in lines for word in line)}")
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
