"""What the tests of figures look at: the texts and boxes of a card, and whether its type can be read."""

from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from muonbook.figures import style


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
    """Assert that type is large enough, on the card, and apart: what `style.save` asks of every picture."""
    style.require_readable(figure, "a picture")
