"""Who orthogonalizes what: a column per rank, a row per matrix, as high as its Newton–Schulz is long.

A filled cell is a matrix in the hands of a rank; a column's ink is that rank's time. Drawn from the map alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from distmuon.optim import strategies
from distmuon.optim.newton_schulz import flops
from distmuon.sharding.layout import FLAT, Layout, ParamSpec
from distmuon.verify.prediction import predict_work
from muonbook.figures.player import Frame
from muonbook.figures.style import INK, MARGIN, MUTED, TEXT, TP_HATCHES, WIDTH

from muonbook.figures.style import box, dp_colour, hatch_on, page, put  # isort: skip

COLUMNS_LEFT, TABLE, LABELS = 62.0, 210.0, 62.0  # left of the first column; of all rows together; above and below them
BLOCKS, WIDE = 2, 64  # of the little transformer that is drawn


class WorkScene(NamedTuple):
    """One frame: a strategy on a grid, and what to say of it; {times} and {most} are filled in."""

    strategy: str
    dp: int
    tp: int
    caption: str


SCENES = (
    WorkScene(
        "gather_all", 1, 1, "One process orthogonalizes twelve matrices, each once. Whose work is it among eight?"
    ),
    WorkScene("gather_all", 2, 1, "Two ranks. The cut falls between two blocks: each does its half. So far, so good."),
    WorkScene(
        "gather_all",
        4,
        1,
        "Four: two cuts go through a matrix, which both neighbours do. {times} times the work of one process.",
    ),
    WorkScene(
        "gather_all", 8, 1, "Eight: {times} times. The busiest rank does {most} % of everything; 12.5 % were fair."
    ),
    WorkScene("gather_all", 4, 2, "With TP both ranks of a row repeat what their row does: {times} times."),
    WorkScene(
        "gather_all", 1, 8, "Eight ranks in a row: everybody does everything. Seven of eight need not have come."
    ),
    WorkScene("owner", 4, 2, "One owner per matrix: once. The busiest rank does {most} %."),
    WorkScene("owner", 8, 1, "And on any other grid of eight: once, in the same time."),
)


def transformer(tp: int) -> list[ParamSpec]:
    """Return the TP-local matrices of the little transformer, as the map sees them."""
    cuts: Mapping[str, tuple[tuple[int, int], int]] = {
        "query": ((WIDE, WIDE), 0),
        "key": ((WIDE, WIDE), 0),
        "value": ((WIDE, WIDE), 0),
        "out": ((WIDE, WIDE), 1),
        "up": ((4 * WIDE, WIDE), 0),
        "down": ((WIDE, 4 * WIDE), 1),
    }
    found = []
    for block in range(BLOCKS):
        for name, (shape, cut) in cuts.items():
            local = tuple(n // tp if dim == cut else n for dim, n in enumerate(shape))
            found.append(ParamSpec(f"{name} {block}", local, "float32", cut))
    return found


def frames_of_work(scenes: Sequence[WorkScene] = SCENES) -> list[Frame]:
    """Return a frame per scene, all for eight columns."""
    return [_frame(scene) for scene in scenes]


def lay_out(scene: WorkScene) -> Layout:
    """Return the strategy's map of the little transformer on the scene's grid, in one bucket."""
    specs = transformer(scene.tp)
    return strategies.planner(scene.strategy)(specs, range(len(specs)), scene.dp, scene.tp, FLAT)


def _frame(scene: WorkScene) -> Frame:
    layout, muon = lay_out(scene), range(len(transformer(1)))
    shares = [flops(spec.full_shape(scene.tp)) for spec in layout.specs]
    once = sum(shares)
    loads = {rank: load / once for rank, load in predict_work(scene.strategy, layout, scene.tp, muon).items()}
    tasks = strategies.costs_of(scene.strategy).tasks
    assert tasks is not None
    hands = {task.parameter: task.ranks for task in tasks(layout, muon, scene.tp)}
    caption = scene.caption.format(times=f"{sum(loads.values()):.3g}", most=f"{100 * max(loads.values()):.3g}")
    columns = list(loads)
    pitch = (WIDTH - MARGIN - COLUMNS_LEFT) / 8

    def paint(axes: Axes, top: float) -> None:
        grid = f"{scene.dp} DP x {scene.tp} TP" if len(columns) > 1 else "one process"
        put(axes, MARGIN, top, f"{scene.strategy}, {grid}" if len(columns) > 1 else grid, bold=True, size=TEXT)
        for number, rank in enumerate(columns):
            put(axes, COLUMNS_LEFT + pitch * (number + 0.5), top + 24, _short(rank, scene), "center", color=MUTED)
        y = top + 42
        for index, (spec, share) in enumerate(zip(layout.specs, shares, strict=True)):
            high = TABLE * share / once
            if high > 12:
                put(axes, MARGIN, y + high / 2 - 7, spec.name.split()[0], color=MUTED)
            for number, rank in enumerate(columns):
                held = rank in hands[index]
                _cell(axes, COLUMNS_LEFT + pitch * number + 2, y, pitch - 4, high, rank if held else None)
            y += high
        for number, load in enumerate(loads.values()):
            put(axes, COLUMNS_LEFT + pitch * (number + 0.5), y + 6, f"{100 * load:.3g}", "center")
        put(axes, MARGIN, y + 6, "% of all")

    told = ", ".join(f"{_short(rank, scene)} {100 * load:.3g}" for rank, load in loads.items())
    alt = f"{scene.strategy} on {scene.dp} DP x {scene.tp} TP ranks; share of one process's work, in %: {told}."
    return Frame(page([(TABLE + LABELS, paint)]), alt, caption)


def _short(rank: tuple[int, int], scene: WorkScene) -> str:
    dp, tp = rank
    return f"{dp}" if scene.tp == 1 else f"{dp},{tp}"


def _cell(axes: Axes, x: float, y: float, width: float, high: float, rank: tuple[int, int] | None) -> None:
    if rank is None:
        box(axes, x, y + 1, width, high - 2, "none", ec="#DEDBD3", lw=0.6)
        return
    dp, tp = rank
    colour, hatch = dp_colour(dp), TP_HATCHES[tp % len(TP_HATCHES)]
    looks = {"hatch": hatch, "ec": hatch_on(colour), "lw": 0.0} if hatch else {"ec": INK, "lw": 0.0}
    box(axes, x, y + 1, width, high - 2, colour, **looks)
