"""The roofline of a GPU, and what it reached in Newton–Schulz: the picture of the roofline page."""

from __future__ import annotations

from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from muonbook.figures.plots import power
from muonbook.figures.style import ACCENT, INK, MARGIN, MUTED, ROW, WIDTH, card, inset, put
from muonbook.measure import results

MEMORY = 4.8  # 10^12 bytes per second: NVIDIA, H200 datasheet
BATCHED = "24x1024x4096"  # 24 matrices in one batch
SHOWN = {  # shape in book/results/gpu.json -> its name under the picture
    "1024x4096": "1024 × 4096",
    BATCHED: "24 of these in one batch",
    "2048x5632": "2048 × 5632",
    "4096x4096": "4096 × 4096",
    "8192x28672": "8192 × 28672",
}
TITLE, NOTE = (
    "What Newton–Schulz reached on an H200",
    "The line is what the data sheet allows. The numbered dots are measured; below, their share of the peak.",
)
X_LABEL, Y_LABEL = "operations for every byte", "10¹² operations per second"
HIGH, LABELS = 230.0, 42.0
X, Y = (40, 10_000), (70, 1_500)


class Point(NamedTuple):
    """intensity: operations per byte, if every product reads its factors once and writes its result once. tflops and
    share: what it reached, and of the peak."""

    name: str
    intensity: float
    tflops: float
    share: float


def intensity(a: int, b: int) -> float:
    """Return the operations per byte of a step of Newton–Schulz on [a, b], a <= b, in bf16.

    X X^T reads a b and writes a^2, its square reads and writes a^2, and the update reads a^2 and a b and writes a b.
    """
    return (4 * a * a * b + 2 * a**3) / (2 * (3 * a * b + 4 * a * a))


def points() -> list[Point]:
    """Return what `make gpu` measured."""
    rows = {row["shape"]: row for row in results.load("gpu")["speed"]["rows"]}
    found = []
    for shape, name in SHOWN.items():
        a, b = map(int, shape.split("x")[-2:])
        found.append(Point(name, intensity(a, b), rows[shape]["tflops"], rows[shape]["share_of_peak"]))
    return found


def peak() -> float:
    """Return 10^12 operations per second, of the data sheet."""
    return float(results.load("gpu")["speed"]["peak_tflops"])


def draw() -> tuple[Figure, str]:
    """Return the picture and its alt text."""
    top_speed, measured = peak(), points()

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 4, Y_LABEL, color=MUTED)
        plot = inset(axes, MARGIN + LABELS, top + 10 + ROW, WIDTH - 2 * MARGIN - LABELS, HIGH)
        plot.set(xscale="log", yscale="log", xlim=X, ylim=Y)
        plot.spines[["top", "right"]].set_visible(False)
        for axis, marks in ((plot.xaxis, LogLocator(numticks=5)), (plot.yaxis, LogLocator(subs=(1, 2, 5), numticks=9))):
            axis.set_major_locator(marks)
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))
        plot.set_xlabel(X_LABEL)
        corner = top_speed / MEMORY
        plot.plot([X[0], corner, X[1]], [MEMORY * X[0], top_speed, top_speed], color=INK, lw=2.2, gid="roof")
        told: dict[str, Any] = {"parse_math": False, "color": MUTED}
        plot.text(corner, 1.06 * top_speed, "limited by computing", va="bottom", **told)
        plot.text(1.35 * X[0], 1.05 * X[0] * MEMORY, "limited by memory", va="bottom", **told)
        for number, point in enumerate(measured, 1):
            plot.plot(point.intensity, point.tflops, "o", color=ACCENT, ms=7, gid=f"point-{point.name}")
            plot.text(point.intensity, 0.9 * point.tflops, str(number), ha="center", va="top", color=INK)
            row = top + 10 + ROW + HIGH + 42 + (number - 1) * ROW
            put(axes, MARGIN, row, f"{number}")
            put(axes, MARGIN + 16, row, point.name)
            put(axes, WIDTH - MARGIN, row, f"{100 * point.share:.0f} %", "right")

    return card(TITLE, NOTE, (HIGH + 10 + ROW + 46 + len(measured) * ROW, paint)), _described(top_speed, measured)


def _described(top_speed: float, measured: list[Point]) -> str:
    told = "; ".join(
        f"{point.name}: {point.intensity:,.0f} operations for every byte, "
        f"{point.tflops:.0f} ({100 * point.share:.0f} %)"
        for point in measured
    )
    return (
        f"{TITLE}. {Y_LABEL} over {X_LABEL}, both axes logarithmic. The roof rises to {top_speed:.0f} at "
        f"{top_speed / MEMORY:.0f} operations for every byte, and is flat from there. {told}."
    )
