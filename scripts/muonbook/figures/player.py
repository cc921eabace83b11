"""Pictures that move: frames drawn by our figures, one after the other, with words on the buttons.

    notebook.moving("ring", [Frame(figure, "alt text", "caption"), ...])      in a chapter
    player.html("ring", frames)                                               elsewhere

What comes out is one piece of HTML: every frame as inline SVG (its text stays text, sharp on any screen), a style and a
script, because Colab shows every output in a frame of its own. It asks the network for nothing, and the same frames
give the same bytes. Without the script the first frame stands there as a picture; on paper all of them do.

A player may be told to play once by itself (`still`). `film` makes of the same frames one SVG file that plays without
a script, for places that show files alone, such as a README.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from muonbook.figures import svg

FEWEST = 2  # frames: fewer do not move
FRAME_MS, LETTER_MS = 1000, 30  # how long a frame stays: as long as its caption takes to read
SHELL = Path(__file__).with_name("player_shell.html")  # the style, the controls and the script around the frames
FILM_WIDTH = 540  # pixels: as wide as a card in the book
# The script's part for `still` alone: other players, which chapters store as outputs, are not made heavier by it.
_BY_ITSELF = re.compile(r"// \[\[BY ITSELF\]\]\n(.*?)// \[\[END\]\]\n", re.DOTALL)


class Frame(NamedTuple):
    """One frame: a figure, what those who cannot see it should know of it (and of what changed), a line below it."""

    figure: Figure
    alt: str
    caption: str = ""


def html(name: str, frames: Sequence[Frame], still: int | None = None) -> str:
    """Return a player of these frames. name: its own on the page, in small letters, digits and hyphens.

    still: if given, it plays once by itself when it comes into view, and this frame (counted from 0) is the picture
    for those who run no script or want no motion. Such a player is the first of its page, or the only one, because the
    first script sets all of a page's players up.

    Raises ValueError, in one sentence, for a name of another kind, fewer than two frames, frames of different sizes, a
    frame without alt text or with that of the frame before it, a `still` that is no frame, and for what
    muonbook.figures.svg refuses.
    """
    _require(name, frames, still)
    definitions = svg.Definitions(name)
    first = 0 if still is None else still
    shown = "".join(_shown(frame, number == first, definitions) for number, frame in enumerate(frames))
    shell = "\n".join(line.strip() for line in SHELL.read_text(encoding="utf-8").splitlines())
    blanks = {"NAME": name, "COUNT": str(len(frames)), "DEFINITIONS": definitions.html(), "FRAMES": shown.rstrip()}
    blanks |= {"STILL": "" if still is None else f' data-still="{still}"'}
    blanks |= {"FRAMEMS": str(FRAME_MS), "LETTERMS": str(LETTER_MS)}
    shell = _BY_ITSELF.sub("" if still is None else r"\1", shell)
    return re.sub(r"\[\[([A-Z]+)\]\]", lambda blank: blanks[blank[1]], shell)


def film(name: str, frames: Sequence[Frame], alt: str, still: int) -> str:
    """Return one SVG file that plays these frames again and again, each as long as its caption takes to read.

    It draws no caption: a figure that needs one holds it. alt: what those who cannot see it should know of all of it.
    still: the frame, counted from 0, for those who want no motion. Raises ValueError as `html` does.
    """
    _require(name, frames, still)
    definitions = svg.Definitions(name)
    drawn = "".join(f'<g class="frame">{svg.inline(frame.figure, frame.alt, definitions)}</g>\n' for frame in frames)
    across, down = (72 * float(side) for side in frames[0].figure.get_size_inches())
    size = f'viewBox="0 0 {across:g} {down:g}" width="{FILM_WIDTH}" height="{FILM_WIDTH * down / across:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(alt)}">\n'
        f"<style>\n{_turns(frames, still)}\n</style>\n{definitions.html()}\n{drawn}</svg>\n"
    )


def stay(frame: Frame) -> int:
    """Return for how many milliseconds a frame is seen where frames play."""
    return FRAME_MS + LETTER_MS * len(frame.caption)


def _turns(frames: Sequence[Frame], still: int) -> str:
    """Return the style by which one frame after the other is seen; the last one stays twice as long."""
    stays = [stay(frame) for frame in frames]
    stays[-1] *= 2
    ends = [sum(stays[: number + 1]) for number in range(len(stays))]
    rules = ["g.frame { visibility: hidden; }", f"g.frame:nth-of-type({still + 1}) {{ visibility: visible; }}"]
    turns = []
    for number, (own, end) in enumerate(zip(stays, ends, strict=True), 1):
        start, stop = (f"{100 * moment / ends[-1]:.3f}%" for moment in (end - own, end))
        before = "0% { visibility: hidden; } " if end > own else ""
        after = f"{stop} {{ visibility: hidden; }} " if end < ends[-1] else ""
        rules.append(f"@keyframes turn-{number} {{ {before}{start} {{ visibility: visible; }} {after}}}")
        turns.append(f"g.frame:nth-of-type({number}) {{ animation: turn-{number} {ends[-1]}ms step-end infinite; }}")
    return "\n".join([*rules, "@media (prefers-reduced-motion: no-preference) {", *turns, "}"])


def words(frames: Sequence[Frame]) -> str:
    """Return what the frames show in words, a line for each: the alt text, numbered."""
    return "\n".join(f"{number}/{len(frames)}: {frame.alt}" for number, frame in enumerate(frames, 1))


def _shown(frame: Frame, first: bool, definitions: svg.Definitions) -> str:
    caption = f"<p>{escape(frame.caption, quote=False)}</p>" if frame.caption else ""
    drawn = svg.inline(frame.figure, frame.alt, definitions)
    return f"<div{'' if first else ' hidden'}>{drawn}{caption}</div>\n"


def _require(name: str, frames: Sequence[Frame], still: int | None) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"a player's name is made of small letters, digits and hyphens, unlike {name!r}.")
    if len(frames) < FEWEST:
        raise ValueError(f"{name} has {len(frames)} frames; a picture that moves has at least {FEWEST}.")
    if still is not None and not 0 <= still < len(frames):
        raise ValueError(f"{name} has the frames 0 to {len(frames) - 1}, and still is {still}; name one of them.")
    sizes = [tuple(round(72 * float(side), 2) for side in frame.figure.get_size_inches()) for frame in frames]
    for number, size in enumerate(sizes, 1):
        if size != sizes[0]:
            first, other = (" x ".join(f"{side:g}" for side in each) for each in (sizes[0], size))
            raise ValueError(f"frame {number} of {name} is {other} points, and the first is {first}: make them equal.")
    for number, frame in enumerate(frames, 1):
        if not frame.alt.strip():
            raise ValueError(f"frame {number} of {name} has no alt text; it says what changed in it.")
    for number, (before, frame) in enumerate(pairwise(frames), 2):
        if frame.alt == before.alt:
            raise ValueError(f"frame {number} of {name} has the alt text of the frame before it; it says what changed.")
