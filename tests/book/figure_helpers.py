"""What the tests of figures look at: the texts and boxes of a card, and whether its type can be read."""

from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text


def texts(figure: Figure) -> list[str]:
    """Return everything written on the card itself."""
    return [text.get_text() for text in figure.axes[0].texts]


def boxes(figure: Figure, start: str) -> list[Rectangle]:
    """Return what was drawn under an identifier that begins with `start`."""
    found = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    return [box for box in found if (box.get_gid() or "").startswith(start)]


def lines(figure: Figure, gid: str) -> list[LineCollection]:
    """Return the straight lines that were drawn under this identifier."""
    return [line for line in figure.findobj(LineCollection) if line.get_gid() == gid]  # type: ignore[attr-defined]


def curves(figure: Figure) -> dict[str, Line2D]:
    """Return the lines of `plots.draw_curves`, by name."""
    return {str(line.get_gid())[6:]: line for line in figure.axes[1].lines if str(line.get_gid()).startswith("curve-")}


def assert_readable(figure: Figure) -> None:
    """Assert that every text, plots included, is on the card, and that no two collide."""
    figure.draw_without_rendering()
    written = [text for axes in figure.axes for text in axes.texts]
    for axes in figure.axes[1:]:
        written.append(axes.xaxis.label)
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            written += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]  # drawn ones
    extents = [(text.get_text(), Text.get_window_extent(text)) for text in written if text.get_text()]  # no arrows
    for text, box in extents:
        assert 0 < box.x0 < box.x1 < figure.bbox.x1, text
        assert 0 < box.y0 < box.y1 < figure.bbox.y1, text
    for n, (text, box) in enumerate(extents):
        for other, another in extents[n + 1 :]:
            width = min(box.x1, another.x1) - max(box.x0, another.x0)
            height = min(box.y1, another.y1) - max(box.y0, another.y0)
            assert width <= 0 or height <= 3, (text, other)  # lines of type may touch where neither has ink
