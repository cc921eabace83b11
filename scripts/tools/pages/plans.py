"""What the planner's page shows: what its commands print, what they assume, and one model on more and more ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from muonbook.figures.player import Frame
from muonbook.figures.style import ACCENT, CARD, COLD, INK, MARGIN, MUTED, ROW, TEXT, WIDTH, in_bytes, mix
from muonbook.markdown_table import table
from muonbook.planner.cost_model import LinkCost
from muonbook.planner.fabrics import DEVICES, FABRICS, NODE, SUSTAINED

from muonbook.figures.style import box, page, put  # isort: skip

HELD_LOOKS = tuple(mix(COLD, "#FFFFFF", share) for share in (0.82, 0.66, 0.48, 0.28, 0.0))
TIME_LOOKS = (*(mix(INK, "#FFFFFF", share) for share in (0.85, 0.68, 0.5, 0.32, 0.1)), ACCENT)
PARTS = {  # of a step's time -> what their names begin with
    "the model": ("forward, backward",),
    "activations, tokens": ("activations", "tokens"),
    "bubble": ("bubble",),
    "gradients, parameters": ("gradients", "parameters", "summary", "tied embedding"),
    "Muon's momentum, updates": ("momentum", "updates", "blocks over TP"),
    "Newton–Schulz": ("Newton–Schulz",),
}
ABOVE, BETWEEN = 64.0, 28.0  # the bars
BAR, WIDE = 20.0, WIDTH - 2 * MARGIN  # how high a bar is, and how wide
COMMAND = re.compile(
    r"^```sh\n(python scripts/plan\.py .*)\n```\n\n```\{literalinclude\} figures/(\w+\.txt)$", re.MULTILINE
)


def printed(root: Path) -> dict[str, str]:
    """Run each command of book/planner.md that a listing follows; return {the listing's file: what it prints}."""
    page = (root / "book" / "planner.md").read_text(encoding="utf-8")
    return {file: _run(root, command.split()[1:]) for command, file in COMMAND.findall(page)}


def _run(root: Path, words: Sequence[str]) -> str:
    return subprocess.run([sys.executable, *words], cwd=root, check=True, capture_output=True, text=True).stdout


def assumed() -> str:
    """Return the speeds that a plan assumes of GPUs and of links, as two tables in Markdown."""
    devices = [
        (f"`{name}`", f"{one.memory_bytes / 1e9:.0f} GB", *map(_tflops, (one.peak_flops, SUSTAINED * one.peak_flops)))
        for name, one in DEVICES.items()
    ]
    links = [
        (f"`{name}`", *(_link(link, shared) for link, shared in ((one.inside, 1), (one.between, one.node))))
        for name, one in FABRICS.items()
    ]
    return "\n".join(
        [
            table(("`--device`", "memory", "peak in bf16", f"products reach {100 * SUSTAINED:.0f} % of it"), devices),
            table(("`--fabric`", f"between GPUs of a node of {NODE}", "between nodes, for each GPU"), links),
        ]
    )


def _tflops(rate: float) -> str:
    return f"{rate / 1e12:.0f} TFLOP/s"


def _link(link: LinkCost, shared: int) -> str:
    return f"{link.bytes_per_second / shared / 1e9:.3g} GB/s and {link.alpha_seconds * 1e6:.2g} µs"


def frames_of_sizes(sizes: Sequence[Mapping[str, Any]]) -> list[Frame]:
    """Return a frame for every size of world, as `divisions.survey` has them, in which anything fits."""
    return [_frame(size) for size in sizes if size["degrees"]]


def _frame(size: Mapping[str, Any]) -> Frame:
    title = f"{size['title']} on {size['ranks']:,} ranks"
    held, seconds = size["held"], by_part(size["seconds"])
    share = f"{size['of_the_peak']:.0%}"

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top, title, bold=True, size=TEXT)
        put(axes, MARGIN, top + 21, size["degrees"], color=MUTED)
        used = f"the fullest rank holds {in_bytes(sum(held.values()))} of {in_bytes(size['room'])}"
        took = f"a step: {size['step_seconds']:.3g} s, {share} of the peak"
        put(axes, MARGIN, top + 46, used, bold=True)
        _paint_bar(axes, top + ABOVE, held, HELD_LOOKS, in_bytes, size["room"])
        below = top + ABOVE + _bar_height(held)
        put(axes, MARGIN, below + 10, took, bold=True)
        _paint_bar(axes, below + BETWEEN, seconds, TIME_LOOKS, lambda part: f"{part:.2g} s")

    told = ", ".join(f"{name} {in_bytes(part)}" for name, part in held.items())
    parts = ", ".join(f"{name} {part:.2g} s" for name, part in seconds.items())
    alt = (
        f"{title}: {size['degrees']}. Held by the fullest rank, of {in_bytes(size['room'])}: {told}. A step takes "
        f"{size['step_seconds']:.3g} s, {share} of the peak: {parts}."
    )
    height = ABOVE + _bar_height(held) + BETWEEN + _bar_height(seconds)
    return Frame(page([(height, paint)]), alt, f"The quickest division that fits: {size['degrees']}.")


def by_part(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return a step's seconds in the few parts that are drawn. Raises StopIteration for one that belongs to none."""
    found = dict.fromkeys(PARTS, 0.0)
    for name, took in seconds.items():
        found[next(part for part, begins in PARTS.items() if name.startswith(begins))] += took
    return found


def _bar_height(parts: Mapping[str, float]) -> float:
    """Return how much room `_paint_bar` takes."""
    return BAR + 16 + ROW * len(parts)


def _paint_bar(
    axes: Axes, top: float, parts: Mapping[str, float], looks: Sequence[str], in_words: Callable[[float], str],
    limit: float = 0.0,
) -> None:  # fmt: skip
    """Paint a bar in parts, with its key below.

    looks: colours, at least as many as parts. in_words: a part's size. limit: where a dashed line stands, in the parts'
    unit; 0: nowhere.
    """
    whole, x = max(sum(parts.values()), limit), MARGIN
    for row, (name, part, look) in enumerate(zip(parts, parts.values(), looks[: len(parts)], strict=True)):
        width = WIDE * part / whole
        box(axes, x, top + 4, width, BAR, look, ec=CARD, lw=0.6)
        x += width
        y = top + BAR + 12 + ROW * row
        box(axes, MARGIN, y + 2, 10, 10, look)
        put(axes, MARGIN + 16, y, name, color=MUTED)
        put(axes, WIDTH - MARGIN, y, in_words(part), "right", color=MUTED)
    if limit:
        end = MARGIN + WIDE * limit / whole
        axes.vlines([end], top, top + BAR + 7, ACCENT, linestyles=(0, (3, 1.5)), lw=2)
