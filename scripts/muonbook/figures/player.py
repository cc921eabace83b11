"""Pictures that move: frames drawn by our figures, one after the other, with words on the buttons.

    notebook.moving("ring", [Frame(figure, "alt text", "caption"), ...])      in a chapter
    player.html("ring", frames)                                               elsewhere

What comes out is one piece of HTML: every frame as inline SVG (its text stays text, sharp on any screen), a style and a
script, because Colab shows every output in a frame of its own. It asks the network for nothing, and the same frames
give the same bytes. Without the script the first frame stands there as a picture; on paper all of them do.
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

FRAME_MS, LETTER_MS = 1000, 30  # how long a frame stays: as long as its caption takes to read
SHELL = Path(__file__).with_name("player_shell.html")  # the style, the controls and the script around the frames


class Frame(NamedTuple):
    """One frame: a figure, what those who cannot see it should know of it (and of what changed), a line below it."""

    figure: Figure
    alt: str
    caption: str = ""


def html(name: str, frames: Sequence[Frame]) -> str:
    """Return a player of these frames. name: its own on the page, in small letters, digits and hyphens.

    Raises ValueError, in one sentence, for frames of different sizes, a frame without alt text or with that of the
    frame before it, and for what muonbook.figures.svg refuses.
    """
    _require(name, frames)
    definitions = svg.Definitions(name)
    shown = "".join(_shown(frame, number == 0, definitions) for number, frame in enumerate(frames))
    shell = "\n".join(line.strip() for line in SHELL.read_text(encoding="utf-8").splitlines())
    blanks = {"NAME": name, "COUNT": str(len(frames)), "DEFINITIONS": definitions.html(), "FRAMES": shown.rstrip()}
    blanks |= {"FRAMEMS": str(FRAME_MS), "LETTERMS": str(LETTER_MS)}
    return re.sub(r"\[\[([A-Z]+)\]\]", lambda blank: blanks[blank[1]], shell)


def words(frames: Sequence[Frame]) -> str:
    """Return what the frames show in words, a line for each: the alt text, numbered."""
    return "\n".join(f"{number}/{len(frames)}: {frame.alt}" for number, frame in enumerate(frames, 1))


def _shown(frame: Frame, first: bool, definitions: svg.Definitions) -> str:
    caption = f"<p>{escape(frame.caption, quote=False)}</p>" if frame.caption else ""
    drawn = svg.inline(frame.figure, frame.alt, definitions)
    return f"<div{'' if first else ' hidden'}>{drawn}{caption}</div>\n"


def _require(name: str, frames: Sequence[Frame]) -> None:
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
