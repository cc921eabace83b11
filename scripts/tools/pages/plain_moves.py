"""The nine moves of a step in plain words, for the landing page and the README: nothing is to be known beforehand.

The pictures are those of nine_moves.py, of its small layer on a grid of four rows and two columns, where every process
owns a piece of the matrix. The field's term for what a move does stands in brackets at the end of its caption.
"""

from __future__ import annotations

from muonbook.figures.nine_moves import HOLDINGS, MOVES, CutMatrix, Words, moment, small_layer_layout
from muonbook.figures.player import Frame
from muonbook.figures.style import Block, heading, page, text_block

NAME, NOTE = "Eight processes, one matrix.", "Colour shows what each of them holds."
TP = 2  # columns of processes, one for each half of the matrix
STILL = list(HOLDINGS).index("tp_gather")  # where nothing may move: all hold the whole matrix, in everybody's colours
NAMES = ("average", "momentum", "join", "join", "orthogonalize", "cut", "cut", "apply", "join")
PLAIN = Words(
    names=dict(zip(MOVES, NAMES, strict=True)),
    widths=(54.0, 74.0, 44.0, 44.0, 92.0),
    rows=[f"data {r}" for r in range(1, 5)],
    columns=["left half", "right half"],
    row_room=58,
    column_room=70,
    block="half",
    marks=False,
)
SAYS = {
    "gradients": "Each row of processes works on its own data. Each process in it has computed the gradient of one "
    "half of the matrix.",
    "reduce_scatter": "The processes of a column take the mean of their gradients, and each keeps one piece of it "
    "(reduce-scatter).",
    "momentum": "Each process adds its piece to its momentum, a running sum in which old gradients fade.",
    "dp_gather": "The processes of a column send each other their pieces, so that each has its half of the momentum "
    "(all-gather).",
    "tp_gather": "The two processes of a row exchange their halves. Now each has the whole matrix, which Muon needs "
    "(all-gather).",
    "newton_schulz": "Each process orthogonalizes the matrix. In the result, the update, all directions are about "
    "equally strong (Newton–Schulz).",
    "tp_shard": "The way back begins. Each process keeps its half of the update, and nothing is sent.",
    "dp_shard": "Each process keeps its piece of that half, and again nothing is sent.",
    "apply": "Each process changes its piece of the weights by its piece of the update.",
    "all_gather": "The processes of a column send each other their new weights, and the next batch can begin "
    "(all-gather).",
}


def frames(captioned: bool = False) -> list[Frame]:
    """Return the step as frames: the gradients, then what every process holds after each move.

    captioned: whether each caption is also written on its card, for a film that shows cards alone.
    """
    matrix = CutMatrix.find(small_layer_layout(), "weight", TP)
    captions = {move: _caption(move) for move in HOLDINGS}
    below = {move: text_block(f"\n{caption}") for move, caption in captions.items()}
    tallest = max(height for height, _ in below.values())
    made = []
    for move, caption in captions.items():
        blocks: list[Block] = [*heading(NAME, NOTE), (6.0, lambda *_: None), *moment(matrix, move, PLAIN)]
        if captioned:
            blocks.append((tallest, below[move][1]))
        made.append(Frame(page(blocks), _describe(matrix, move), caption))
    return made


def describe_film() -> str:
    """Return alt text for the film as a whole."""
    return (
        f"{NAME} In {len(MOVES)} moves they average their gradients, exchange pieces until each of them holds the "
        "whole matrix, orthogonalize it, cut it up again, and share the new weights."
    )


def _caption(move: str) -> str:
    when = f"Move {MOVES.index(move) + 1} of {len(MOVES)}." if move in MOVES else "Before the step."
    return f"{when} {SAYS[move]}"


def _describe(matrix: CutMatrix, move: str) -> str:
    """Return alt text for one frame: how much of the matrix each process holds, and in whose colours."""
    grid = [(r, t) for r in range(matrix.layout.dp) for t in range(matrix.tp)]
    held = [matrix.held(move, r, t) for r, t in grid]
    sizes = {sum(part.run.size for part in parts) for parts in held}
    share = " to ".join(f"{size}" for size in sorted({min(sizes), max(sizes)}))
    rows, columns = matrix.whole
    mixed = all({part.dp for part in parts} == set(matrix.owners) for parts in held)
    when = (
        f"After move {MOVES.index(move) + 1}"
        if move in MOVES
        else f"The outline of a matrix, once for each of {len(grid)} processes, in {matrix.layout.dp} rows and "
        f"{matrix.tp} columns. Before the step"
    )
    return (
        f"{when} each holds {PLAIN.held(move)}, {share} of {rows * columns} numbers, in the "
        f"{'colours of all rows' if mixed else 'colour of its row'}."
    )
