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
AUTOPLAY = Path(__file__).with_name("player_autoplay.js")  # what the script does besides in a film that plays by itself
FILM = re.compile(  # a player as `html` returns it: its name, definitions and frames
    r'.*? id="moving-([^"]+)".*?</style>\n(.*?)\n'
    r'<div class="moving-frames">\n(.*)\n</div>\n<div class="moving-controls".*',
    re.DOTALL,
)


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
    return _in_shell(name, definitions.html(), shown.rstrip())


def reshelled(film: str, still: int | None = None) -> str:
    """Return the frames of a player's HTML, as they are, in the shell of today.

    still: the film plays once by itself when it is seen, and where motion is unwelcome this frame stands there.
    """
    stored = FILM.fullmatch(film)
    assert stored is not None, "this is no player"
    return _in_shell(stored[1], stored[2], stored[3], still)


def words(frames: Sequence[Frame]) -> str:
    """Return what the frames show in words, a line for each: the alt text, numbered."""
    return "\n".join(f"{number}/{len(frames)}: {frame.alt}" for number, frame in enumerate(frames, 1))


def _in_shell(name: str, definitions: str, frames: str, still: int | None = None) -> str:
    shell, autoplay = (_stripped(path) for path in (SHELL, AUTOPLAY))
    blanks = {"NAME": name, "COUNT": str(len(frames.splitlines())), "DEFINITIONS": definitions, "FRAMES": frames}
    blanks |= {"FRAMEMS": str(FRAME_MS), "LETTERMS": str(LETTER_MS)}
    by_itself = still is not None
    blanks |= {"STILL": f' data-still="{still}"' * by_itself, "AUTOPLAY": f"\n{autoplay}" * by_itself}
    return re.sub(r"\[\[([A-Z]+)\]\]", lambda blank: blanks[blank[1]], shell)


def _stripped(path: Path) -> str:
    return "\n".join(line.strip() for line in path.read_text(encoding="utf-8").splitlines())


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
