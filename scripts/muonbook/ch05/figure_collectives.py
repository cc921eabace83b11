"""Five collectives among the ranks of a group, frame by frame: what they hold, which value goes where, what they get.

Values, and which element of which rank is in each, come from the ranks of a real run (`provenance.with_origins`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from muonbook.figures.player import Frame
from muonbook.figures.style import CARD, INK, MARGIN, MUTED, TITLE, WIDTH, Block, box, card, dp_colour, ink_on, mix, put

HIGH, HEAD, WIRES = 27.0, 19.0, 92.0  # of a cell, of a rank's name, of the room between before and after
APART, DEEP = 7.0, 9.0  # between ranks; of the stripes under a sum
FAINT = mix(MUTED, CARD, 0.65)

SAID = {  # what happens on the way, and what it is for
    "broadcast": (
        "One rank knows, all need to know.",
        "What the others held is overwritten. Initial weights travel like this.",
    ),
    "all_reduce": (
        "Everyone has a term, all need the sum.",
        "A striped cell is a sum. Everybody gets everything: generous. Gradients travel like this.",
    ),
    "reduce_scatter": (
        "The same sums, but each rank takes its own part only.",
        "If four ranks share the work on the result, nobody needs the rest.",
    ),
    "all_gather": ("Everyone has a part, all need the whole.", "It undoes the scattering."),
    "all_to_all": ("Everyone has a parcel for everyone.", "Rows became columns: a transpose, spread over ranks."),
}
Move = Mapping[str, Any]  # before, after: values; origins: for each value after, the [rank, element] that are in it


def frames_of_collectives(ranks: Sequence[Mapping[str, Move]]) -> list[Frame]:
    """Return the tensors at the start, then each collective twice: on its way, and done. ranks: per rank, op -> Move.

    Raises ValueError where the tensors of all ranks do not fit beside each other.
    """
    start = [rank["broadcast"] for rank in ranks]
    what = f"{len(ranks)} ranks, a tensor each. What can they do together?"
    frames = [Frame(_draw("Before", start, 0), f"{what} {_told(start, 'before')}", what)]
    for op, (doing, done) in SAID.items():
        moves = [rank[op] for rank in ranks]
        way = f"{op}, on its way. {doing}"
        frames.append(Frame(_draw(op, moves, 1), f"{way} {_told(moves, 'before')} {_led(moves)}", way))
        end = f"{op}, done. {done}"
        frames.append(Frame(_draw(op, moves, 2), f"{end} {_told(moves, 'after')}", end))
    return frames


def _told(moves: Sequence[Move], when: str) -> str:
    held = [", ".join(map(str, move[when])) for move in moves]
    if len(set(held)) == 1:
        return f"Every rank holds {held[0]}."
    return " ".join(f"Rank {rank} holds {values}." for rank, values in enumerate(held))


def _led(moves: Sequence[Move]) -> str:
    """Say which elements of which ranks go where."""
    senders = []
    for move in moves:
        found = sorted({tuple(origin) for origins in move["origins"] for origin in origins})
        ranks, elements = (sorted({origin[n] for origin in found}) for n in (0, 1))
        senders.append(f"element {', '.join(map(str, elements))} of rank {', '.join(map(str, ranks))}")
    if len(set(senders)) == 1:
        return f"Lines lead to every rank from {senders[0]}."
    return " ".join(f"Lines lead to rank {rank} from {sender}." for rank, sender in enumerate(senders))


def _draw(title: str, moves: Sequence[Move], stage: int) -> Figure:
    """Draw what ranks hold on top and what they get below. stage: 0 at rest, 1 on the way, 2 done."""
    ranks = len(moves)
    most = max(len(move[when]) for move in moves for when in ("before", "after"))
    share = (WIDTH - 2 * MARGIN - APART * (ranks - 1)) / ranks
    across = share / most
    if across < 19:
        raise ValueError(f"{ranks} tensors of {most} elements do not fit beside each other on a card.")

    def left(rank: int, elements: int) -> float:
        return MARGIN + rank * (share + APART) + (share - elements * across) / 2

    def paint(axes: Axes, top: float) -> None:
        put(axes, WIDTH / 2, top, title, "center", True, size=TITLE)
        above = top + 24 + HEAD
        below = above + HIGH + WIRES
        for rank in range(ranks):
            x = MARGIN + (rank + 0.5) * share + rank * APART
            put(axes, x, above - HEAD + 1, f"rank {rank}", "center", True)
            put(axes, x, below + HIGH + 5, f"rank {rank}", "center", True)
        for rank, move in enumerate(moves):
            for n, value in enumerate(move["before"]):
                _cell(axes, left(rank, len(move["before"])) + n * across, above, across, value, [rank])
        if stage:
            wires: dict[int, list[Any]] = {}
            for rank, move in enumerate(moves):
                for n, origins in enumerate(move["origins"]):
                    x = left(rank, len(move["after"])) + (n + 0.5) * across
                    for source, element in origins:
                        start = left(source, len(moves[source]["before"])) + (element + 0.5) * across
                        wires.setdefault(source, []).append([(start, above + HIGH), (x, below)])
            strong, width = stage == 1, 1.0 if sum(map(len, wires.values())) > 20 else 1.5
            for source, lines in sorted(wires.items()):
                colour = dp_colour(source) if strong else mix(dp_colour(source), CARD, 0.7)
                axes.add_collection(LineCollection(lines, colors=colour, linewidths=width, gid=f"from-{source}"))
        for rank, move in enumerate(moves):
            for n, value in enumerate(move["after"] if stage else move["before"]):
                x = left(rank, len(move["after"] if stage else move["before"])) + n * across
                if stage == 2:
                    _cell(axes, x, below, across, value, sorted({source for source, _ in move["origins"][n]}))
                else:
                    box(axes, x + 1, below + 1, across - 2, HIGH - 2, "none", ec=FAINT, lw=0.8, ls=(0, (2, 2)))

    drawing: Block = (24 + 2 * HEAD + 2 * HIGH + WIRES, paint)
    return card("", "", drawing)


def _cell(axes: Axes, x: float, y: float, across: float, value: int, sources: Sequence[int]) -> None:
    """Draw a value in the colour of the rank it came from, or a sum over a stripe for each of its ranks."""
    several, stripe = len(sources) > 1, (across - 2) / len(sources)
    if several:
        box(axes, x + 1, y + 1, across - 2, HIGH - 2, CARD, ec=MUTED, lw=0.8, gid="sum")
    for n, source in enumerate(sources):
        low = y + (HIGH - DEEP - 1 if several else 1)
        box(axes, x + 1 + n * stripe, low, stripe, y + HIGH - 1 - low, dp_colour(source), gid=f"source-{source}")
    ink = INK if several else ink_on(dp_colour(sources[0]))
    put(axes, x + across / 2, y + (2 if several else HIGH / 2 - 7), str(value), "center", color=ink)
