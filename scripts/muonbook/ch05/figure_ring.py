"""The ring all-reduce as a ring: whose values are in which chunk on every rank, what travels, and what it has cost.

Every rank cuts its tensor into n chunks. In a move each rank passes one chunk on to its right neighbour and takes one
from its left. n - 1 moves add (reduce-scatter), n - 1 more hand finished sums on (all-gather). Source: Patarasuk and
Yuan (2009); here as in the `puzzle` beside it, where rank r begins with chunk r.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc, Polygon

from muonbook.figures.player import Frame
from muonbook.figures.style import CARD, INK, MUTED, TITLE, WIDTH, Block, box, card, dp_colour, mix, put

MOST = 4  # ranks whose chunks fit on the card
CELL, HIGH, EDGE, HEAD = 20.0, 29.0, 4.0, 18.0  # of a chunk; around a rank's chunks, and for its name above them
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
    Raises ValueError for less than 2 ranks or more than 4.
    """
    if not 2 <= n <= MOST:
        raise ValueError(f"a ring of {n} ranks: from 2 to {MOST} fit on the card.")
    states, moves = ring_states(n), n - 1
    frames = [_frame(states[0].holds, (), 0, payload, f"{n} ranks, {n} tensors. Each wants the sum of all.")]
    for number, (holds, passes) in enumerate(states[:-1]):
        adding = number < moves
        doing = "add what arrives" if adding else "keep what arrives"
        if number == moves:
            frames.append(_frame(holds, (), number, payload, "Half time: everyone has one finished chunk."))
        title = f"Move {number + 1} of {2 * moves}: pass a chunk right, {doing}."
        frames.append(_frame(holds, passes, number + 1, payload, title))
    frames.append(_frame(states[-1].holds, (), 2 * moves, payload, "Every rank holds every sum."))
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
        caption += f" That is 2({n} - 1)/{n} of the {payload / 1e6:.1f} MB it brought, and less is impossible."
    line = f"{title} {caption}"
    told = [line]
    for rank, chunks in enumerate(holds):
        values = ", ".join(str(value(sources, chunk)) for chunk, sources in enumerate(chunks))
        onward = f", passes on {value(chunks[passes[rank]], passes[rank])}" if passes else ""
        told.append(f"Rank {rank} holds {values}{onward}.")
    return Frame(_draw(holds, passes, moves), " ".join(told), line)


def _draw(holds: Held, passes: tuple[int, ...], moves: int) -> Figure:
    n, above = len(holds), HIGH / 2 + HEAD + EDGE

    def paint(axes: Axes, top: float) -> None:
        centre = (WIDTH / 2, top + above + DOWN)
        for rank in range(n):
            _wire(axes, centre, rank, n, bool(passes))
        for rank, chunks in enumerate(holds):
            _tensor(axes, _place(centre, rank, n), rank, chunks, passes)
        for rank, chunk in enumerate(passes):
            x, y = _place(centre, rank + 0.5, n)
            box(axes, x - CELL / 2 - 3, y - HIGH / 2 - 3, CELL + 6, HIGH + 6, CARD, ec=INK, lw=1.4, gid="on its way")
            _chunk(axes, x - CELL / 2, y - HIGH / 2, holds[rank][chunk], chunk, n)
        x, y = centre
        put(axes, x, y - 31, "each rank has sent", "center", color=MUTED)
        put(axes, x, y - 14, f"{moves / n:.2f}", "center", True, size=2 * TITLE)
        put(axes, x, y + 18, "tensors", "center", color=MUTED)

    drawing: Block = (2 * (DOWN + HIGH / 2 + EDGE) + HEAD, paint)
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
    aside, high, low = n * CELL / 2 + EDGE, y - HIGH / 2 - HEAD, y + HIGH / 2 + EDGE  # the neighbour's frame
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
    x, y = at[0] - n * CELL / 2, at[1] - HIGH / 2
    box(axes, x - EDGE, y - HEAD, n * CELL + 2 * EDGE, HIGH + HEAD + EDGE, CARD, ec=dp_colour(rank), lw=1.8)
    put(axes, at[0], y - HEAD + 2, f"rank {rank}", "center", True)
    for chunk, sources in enumerate(chunks):
        _chunk(axes, x + chunk * CELL, y, sources, chunk, n)
    looks: tuple[tuple[str, int, object], ...] = (("comes next", rank - 1, (0, (2, 1.4))), ("passed on", rank, "-"))
    for gid, sender, line in looks if passes else ():
        box(axes, x + passes[sender] * CELL, y, CELL, HIGH, "none", ec=INK, lw=1.7, ls=line, gid=gid)


def _chunk(axes: Axes, x: float, y: float, sources: frozenset[int], chunk: int, n: int) -> None:
    """Draw one chunk: its sum so far, over n places for stripes, those filled whose rank is in the sum."""
    stripe, finished = (CELL - 4) / n, len(sources) == n
    box(axes, x + 1, y + 1, CELL - 2, HIGH - 2, "none", ec=MUTED if finished else mix(MUTED, CARD, 0.5), lw=0.8)
    put(axes, x + CELL / 2, y + 2, str(value(sources, chunk)), "center", finished)
    for source in sorted(sources):
        box(axes, x + 2 + source * stripe, y + HIGH - 11, stripe, 9, dp_colour(source), gid=f"source-{source}")
