"""Chapter 5's pictures: a ring all-reduce, five collectives, and a grid of ranks and its groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Arc, Polygon

from muonbook.figures.player import Frame
from muonbook.figures.style import CARD, INK, MARGIN, MUTED, TITLE, TP_HATCHES, WIDTH, Block

from muonbook.figures.style import box, card, dp_colour, hatch_on, ink_on, mix, put  # isort: skip

# ---- The ring all-reduce ----------------------------------------------------------------------------------

# Every rank cuts its tensor into n chunks. In a move each rank passes one chunk on to its right neighbour and takes one
# from its left. n - 1 moves add (reduce-scatter), n - 1 more pass finished sums on (all-gather). Source: Patarasuk and
# Yuan (2009); rank r begins with chunk r, as in the `puzzle`.

CELL, TALL, EDGE, HEAD = 20.0, 29.0, 4.0, 18.0  # of a chunk; around a rank's chunks, and for its name above them
ACROSS, DOWN = 112.0, 98.0  # the ring's half axes
Held = tuple[tuple[frozenset[int], ...], ...]  # rank, chunk -> the ranks whose values are in it


class State(NamedTuple):
    """What every rank holds, and the index of the chunk that each passes on next; nothing after the last move."""

    holds: Held
    passes: tuple[int, ...] = ()


def ring_states(n: int) -> list[State]:
    """Return the 2 (n - 1) + 1 states of a ring all-reduce among n ranks, from the start to the end."""
    holds: Held = tuple(tuple(frozenset({rank}) for _ in range(n)) for rank in range(n))
    states = []
    for move in range(2 * (n - 1)):
        adding, turn = move < n - 1, move % (n - 1)
        passes = tuple((rank + (not adding) - turn) % n for rank in range(n))
        states.append(State(holds, passes))
        after = [list(chunks) for chunks in holds]
        for left, chunk in enumerate(passes):
            right = (left + 1) % n
            after[right][chunk] = holds[left][chunk] | (holds[right][chunk] if adding else frozenset())
        holds = tuple(map(tuple, after))
    return [*states, State(holds)]


def value(sources: frozenset[int], chunk: int) -> int:
    """Return the sum that a chunk holds: rank r's chunk c starts as the number 10 r + c."""
    return sum(10 * rank + chunk for rank in sources)


def frames_of_ring(n: int, payload: int) -> list[Frame]:
    """Return a ring all-reduce among n ranks, frame by frame: the start, every move, and a rest after each half.

    payload: bytes of the tensor that each rank brings; captions count what a rank has sent of it.
    """
    states, moves = ring_states(n), n - 1
    start = f"{n} ranks have a tensor of {n} chunks each, and need the sum of all."
    half = "Half of the moves are done, and each rank has one finished sum."
    frames = [_frame(states[0].holds, (), 0, payload, start)]
    for number, (holds, passes) in enumerate(states[:-1]):
        adding = number < moves
        doing = "add what arrives" if adding else "keep what arrives"
        if number == moves:
            frames.append(_frame(holds, (), number, payload, half))
        title = f"Move {number + 1} of {2 * moves}: pass a chunk to the right, {doing}."
        frames.append(_frame(holds, passes, number + 1, payload, title))
    frames.append(_frame(states[-1].holds, (), 2 * moves, payload, "Every rank holds all sums."))
    return frames


def _frame(holds: Held, passes: tuple[int, ...], moves: int, payload: int, title: str) -> Frame:
    """Return one frame. passes: the chunks on their way, none while the ring rests. moves: of a rank, with these."""
    n = len(holds)
    done, half = moves == 2 * (n - 1) and not passes, moves == n - 1 and not passes
    chunks_sent = f"{moves} chunk{'s' * (moves > 1)} of {payload / n / 1e6:.1f} MB = {payload * moves / n / 1e6:.1f} MB"
    caption = f"Sent by each rank so far: {chunks_sent if moves else 'nothing'}."
    if half:
        caption += " This was a reduce_scatter."
    if done:
        caption += f" That is 2({n} - 1)/{n} of its {payload / 1e6:.1f} MB. As ranks do the adding, less is impossible."
    line = f"{title} {caption}"
    alt = [line]
    for rank, chunks in enumerate(holds):
        values = ", ".join(str(value(sources, chunk)) for chunk, sources in enumerate(chunks))
        onward = f", passes on {value(chunks[passes[rank]], passes[rank])}" if passes else ""
        alt.append(f"Rank {rank} holds {values}{onward}.")
    return Frame(_draw_ring(holds, passes, moves), " ".join(alt), line)


def _draw_ring(holds: Held, passes: tuple[int, ...], moves: int) -> Figure:
    n, above = len(holds), TALL / 2 + HEAD + EDGE

    def paint(axes: Axes, top: float) -> None:
        centre = (WIDTH / 2, top + above + DOWN)
        for rank in range(n):
            _wire(axes, centre, rank, n, bool(passes))
        for rank, chunks in enumerate(holds):
            _tensor(axes, _place(centre, rank, n), rank, chunks, passes)
        for rank, chunk in enumerate(passes):
            x, y = _place(centre, rank + 0.5, n)
            box(axes, x - CELL / 2 - 3, y - TALL / 2 - 3, CELL + 6, TALL + 6, CARD, ec=INK, lw=1.4, gid="on its way")
            _chunk(axes, x - CELL / 2, y - TALL / 2, holds[rank][chunk], chunk, n)
        x, y = centre
        put(axes, x, y - 31, "each rank has sent", "center", color=MUTED)
        put(axes, x, y - 14, f"{moves / n:.2f}", "center", True, size=2 * TITLE)
        put(axes, x, y + 18, "tensors", "center", color=MUTED)

    drawing: Block = (2 * (DOWN + TALL / 2 + EDGE) + HEAD, paint)
    return card("", "", drawing)


def _place(centre: tuple[float, float], rank: float, n: int) -> tuple[float, float]:
    """Return where a rank stands on the ring: rank 0 at the top, the others clockwise, and wires between them."""
    turn = 2 * math.pi * rank / n
    return centre[0] + ACROSS * math.sin(turn), centre[1] - DOWN * math.cos(turn)


def _wire(axes: Axes, centre: tuple[float, float], rank: int, n: int, busy: bool) -> None:
    """Draw the wire from a rank to its right neighbour; while it is in use, with a head where it arrives."""
    colour, from_top = INK if busy else mix(MUTED, CARD, 0.55), 360 * rank / n - 90
    axes.add_patch(Arc(centre, 2 * ACROSS, 2 * DOWN, theta1=from_top, theta2=from_top + 360 / n, ec=colour, lw=1.5))
    if not busy:
        return
    x, y = _place(centre, rank + 1, n)
    way = [_place(centre, rank + 0.5 + step / 400, n) for step in range(201)]
    aside, high, low = n * CELL / 2 + EDGE, y - TALL / 2 - HEAD, y + TALL / 2 + EDGE  # the neighbour's frame
    tip = next(k for k, at in enumerate(way) if abs(at[0] - x) < aside and high < at[1] < low)
    (x1, y1), (x2, y2) = way[tip - 1], way[tip]
    far = math.hypot(x2 - x1, y2 - y1)
    dx, dy = (x2 - x1) / far, (y2 - y1) / far
    back = (x1 - 9 * dx, y1 - 9 * dy)
    corners = [(x1, y1), (back[0] - 4.5 * dy, back[1] + 4.5 * dx), (back[0] + 4.5 * dy, back[1] - 4.5 * dx)]
    axes.add_patch(Polygon(corners, fc=INK, lw=0))


def _tensor(
    axes: Axes, at: tuple[float, float], rank: int, chunks: tuple[frozenset[int], ...], passes: tuple[int, ...]
) -> None:
    """Draw what a rank holds; framed what it passes on, dashed where that of its left neighbour will go."""
    n = len(chunks)
    x, y = at[0] - n * CELL / 2, at[1] - TALL / 2
    box(axes, x - EDGE, y - HEAD, n * CELL + 2 * EDGE, TALL + HEAD + EDGE, CARD, ec=dp_colour(rank), lw=1.8)
    put(axes, at[0], y - HEAD + 2, f"rank {rank}", "center", True)
    for chunk, sources in enumerate(chunks):
        _chunk(axes, x + chunk * CELL, y, sources, chunk, n)
    looks: tuple[tuple[str, int, object], ...] = (("comes next", rank - 1, (0, (2, 1.4))), ("passed on", rank, "-"))
    for gid, sender, line in looks if passes else ():
        box(axes, x + passes[sender] * CELL, y, CELL, TALL, "none", ec=INK, lw=1.7, ls=line, gid=gid)


def _chunk(axes: Axes, x: float, y: float, sources: frozenset[int], chunk: int, n: int) -> None:
    """Draw one chunk: its sum so far, over n places for stripes, those filled whose rank is in the sum."""
    stripe, finished = (CELL - 4) / n, len(sources) == n
    box(axes, x + 1, y + 1, CELL - 2, TALL - 2, "none", ec=MUTED if finished else mix(MUTED, CARD, 0.5), lw=0.8)
    put(axes, x + CELL / 2, y + 2, str(value(sources, chunk)), "center", finished)
    for source in sorted(sources):
        box(axes, x + 2 + source * stripe, y + TALL - 11, stripe, 9, dp_colour(source), gid=f"source-{source}")


# ---- Five collectives -------------------------------------------------------------------------------------

HIGH, HEAD, WIRES = 27.0, 19.0, 92.0  # of a cell, of a rank's name, of the room between before and after
APART, DEEP = 7.0, 9.0  # between ranks; of the stripes under a sum
FAINT = mix(MUTED, CARD, 0.65)

SAID = {  # what each is needed for, and what it has done
    "broadcast": (
        "one rank has what all ranks need.",
        "what the other ranks held is overwritten. Initial weights are sent like this.",
    ),
    "all_reduce": (
        "every rank has a term, and all ranks need the sum.",
        "a striped cell is a sum, with a stripe for each rank in it. We draw a line for each rank, not for each value. "
        "Gradients are added like this.",
    ),
    "reduce_scatter": (
        "the same sums, but each rank needs only its own part.",
        "each rank has a quarter of the sums, and goes on to work on that quarter.",
    ),
    "all_gather": ("every rank has a part, and all ranks need the whole.", "each rank has the parts of all ranks."),
    "all_to_all": (
        "every rank has one element for each rank.",
        "rank r has element r of every rank. Rows became columns, so this is a transpose.",
    ),
}
Move = Mapping[str, Any]  # before, after: values; origins: for each value after, the [rank, element] that are in it


def frames_of_collectives(ranks: Sequence[Mapping[str, Move]]) -> list[Frame]:
    """Return each collective twice: on its way, and done. ranks: per rank, op -> Move.

    Raises ValueError where the tensors of all ranks do not fit beside each other.
    """
    frames = []
    for op, (doing, done) in SAID.items():
        moves = [rank[op] for rank in ranks]
        way, end = f"{op}: {doing}", f"{op}, done: {done}"
        frames.append(Frame(_draw(op, moves, done=False), f"{way} {_held(moves, 'before')}", way))
        frames.append(Frame(_draw(op, moves, done=True), f"{end} {_held(moves, 'after')}", end))
    return frames


def _held(moves: Sequence[Move], when: str) -> str:
    held = [", ".join(map(str, move[when])) for move in moves]
    if len(set(held)) == 1:
        return f"Every rank holds {held[0]}."
    return " ".join(f"Rank {rank} holds {values}." for rank, values in enumerate(held))


def _draw(title: str, moves: Sequence[Move], done: bool) -> Figure:
    """Draw what ranks hold on top and what they get below, joined by a line for every value that travels.

    Where every rank gets the same sums, the lines go to the sums in the middle and from there to the ranks.
    """
    ranks = len(moves)
    most = max(len(move[when]) for move in moves for when in ("before", "after"))
    share = (WIDTH - 2 * MARGIN - APART * (ranks - 1)) / ranks
    across = share / most
    shared = len(moves[0]["origins"][0]) > 1 and all(move["origins"] == moves[0]["origins"] for move in moves)

    def middle(rank: int) -> float:
        return MARGIN + (rank + 0.5) * share + rank * APART

    def left(rank: int, elements: int) -> float:
        return middle(rank) - elements * across / 2

    def paint(axes: Axes, top: float) -> None:
        put(axes, WIDTH / 2, top, title, "center", True, size=TITLE)
        above = top + 24 + HEAD
        below = above + HIGH + WIRES
        for rank, move in enumerate(moves):
            put(axes, middle(rank), above - HEAD + 1, f"rank {rank}", "center", True)
            put(axes, middle(rank), below + HIGH + 5, f"rank {rank}", "center", True)
            for n, value in enumerate(move["before"]):
                _cell(axes, left(rank, len(move["before"])) + n * across, above, across, value, [rank])
        sums = above + HIGH + (WIRES - HIGH) / 2
        lines: dict[str, list[Any]] = {}  # a rank's colour -> from where to where
        for rank, move in enumerate(moves):
            if shared:
                lines.setdefault(dp_colour(rank), []).append([(middle(rank), above + HIGH), (WIDTH / 2, sums)])
                lines.setdefault(MUTED, []).append([(WIDTH / 2, sums + HIGH), (middle(rank), below)])
                continue
            for n, origins in enumerate(move["origins"]):
                end = (left(rank, len(move["after"])) + (n + 0.5) * across, below)
                for source, element in origins:
                    start = left(source, len(moves[source]["before"])) + (element + 0.5) * across
                    lines.setdefault(dp_colour(source), []).append([(start, above + HIGH), end])
        for colour, where in lines.items():
            ink = mix(colour, CARD, 0.7) if done else colour
            axes.add_collection(LineCollection(where, colors=ink, linewidths=2.4 if shared else 1.5, gid="lines"))
        rows = [(left(rank, len(move["after"])), below, move) for rank, move in enumerate(moves)]
        if shared:
            x = WIDTH / 2 - len(moves[0]["after"]) * across / 2
            put(axes, x - 8, sums + HIGH / 2 - 7, "sums", "right")
            rows.append((x, sums, moves[0]))
        for start, y, move in rows:
            for n, value in enumerate(move["after"]):
                sources = sorted({source for source, _ in move["origins"][n]}) if done or y == sums else []
                _cell(axes, start + n * across, y, across, value, sources)

    drawing: Block = (24 + 2 * HEAD + 2 * HIGH + WIRES, paint)
    return card("", "", drawing)


def _cell(axes: Axes, x: float, y: float, across: float, value: int, sources: Sequence[int]) -> None:
    """Draw a value in the colour of its rank, or a sum over a stripe for each of its ranks; empty without `sources`."""
    if len(sources) == 1:
        box(axes, x + 1, y + 1, across - 2, HIGH - 2, dp_colour(sources[0]), gid=f"source-{sources[0]}")
        put(axes, x + across / 2, y + HIGH / 2 - 7, str(value), "center", color=ink_on(dp_colour(sources[0])))
        return
    looks: dict[str, Any] = {"ec": MUTED, "gid": "sum"} if sources else {"ec": FAINT, "ls": (0, (2, 2))}
    box(axes, x + 1, y + 1, across - 2, HIGH - 2, CARD, lw=0.8, **looks)
    for n, source in enumerate(sources):
        stripe = (across - 2) / len(sources)
        box(axes, x + 1 + n * stripe, y + HIGH - DEEP - 1, stripe, DEEP, dp_colour(source), gid=f"source-{source}")
    if sources:
        put(axes, x + across / 2, y + 2, str(value), "center")


# ---- The grid of ranks and its groups ---------------------------------------------------------------------

SQUARE, APART_Y, SIDE = 40.0, 16.0, 52.0  # of a rank; between rows; for the names of the rows


def frames_of_grid(met: Sequence[Mapping[str, Any]], dp: int, tp: int, of: int) -> list[Frame]:
    """Return the dp x tp grid, then its DP groups, its TP groups, and the two groups of rank `of`.

    met: per rank, its group rank ("rank") and the members ("met") of its "dp" and of its "tp" group, as a run found.
    """
    groups = [(kind, one[kind]["met"]) for kind in ("dp", "tp") for one in met if one[kind]["rank"] == 0]
    places = [f"rank {met[of][kind]['rank']} of its {kind.upper()} group" for kind in ("dp", "tp")]
    looks = {
        f"{dp * tp} ranks in a grid of {dp} x {tp}, numbered row by row.": [],
        "A DP group is a column: the same weights, different data.": groups[:tp],
        "A TP group is a row: the same data, different parts of each layer.": groups[tp:],
        f"Rank {of} is {' and '.join(places)}.": [(kind, met[of][kind]["met"]) for kind in ("dp", "tp")],
    }
    frames = []
    for caption, framed in looks.items():
        members = " ".join(f"{kind.upper()} group: {', '.join(map(str, ranks))}." for kind, ranks in framed)
        frames.append(Frame(_draw_grid(dp, tp, framed), f"{caption} {members}".strip(), caption))
    return frames


def _draw_grid(dp: int, tp: int, framed: Sequence[tuple[str, Sequence[int]]]) -> Figure:
    across, step = (WIDTH - 2 * MARGIN - SIDE) / tp, SQUARE + APART_Y

    def paint(axes: Axes, top: float) -> None:
        def corner(rank: int) -> tuple[float, float]:
            return MARGIN + SIDE + (rank % tp + 0.2) * across, top + 26 + rank // tp * step

        for column in range(tp):
            put(axes, corner(column)[0] + 0.3 * across, top, f"TP rank {column}", "center", True)
        for row in range(dp):
            put(axes, MARGIN, corner(row * tp)[1] + SQUARE / 2 - 7, f"DP rank {row}", bold=True)
        for kind, ranks in framed:
            (x1, y1), (x2, y2) = corner(ranks[0]), corner(ranks[-1])
            width, height = x2 - x1 + 0.6 * across, y2 - y1 + SQUARE
            box(axes, x1 - 6, y1 - 5, width + 12, height + 10, mix(INK, CARD, 0.9), ec=INK, lw=1.4, gid=f"{kind} group")
        for rank in range(dp * tp):
            colour, hatch, (x, y) = dp_colour(rank // tp), TP_HATCHES[rank % tp], corner(rank)
            looks: dict[str, Any] = {"ec": hatch_on(colour), "lw": 0, "hatch": hatch, "gid": f"rank {rank}"}
            box(axes, x, y, 0.6 * across, SQUARE, colour, **looks)
            middle = x + 0.3 * across
            box(axes, middle - 26, y + SQUARE / 2 - 9, 52, 18, colour)  # type on hatches is hard to read
            put(axes, middle, y + SQUARE / 2 - 7, f"rank {rank}", "center", True, color=ink_on(colour))

    drawing: Block = (26 + dp * step, paint)
    return card("", "", drawing)
