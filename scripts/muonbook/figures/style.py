"""What all pictures share: a card of their own, one palette, type for a phone. The only place that knows them.

Cards are drawn light; in dark mode the book turns them over (book.css), which keeps every hue.

One colour per DP rank, one hatch per TP rank, one grey for padding, one colour and dash per optimizer, and per
layout of Muon's, in every chapter. Figures are plain `Figure` objects, without pyplot: nothing needs a screen or
stays open, and a reader's own style does not change them. Lengths are points (1/72 inch), y downwards. A card is 360
wide, which is about a pixel per point on a phone, so the smallest type is 11 pixels high there; what has smaller type,
or words on other words, is not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.text import Text
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from muonbook.baselines import TITLES

# Okabe and Ito (2008) without black, on which no boundary would show; plum keeps its distance from the other seven in
# normal vision and in simulated protanopia, deuteranopia and tritanopia.
DP_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#5A2750")
TP_HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "oo", "++++")
PADDING, CARD, CARD_EDGE, INK, MUTED = "#C4C4C4", "#FCFBF8", "#DEDBD3", "#1D2029", "#555A66"
ACCENT, COLD = "#A8173A", "#24476B"  # for what is no rank: one strong colour, and its opposite on a diverging scale
# A curve's or a bar's looks, wherever it is an optimizer's; told apart by dash too, and no rank has these colours.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "Muon": {"color": ACCENT, "lw": 2.6, "ls": "-"},
    "AdamW": {"color": COLD, "lw": 2.4, "ls": (0, (4.5, 1.8))},
    "SGD": {"color": MUTED, "lw": 2.4, "ls": (0, (1, 1.3))},
}
# And of Muon's layouts, where several stand in one picture: red where all is gathered, ink where only what is cut.
LOOKS: Mapping[str, Mapping[str, Any]] = {
    **OPTIMIZERS,
    TITLES["muon"]: {"color": ACCENT, "lw": 2.6, "ls": "-"},
    TITLES["muon_flat"]: {"color": "#CE7E90", "lw": 2.6, "ls": (0, (4.5, 1.8))},
    TITLES["muon_cut"]: {"color": INK, "lw": 2.2, "ls": "-"},
    TITLES["muon_owner"]: {"color": "#989AA0", "lw": 2.6, "ls": (0, (1, 1.3))},
    TITLES["muon_single"]: {"color": "#8A6414", "lw": 2.4, "ls": (0, (6, 1.6, 1.2, 1.6))},
}
TITLE, TEXT, SMALL = 14.0, 12.5, 11.25
TOUCH = 2.0  # points by which two lines of type may overlap, for letters do not fill their line

WIDTH, MARGIN, LEFT = 360.0, 14.0, 58.0  # of the card, around its content, left of the strips
STRIP, ROW = WIDTH - LEFT - MARGIN, 16.0  # the longest strip, a line of small type
DPI = 216  # 1080 pixels across: the book shows a card 540 wide, on screens of up to two pixels for one
_FONT = {"font.family": "DejaVu Sans", "font.size": SMALL, "axes.edgecolor": INK, "legend.frameon": False}
_STYLE: list[Any] = ["default", {**_FONT, "hatch.linewidth": 0.8, "svg.hashsalt": "distmuon"}]
Block = tuple[float, Callable[[Axes, float], None]]  # height, and what paints it below a given top


def dp_colour(dp_rank: int) -> str:
    """Return the colour of a DP rank, "#rrggbb": eight, then the same eight lighter, then darker, then again."""
    base = DP_COLOURS[dp_rank % 8]
    return (base, mix(base, "#FFFFFF", 0.55), mix(base, "#000000", 0.35))[dp_rank // 8 % 3]


def baseline_of(name: str) -> str | None:
    """Return the optimizer or layout that a series is of, by its name: "owner", or "Muon, DDP"; None if of none."""
    return next((each for each in (name, name.split(",")[0]) if each in LOOKS), None)


def save(figure: Figure, path: str | Path, alt: str) -> Path:
    """Write `figure` as .png or .svg with its alt text inside; the same figure gives the same bytes.

    Raises ValueError as `require_readable` does, and for any other suffix.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"figures are saved as .png or .svg, not {path.suffix!r}.")
    path.write_bytes(png(figure, alt) if path.suffix == ".png" else vector(figure, alt, letters="path"))
    return path


def png(figure: Figure, alt: str) -> bytes:
    """Return `figure` as PNG (128 colours, which makes a page three times lighter) with its alt text inside.

    Raises ValueError as `require_readable` does.
    """
    require_readable(figure, alt)
    drawn, packed = BytesIO(), BytesIO()
    with style.context(_STYLE):
        figure.savefig(drawn, format="png", dpi=DPI)
    described = PngInfo()
    described.add_text("Description", alt)
    image = Image.open(drawn).quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    colours = image.getpalette("RGBA") or []  # quantizing mixes a hair of the transparent corners into the card
    image.putpalette([255 if n % 4 == 3 and c > 250 else c for n, c in enumerate(colours)], "RGBA")
    image.save(packed, format="png", optimize=True, pnginfo=described)
    return packed.getvalue()


def vector(figure: Figure, alt: str, letters: str = "none") -> bytes:
    """Return `figure` as SVG with its alt text as the title, and nothing of when and by what it was drawn.

    letters: "none": text stays text, for a page that names other fonts (svg.py); "path": shapes, which every viewer
    shows alike. Raises ValueError as `require_readable` does.
    """
    require_readable(figure, alt)
    drawn = BytesIO()
    with style.context([*_STYLE, {"svg.fonttype": letters}]):
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(drawn, format="svg", metadata={**unsaid, "Title": alt})
    return drawn.getvalue()


def require_readable(figure: Figure, alt: str) -> None:
    """Raise ValueError for an empty `alt`, for type below `SMALL`, which a phone would show too small, and for words
    that lie on others or beyond the picture's edge."""
    if not alt.strip():
        raise ValueError("a figure needs alt text that is not empty; the describe functions write it.")
    with style.context(_STYLE):
        figure.draw_without_rendering()  # the numbers along axes exist from here on
        written = _written(figure)
        for text in written:
            _require_large(text)
            _require_inside(text, figure)
        _require_apart(written)


def _written(figure: Figure) -> list[Any]:
    """Return what a figure says: all that is visible, but for the labels of marks beyond the end of an axis."""
    beyond = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        away = (tick for tick in ticks if not low <= tick.get_loc() <= high)
        beyond |= {label for tick in away for label in (tick.label1, tick.label2)}
    texts: list[Any] = figure.findobj(Text)
    return [text for text in texts if text.get_visible() and text.get_text().strip() and text not in beyond]


def _require_large(text: Any) -> None:
    words, size = text.get_text(), float(text.get_fontsize())
    if text.get_parse_math() and words.count("$") > 1 and set(words) & {"^", "_"}:
        size *= 0.7  # what matplotlib makes of 10⁻² with a formula
    if size < SMALL - 1e-6:
        raise ValueError(f"{words!r} is written in {size:.4g} points; the smallest type for a phone is {SMALL:g}.")


def _require_inside(text: Any, figure: Figure) -> None:
    its = Text.get_window_extent(text)  # of the words, without a box or an arrow
    if min(its.x0, its.y0) < 0 or its.x1 > figure.bbox.x1 or its.y1 > figure.bbox.y1:
        raise ValueError(f"{text.get_text()!r} goes beyond the edge of the picture; make it shorter, or move it.")


def _require_apart(written: Sequence[Any]) -> None:
    """Raise ValueError where two pieces of text overlap by more than `TOUCH` both ways."""
    extents = [(text, Text.get_window_extent(text)) for text in written]  # of the words, without a box around them
    for (one, its), (other, others) in combinations(extents, 2):
        across = min(its.x1, others.x1) - max(its.x0, others.x0)
        down = min(its.y1, others.y1) - max(its.y0, others.y0)
        if min(across, down) > TOUCH * one.figure.dpi / 72:
            raise ValueError(f"{one.get_text()!r} lies on {other.get_text()!r}; move one of them.")


# ---- The page: blocks from top to bottom, on one pair of axes that covers the card ----


def page(blocks: Sequence[Block]) -> Figure:
    """Return the card with these blocks on it, from top to bottom, on one pair of axes that covers it."""
    height, top = 2 * MARGIN + sum(height for height, _ in blocks), MARGIN
    with style.context(_STYLE):  # a reader's dark style would put light text on our light card
        figure = Figure(figsize=(WIDTH / 72, height / 72), facecolor="none")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
        axes.axis("off")
        card = FancyBboxPatch((1, 1), WIDTH - 2, height - 2, "round,pad=0,rounding_size=9", fc=CARD, ec=CARD_EDGE)
        axes.add_patch(card)
        for block_height, paint in blocks:
            paint(axes, top)
            top += block_height
    return figure


def card(title: str, note: str, *blocks: Block) -> Figure:
    """Return a page with a title and a note, if there are any, over these blocks."""
    return page([*heading(title, note), *blocks])


def heading(title: str, note: str) -> list[Block]:
    """Return the blocks of a title and of a note; of neither where it is empty."""
    return [text_block(text, size) for text, size in ((title, TITLE), (note, SMALL)) if text]


def text_block(text: str, size: float = SMALL, rest: str = "") -> Block:
    """Return wrapped text: bold where larger; with `rest`, cut after eight rows; a leading newline leaves room."""
    bold, room = size > SMALL, 12.0 * text.startswith("\n")
    rows = wrapped(text, WIDTH - 2 * MARGIN, size, bold, rest)

    def paint(axes: Axes, top: float) -> None:
        for n, row in enumerate(rows):
            colour = INK if bold else MUTED
            put(axes, MARGIN, top + room + 1.4 * size * n, row, bold=bold, color=colour, size=size)

    return room + 1.4 * size * len(rows) + (10 if rest else 2), paint


def wrapped(text: str, room: float, size: float = SMALL, bold: bool = False, rest: str = "") -> list[str]:
    """Return the rows of a text that is to be at most `room` points wide; with `rest`, eight rows that end in it."""
    rows: list[str] = []
    for word in text.split():
        longer = f"{rows[-1]} {word}" if rows else word
        if rows and wide(longer, size, bold) <= room:
            rows[-1] = longer
        else:
            rows.append(word)
    if rest and len(rows) > 8:
        last = rows[7].split()
        while last and wide(" ".join(last) + rest, size, bold) > room:
            last.pop()
        rows[7:] = [" ".join(last) + rest]
    return rows


def put(axes: Axes, x: float, y: float, text: str, ha: str = "left", bold: bool = False, **more: Any) -> None:
    """Write one line of small type with its top at `y`."""
    looks = {"color": INK, "weight": "bold" if bold else "normal", **more}
    axes.text(x, y, text, ha=ha, va="top", parse_math=False, **looks)


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    both: bool = False,  # a head at either end
    head: tuple[float, float] = (7, 3.5),  # length and half its width
    gid: str | None = None,
) -> None:
    """Draw an arrow from one point to another."""
    looks = f"{'<|' * both}-|>,head_length={head[0]},head_width={head[1]}"
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=looks, color=INK, lw=1.6, shrinkA=0, shrinkB=0, gid=gid))


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, **more: Any) -> None:
    """Paint a rectangle in points."""
    axes.add_patch(Rectangle((x, y), width, height, **{"fc": colour, "lw": 0.0, **more}))


def inset(axes: Axes, x: float, y: float, width: float, height: float) -> Axes:
    """Return axes of their own in a rectangle of the card, in points, for a plot."""
    total = axes.get_ylim()[0]
    return axes.figure.add_axes((x / WIDTH, 1 - (y + height) / total, width / WIDTH, height / total), facecolor="none")


def wide(text: str, size: float = SMALL, bold: bool = True) -> float:
    """Return how wide a line of type is, in points; bold small type if nothing else is said."""
    return size * sum(_advance(letter, bold) for letter in text)


@cache
def _advance(letter: str, bold: bool) -> float:
    """Return how far a letter moves the pen, in units of the size of the type."""
    font = get_font(findfont(FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")))
    font.set_size(100, 72)
    return float(font.load_char(ord(letter)).linearHoriAdvance) / 65536 / 100


def mix(colour: str, other: str, share: float) -> str:
    """Return a colour with a share of another in it."""
    r, g, b = ((1 - share) * mine + share * its for mine, its in zip(to_rgb(colour), to_rgb(other), strict=True))
    return to_hex((r, g, b))


def ink_on(colour: str) -> str:
    """Return the colour of type that reads better on this one: dark or white."""
    r, g, b = (part / 12.92 if part <= 0.04 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour))
    return INK if 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 else "#FFFFFF"


def hatch_on(colour: str) -> str:
    """Return the colour of a hatch that shows on this one, and of its edge."""
    return mix(colour, ink_on(colour), 0.5)


def in_bytes(number: float) -> str:
    """Return a number of bytes in decimal units and three digits: "42.5 kB"."""
    power = next((power for power in range(4) if number < 999.5 * 1000**power), 4)
    return f"{number / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
