"""What the gather brings to a rank, as one bar per rank: for its own use, or for nothing."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.ch08.gather_efficiency import Freight
from muonbook.figures.style import CARD, COLD, INK, MARGIN, MUTED, PADDING, ROW, WIDTH

from muonbook.figures.style import box, card, mix, put  # isort: skip

KINDS = {  # what the parts are called, and how they look
    "cut": ("of matrices that it owns a piece of", COLD, ""),
    "mine": ("of matrices that it owned whole before", mix(COLD, CARD, 0.6), ""),
    "others": ("of matrices that it owns nothing of", CARD, "////"),
    "dead": ("zeros: AdamW's elements, and padding", PADDING, ""),
}
HIGH, PITCH = 18.0, 42.0


def draw_freight(rows: Mapping[str, Freight], title: str) -> Figure:
    """Draw one bar per row, all equally long; beside its name, the share that the rank has use for."""

    def key(axes: Axes, top: float) -> None:
        for n, (meaning, colour, hatch) in enumerate(KINDS.values()):
            box(axes, MARGIN, top + n * ROW, 22, 11, colour, hatch=hatch, ec=MUTED, lw=0.8 * bool(hatch))
            put(axes, MARGIN + 30, top + n * ROW, meaning, color=MUTED)

    def paint(axes: Axes, top: float) -> None:
        for n, (name, freight) in enumerate(rows.items()):
            y, x = top + 8 + n * PITCH, MARGIN
            put(axes, MARGIN, y, name)
            put(axes, WIDTH - MARGIN, y, f"of use: {100 * freight.cut:.0f} %", "right", True)
            for (kind, share), (_, colour, hatch) in zip(freight._asdict().items(), KINDS.values(), strict=True):
                across = share * (WIDTH - 2 * MARGIN)
                box(axes, x, y + ROW, across, HIGH, colour, hatch=hatch, ec=MUTED, gid=f"{kind}-{name}")
                x += across
            box(axes, MARGIN, y + ROW, WIDTH - 2 * MARGIN, HIGH, "none", ec=INK, lw=0.8)

    return card(title, "", (ROW * len(KINDS) + 4, key), (PITCH * len(rows) + 4, paint))


def describe_freight(rows: Mapping[str, Freight], title: str) -> str:
    """Return alt text for `draw_freight`, with every share."""
    told = [
        f"{name}: {', '.join(f'{100 * share:.0f} % {kind}' for kind, share in freight._asdict().items())}"
        for name, freight in rows.items()
    ]
    kinds = "; ".join(f"{kind}, {meaning}" for kind, (meaning, _, _) in KINDS.items())
    return f"{title}. Shares are {kinds}. {'; '.join(told)}."
