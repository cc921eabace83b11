"""One model on more and more ranks: the division that is quickest, what its fullest rank holds, where its time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from muonbook.figures.player import Frame
from muonbook.figures.style import ACCENT, COLD, INK, MARGIN, MUTED, PADDING, ROW, TEXT, WIDTH, in_bytes, mix

from muonbook.figures.style import box, page, put  # isort: skip

LOOKS = (INK, COLD, mix(COLD, "#FFFFFF", 0.45), PADDING, mix(MUTED, "#FFFFFF", 0.35), ACCENT)
PARTS = {  # of a step's time -> what their names begin with
    "the model": ("forward, backward",),
    "activations, tokens": ("activations", "tokens"),
    "bubble": ("bubble",),
    "gradients, parameters": ("gradients", "parameters", "summary", "tied embedding"),
    "Muon's momentum, updates": ("momentum", "updates", "blocks over TP"),
    "Newton–Schulz": ("Newton–Schulz",),
}
BAR, WIDE, TOP, HEIGHT = 20.0, WIDTH - 2 * MARGIN, 46.0, 330.0


def frames_of_sizes(sizes: Sequence[Mapping[str, Any]]) -> list[Frame]:
    """Return a frame for every size of world, as `divisions.survey` has them."""
    return [_frame(size) for size in sizes]


def _frame(size: Mapping[str, Any]) -> Frame:
    title = f"{size['title']} on {size['ranks']:,} ranks"
    if size["degrees"] is None:
        words = f"Nothing fits: no division of {size['ranks']:,} ranks leaves {in_bytes(size['room'])} enough."
        return Frame(
            page([(HEIGHT, lambda axes, top: put(axes, MARGIN, top, title, bold=True, size=TEXT))]), words, words
        )
    held, seconds = size["held"], by_part(size["seconds"])
    share = f"{size['of_the_peak']:.0%}"

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top, title, bold=True, size=TEXT)
        put(axes, MARGIN, top + 21, size["degrees"], color=MUTED)
        used = f"the fullest rank holds {in_bytes(sum(held.values()))} of {in_bytes(size['room'])}"
        below = _bar(axes, top + TOP, used, held, in_bytes, size["room"])
        took = f"a step: {size['step_seconds']:.3g} s, {share} of the peak"
        _bar(axes, below + 14, took, seconds, lambda part: f"{part:.2g} s")

    told = ", ".join(f"{name} {in_bytes(part)}" for name, part in held.items())
    parts = ", ".join(f"{name} {part:.2g} s" for name, part in seconds.items())
    alt = (
        f"{title}: {size['degrees']}. Held by the fullest rank, of {in_bytes(size['room'])}: {told}. A step takes "
        f"{size['step_seconds']:.3g} s, {share} of the peak: {parts}."
    )
    return Frame(page([(HEIGHT, paint)]), alt, f"The quickest division that fits: {size['degrees']}.")


def by_part(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return a step's seconds in the few parts that are drawn. Raises StopIteration for one that belongs to none."""
    found = dict.fromkeys(PARTS, 0.0)
    for name, took in seconds.items():
        found[next(part for part, begins in PARTS.items() if name.startswith(begins))] += took
    return found


def _bar(axes: Axes, top: float, title: str, parts: Mapping[str, float], tell: Any, limit: float = 0.0) -> float:
    """Paint a bar in parts with its key, and the limit as a line; return where it ends."""
    put(axes, MARGIN, top, title, bold=True)
    whole, x = max(limit, sum(parts.values())), MARGIN
    for part, look in zip(parts.values(), LOOKS, strict=True):
        box(axes, x, top + 20, WIDE * part / whole, BAR, look, ec="#FFFFFF", lw=0.6)
        x += WIDE * part / whole
    if limit:
        axes.vlines([MARGIN + WIDE * limit / whole], top + 16, top + BAR + 24, ACCENT, linestyles=(0, (3, 1.5)), lw=2)
    for row, (name, part, look) in enumerate(zip(parts, parts.values(), LOOKS, strict=True)):
        y = top + BAR + 28 + (ROW - 1) * row
        box(axes, MARGIN, y + 2, 10, 10, look)
        put(axes, MARGIN + 16, y, name, color=MUTED)
        put(axes, WIDTH - MARGIN, y, tell(part), "right", color=MUTED)
    return top + BAR + 28 + (ROW - 1) * len(parts)
