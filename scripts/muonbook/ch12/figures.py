"""Chapter 12's pictures: what ranks hold when Newton–Schulz begins, what a step sends, and which matrices travel.

Whatever is laid out in them is laid out by the planners of our own strategies.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distmuon.sharding.gradients import STATISTICS_LABEL
from distmuon.sharding.layout import FLAT, Layout, ParamSpec, Range
from distmuon.sharding.ledger import Entry, Ledger
from muonbook.baselines import TITLES
from muonbook.ch12.four_counts import LAYOUTS
from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_bars, draw_bars, head
from muonbook.figures.style import ACCENT, CARD, COLD, INK, MARGIN, MUTED, PADDING, ROW, WIDTH, Block
from muonbook.measure import formulas
from muonbook.measure.workload import Workload
from muonbook.planner.owned_worlds import plan_part
from muonbook.runnable_baselines import RUNNABLE

from muonbook.figures.style import box, card, dp_colour, ink_on, mix, put  # isort: skip

# ---- What is in a DP rank's hands when Newton–Schulz begins: its own shard, and what it received ------------

D = 4
ROWS = (56, 96, 40, 64, 72, 48, 40)  # of seven matrices with 32 columns each
MATRICES = [ParamSpec(f"W{n}", (rows, 32), "float32") for n, rows in enumerate(ROWS)]
ELEMENTS = sum(spec.numel for spec in MATRICES)
BUCKET = 4096  # elements; a flat buffer is one bucket for all
LABELS, LINE, GAP = 42.0, 11.0, 3.0  # room for a rank's name; how high what it holds is; below each rank
ACROSS = WIDTH - 2 * MARGIN - LABELS


class HeldPiece(NamedTuple):
    """A run of the buffer that `holder` needs, and `owner` keeps."""

    holder: int
    owner: int
    where: Range

    @property
    def received(self) -> bool:
        return self.holder != self.owner


def laid_out(name: str) -> Layout:
    """Return the seven matrices as a baseline of `LAYOUTS` lays them out."""
    baseline = LAYOUTS[name]
    size = ELEMENTS if baseline.elements == FLAT else BUCKET
    return plan_part(MATRICES, range(len(MATRICES)), D, 1, size, baseline.strategy).layout


def pieces(name: str) -> list[HeldPiece]:
    """Return all pieces that ranks hold when they orthogonalize: their own, and those they received."""
    layout, everybody = laid_out(name), LAYOUTS[name].strategy == "gather_all"
    found = []
    for bucket in layout.buckets:
        for index in bucket.params:
            owners = layout.owners(bucket, index)
            held = [HeldPiece(owner, owner, layout.meta(bucket, index, owner).local_range) for owner in owners]
            for holder in range(D) if everybody else owners:
                found += [piece._replace(holder=holder) for piece in held]
    return found


def received(name: str) -> float:
    """Return which share of all elements a rank receives, mean over ranks."""
    return sum(p.where.size for p in pieces(name) if p.received) / (D * ELEMENTS)


def draw_pieces(title: str = "") -> Figure:
    """Draw, for every baseline, the buffer from left to right and what each rank holds of it."""
    note = "What four DP ranks hold of seven matrices, between lines. Strong: kept. Pale: received."
    return card(title, note, *(_pieces_block(name) for name in LAYOUTS))


def describe_pieces(title: str = "") -> str:
    """Return alt text for `draw_pieces`: what a rank receives, and among how many ranks the matrices are cut."""
    told = []
    for name, baseline in LAYOUTS.items():
        layout = laid_out(name)
        cut = [len(layout.owners(bucket, index)) for bucket in layout.buckets for index in bucket.params]
        told.append(f"{baseline.title}: {sum(n > 1 for n in cut)} of {len(cut)} matrices are cut, a rank receives "
                    f"{100 * received(name):.0f} % of all")  # fmt: skip
    return f"{head(title, 'Pieces of matrices')} Seven matrices on four DP ranks. {'; '.join(told)}."


def _pieces_block(name: str) -> Block:
    layout, held = laid_out(name), pieces(name)
    scale = ACROSS / layout.buffers[0].size

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 6, LAYOUTS[name].title, bold=True)
        put(axes, WIDTH - MARGIN, top + 6, f"receives {100 * received(name):.0f} %", "right", bold=True)
        y = top + 8 + ROW
        for rank in range(D):
            put(axes, MARGIN, y + rank * (LINE + GAP) - 1, f"rank {rank}", color=MUTED)
        for piece in held:
            colour = dp_colour(piece.owner)
            x, row = MARGIN + LABELS + scale * piece.where.start, y + piece.holder * (LINE + GAP)
            box(axes, x, row, scale * piece.where.size, LINE, mix(colour, CARD, 0.62) if piece.received else colour)
        for where in layout.global_ranges:
            for end in (where.start, where.end):
                axes.vlines([MARGIN + LABELS + scale * end], y - 2, y + D * (LINE + GAP) - 1, INK, lw=0.9)

    return 8 + ROW + D * (LINE + GAP) + 8, paint


# ---- What a step sends, and what for ------------------------------------------------------------------------

SHOWN = ("zero1", "muon", "muon_flat", "muon_cut", "muon_owner")
GRADIENTS, PARAMETERS = "gradients", "parameters"
PURPOSES = (GRADIENTS, PARAMETERS, "momentum over DP", "momentum over TP or mesh")
ACTIVATIONS = "activations"
BEYOND = "padding"  # gradients and parameters beyond those of AdamW, which keeps the same ones
COLOURS = {GRADIENTS: COLD, PARAMETERS: mix(COLD, CARD, 0.45), BEYOND: PADDING}


def purpose(entry: Entry) -> str:
    """Return what a collective is for; the few bytes of the gradients' norms count with the gradients.

    Momentum to owners and updates back are one purpose: whole matrices.
    """
    kind = entry.label.partition(",")[0]
    if entry.label == STATISTICS_LABEL or kind == GRADIENTS or entry.op == "reduce_scatter":
        return GRADIENTS
    if kind in ("momentum", "updates"):
        return PURPOSES[2 if entry.group == "dp" else 3]
    return ACTIVATIONS if entry.group == "tp" else PARAMETERS


def sent_by_purpose(ledger: Ledger) -> dict[str, float]:
    """Return {purpose: bytes sent}, for all purposes, and activations."""
    found = dict.fromkeys((*PURPOSES, ACTIVATIONS), 0.0)
    for entry, traffic in ledger:
        found[purpose(entry)] += traffic.sent_bytes
    return found


def step_rows(workload: Workload, dp: int, tp: int, names: Sequence[str] = SHOWN) -> dict[str, dict[str, float]]:
    """Return what a rank is predicted to send in one step, mean over ranks, by baseline and purpose.

    Without activations, which all have in common. names: of `RUNNABLE` with a prediction.
    """
    ranks = [(d, t) for d in range(dp) for t in range(tp)]
    rows = {}
    for baseline in (RUNNABLE[name] for name in names):
        rows[baseline.title] = mean = dict.fromkeys(PURPOSES, 0.0)
        for rank in ranks:
            sent = sent_by_purpose(baseline.predict(workload, dp, tp, rank))
            for what in PURPOSES:
                mean[what] += sent[what] / len(ranks)
    return rows


def step_frames(workload: Workload, grids: Sequence[tuple[int, int]]) -> list[Frame]:
    """Return one frame per grid, all on one scale."""
    of = {(dp, tp): _padding_apart(step_rows(workload.shared_by(dp), dp, tp)) for dp, tp in grids}
    most = max(sum(row.values()) for rows in of.values() for row in rows.values())
    frames = []
    for (dp, tp), rows in of.items():
        words: dict[str, Any] = dict(
            title=f"One step on {dp} DP × {tp} TP ranks", note="Bytes that a rank sends, predicted.", colours=COLOURS
        )
        over = {name: sum(row.values()) / sum(rows[TITLES["zero1"]].values()) for name, row in rows.items()}
        caption = "; ".join(f"{name} {over[name]:.2f}" for name in rows if name != TITLES["zero1"])
        caption = f"Over ZeRO-1 AdamW: {caption}."
        frames.append(Frame(draw_bars(rows, **words, most=most), describe_bars(rows, **words), caption))
    return frames


def _padding_apart(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return rows of ZeRO-1 optimizers in which gradients and parameters are at most AdamW's, and the rest padding."""
    adamw, found = rows[TITLES["zero1"]], {}
    for name, row in rows.items():
        found[name] = {what.removesuffix(" or mesh"): sent for what, sent in row.items()}
        found[name] |= {what: min(row[what], adamw[what]) for what in (GRADIENTS, PARAMETERS)}
        found[name][BEYOND] = sum(row.values()) - sum(found[name].values())
    return found


# ---- Why large models stand near 1: the same seven boundaries through ever more matrices --------------------

STRIP_D = 8
SHAPE = (8, 8)  # of every matrix: in shards of an odd number of them no boundary falls between two
HIGH, OUT = 20.0, 5.0  # a strip; how far boundaries stick out


class Strip(NamedTuple):
    """A model in one flat buffer. spread: on how many ranks each matrix lies; ratio: Muon / ZeRO-1 AdamW, in bytes."""

    layout: Layout
    spread: list[int]
    ratio: Fraction


def strip(matrices: int) -> Strip:
    """Lay out so many equal matrices."""
    specs = [ParamSpec(f"W{n}", SHAPE, "float32") for n in range(matrices)]
    layout = plan_part(specs, range(matrices), STRIP_D, 1, sum(spec.numel for spec in specs), "gather_cut").layout
    (bucket,) = layout.buckets
    spread = [len(layout.owners(bucket, index)) for index in bucket.params]
    s = formulas.mean_owners(layout, range(matrices))
    return Strip(layout, spread, formulas.ratio("gather_cut", STRIP_D, 1, g=4, w=4, m=2, s=s))  # in the paper's dtypes


def draw_strips(sizes: Sequence[int], title: str = "") -> Figure:
    """Draw a strip for every number of matrices: those that a boundary cuts in red, and the ratio beside it."""
    return card(
        title, "Eight DP ranks, seven boundaries. Red: cut, so that it has to travel.", *map(_strip_block, sizes)
    )


def describe_strips(sizes: Sequence[int], title: str = "") -> str:
    """Return alt text for `draw_strips`: how many matrices are cut, and what that makes of the ratio."""
    told = []
    for size in sizes:
        found = strip(size)
        told.append(f"{_named(size)}, {sum(s > 1 for s in found.spread)} cut: {float(found.ratio):.3f}")
    return f"{head(title, 'Boundaries and matrices')} Eight DP ranks, bytes of Muon / ZeRO-1 AdamW. {'; '.join(told)}."


def _named(size: int) -> str:
    return f"{size} {'matrix' if size == 1 else 'matrices'}"


def _strip_block(size: int) -> Block:
    layout, spread, ratio = strip(size)
    scale = (WIDTH - 2 * MARGIN) / layout.buffers[0].size

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 6, _named(size))
        put(axes, WIDTH - MARGIN, top + 6, f"{float(ratio):.3f} ×", "right", bold=True)
        y = top + 8 + ROW + OUT
        for where, ranks in zip(layout.global_ranges, spread, strict=True):
            colour = ACCENT if ranks > 1 else mix(MUTED, CARD, 0.7)
            x, gid = MARGIN + scale * where.start, f"matrix-{size}"
            box(axes, x, y, scale * where.size, HIGH, colour, ec=CARD, lw=0.7, gid=gid)
        ends = [MARGIN + (WIDTH - 2 * MARGIN) * rank / STRIP_D for rank in range(1, STRIP_D)]
        axes.vlines(ends, y - OUT, y + HIGH + OUT, INK, lw=1.1, gid=f"boundaries-{size}")

    return 8 + ROW + HIGH + 2 * OUT + 6, paint


# ---- What TP costs: where one part of one matrix travels ----------------------------------------------------

PARTS_D, PARTS_T = 4, 8  # of the grid on which one part is followed
ADAMW_BYTES, MOMENTUM_BYTES = 8, 2  # per element: gradient and parameter in float32; momentum in bf16
NAMES, CELL = 48.0, 17.0  # room for a TP rank's name; a rank's height


def frames_of_parts(title: str = "") -> list[Frame]:
    """Return where TP rank 0's part of one matrix goes: with AdamW; with Muon, where one DP rank holds a piece, or two.

    That is all that is sent of this part. Two holders send each other their pieces of it (*gather cut*).
    """
    captions = (
        "AdamW: gradient and parameter, over DP.",
        "Muon: momentum as well, over TP, on the DP rank that holds the matrix.",
        "Two DP ranks hold a piece each: they send it to each other, and both gather over TP.",
    )
    frames, adamw = [], (PARTS_D - 1) * ADAMW_BYTES
    for holders, caption in enumerate(captions):
        times = holders - 1 + holders * (PARTS_T - 1) if holders else 0
        muon = times * MOMENTUM_BYTES
        told = [
            f"AdamW: {PARTS_D - 1} × {ADAMW_BYTES} bytes = {adamw}",
            f"Muon adds {times} × {MOMENTUM_BYTES} bytes = {muon}: in all {1 + muon / adamw:.2f} ×" if holders else "",
        ]
        note = "Bytes per element. Black: TP rank 0's part of one matrix."
        figure = card(title, note, _grid_of_parts(holders), _lines(told))
        alt = f"{head(title, 'One part')} {PARTS_D} DP × {PARTS_T} TP ranks. {'. '.join(filter(None, told))}."
        frames.append(Frame(figure, alt, caption))
    return frames


def _grid_of_parts(holders: int) -> Block:
    """Return the grid: a column per DP rank, TP rank 0 on top. holders: DP ranks that gather over TP."""
    across = (WIDTH - 2 * MARGIN - NAMES) / PARTS_D

    def paint(axes: Axes, top: float) -> None:
        for d in range(PARTS_D):
            put(axes, MARGIN + NAMES + across * (d + 0.5), top + 6, f"DP {d}", "center", color=MUTED)
        for t in range(PARTS_T):
            y = top + 8 + ROW + CELL * t
            put(axes, MARGIN, y + 2, f"TP {t}", color=MUTED)
            for d in range(PARTS_D):
                sent = _sent_to(d, t, holders)
                wide = (across - 2) / len(sent)
                for n, (colour, words) in enumerate(sent):
                    x = MARGIN + NAMES + across * d + 1 + wide * n
                    box(axes, x, y, wide, CELL - 2, colour, gid=f"part-{d}-{t}")
                    if words:
                        put(axes, x + wide / 2, y + 2, words, "center", color=ink_on(colour))

    return 8 + ROW + CELL * PARTS_T + 4, paint


def _sent_to(d: int, t: int, holders: int) -> list[tuple[str, str]]:
    """Return what a rank is sent per element of the part, AdamW's bytes and momentum: (colour, bytes) of each."""
    momentum = ACCENT, str(MOMENTUM_BYTES)
    if (d, t) == (0, 0):
        return [(INK, "")]
    if t == 0:
        return [(COLD, str(ADAMW_BYTES)), *[momentum] * (d < holders)]
    return [momentum if d < holders else (mix(MUTED, CARD, 0.75), "")]


def _lines(told: Sequence[str]) -> Block:
    def paint(axes: Axes, top: float) -> None:
        for n, (line, colour) in enumerate(zip(told, (COLD, ACCENT), strict=True)):
            put(axes, MARGIN, top + 4 + ROW * n, line, bold=True, color=colour)

    return 8 + ROW * len(told), paint
