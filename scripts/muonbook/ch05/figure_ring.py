"""The ring all-reduce as a picture: which ranks' values are in which chunk, on every rank, after every move.

Every rank cuts its tensor into n chunks. In a move each rank passes one chunk on to its right neighbour and takes one
from its left. n - 1 moves add (reduce-scatter), n - 1 more hand finished sums on (all-gather). Source: Patarasuk and
Yuan (2009); here as in the `puzzle` beside it, where rank r begins with chunk r.
"""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures.style import INK, MARGIN, MUTED, ROW, WIDTH, Block, box, card, dp_colour, mix, put, text_block

MOST = 5  # ranks that fit on a card
LABELS, BETWEEN, HIGH = 54.0, 12.0, 24.0  # room for the names of moves, between ranks, of a chunk
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


def draw_ring(n: int) -> Figure:
    """Draw the states of a ring of n ranks, a row per move. Raises ValueError for less than 2 ranks or more than 5."""
    if not 2 <= n <= MOST:
        raise ValueError(f"a ring of {n} ranks: from 2 to {MOST} fit on the card.")
    states, moves = ring_states(n), n - 1
    across = min(28.0, (WIDTH - 2 * MARGIN - LABELS - (n - 1) * BETWEEN) / n**2)
    blocks = [_heads(n, across)]
    for number, state in enumerate(states):
        blocks.append(_row("start" if number == 0 else f"move {number}", state, across))
        if number == moves:
            blocks.append(text_block("↑ added up: one finished chunk per rank, as after reduce_scatter"))
    blocks.append(text_block("↑ handed on: every chunk finished on every rank, as after all_reduce"))
    blocks.append(text_block("A stripe: that rank is in the sum. Framed: goes right next."))
    return card(f"A ring of {n} ranks, move by move", "", *blocks)


def describe_ring(n: int) -> str:
    """Return alt text for `draw_ring`: rank 0's chunks after every move."""
    told = []
    for number, (holds, _) in enumerate(ring_states(n)):
        sums = ", ".join("+".join(map(str, sorted(chunk))) for chunk in holds[0])
        told.append(f"{f'after move {number}' if number else 'at the start'} {sums}")
    return (
        f"A ring all-reduce among {n} ranks, drawn as the chunks that each holds after each of {2 * (n - 1)} moves, "
        f"with a stripe for each rank whose value is in a chunk. Rank 0's chunks hold the values of these ranks: "
        f"{'; '.join(told)}. The other ranks look alike, turned by one chunk per rank."
    )


def _left(rank: int, n: int, across: float) -> float:
    return MARGIN + LABELS + rank * (n * across + BETWEEN)


def _heads(n: int, across: float) -> Block:
    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 4 + ROW, "chunk", color=MUTED)
        for rank in range(n):
            x = _left(rank, n, across)
            put(axes, x + n * across / 2, top + 2, f"rank {rank}", "center", True)
            for chunk in range(n):
                put(axes, x + (chunk + 0.5) * across, top + 4 + ROW, str(chunk), "center", color=MUTED)

    return 8 + 2 * ROW, paint


def _row(label: str, state: State, across: float) -> Block:
    n = len(state.holds)

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + HIGH / 2 - 6, label)
        for rank, chunks in enumerate(state.holds):
            for chunk, sources in enumerate(chunks):
                x = _left(rank, n, across) + chunk * across
                _chunk(axes, x, top, across, sources, n)
        for rank, chunk in enumerate(state.passes):  # last, so that no neighbour covers the frame
            x = _left(rank, n, across) + chunk * across
            box(axes, x + 0.6, top - 0.6, across - 1.2, HIGH + 1.2, "none", ec=INK, lw=1.9, gid="passed on")

    return HIGH + 7, paint


def _chunk(axes: Axes, x: float, top: float, across: float, sources: frozenset[int], n: int) -> None:
    """Draw one chunk: n places for stripes, those filled whose rank is in the sum."""
    stripe = (across - 4) / n
    box(axes, x + 1, top, across - 2, HIGH, "none", ec=mix(MUTED, "#FFFFFF", 0.35), lw=0.7)
    for source in sources:
        box(axes, x + 2 + source * stripe, top + 1, stripe, HIGH - 2, dp_colour(source), gid=f"source-{source}")
