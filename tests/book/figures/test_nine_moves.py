"""One matrix through the nine moves: every piece where the layout puts it, every byte as predicted."""

import numpy as np
import pytest
from figure_helpers import texts
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from distmuon.sharding.layout import Layout, ParamSpec, Range, plan
from distmuon.sharding.ledger import ring_bytes
from muonbook.figures import style
from muonbook.figures.nine_moves import (
    HOLDINGS,
    MOVES,
    CutMatrix,
    Part,
    describe_strip,
    draw_strip,
    frames_of_step,
    small_layer_layout,
)

SPECS = [
    ParamSpec("rows", (12, 7), "float32", 0),
    ParamSpec("columns", (6, 9), "float32", 1),
    ParamSpec("uncut", (10, 11), "float32"),
    ParamSpec("bias", (5,), "float32"),
    ParamSpec("last", (4, 1000), "bfloat16", 0),
]
CASES = [
    (plan(SPECS, dp, size), tp, name)
    for dp, size, tp in ((4, 150, 2), (1, 1000, 1), (5, 40, 3), (8, 10_000, 4))
    for name in ("rows", "columns", "uncut", "last")
]
every_case = pytest.mark.parametrize(("layout", "tp", "name"), CASES)


def covered(matrix: CutMatrix, move: str, dp_rank: int, tp_rank: int) -> np.ndarray:
    """Return [I, J] of 100 * (dp + 1) + tp for who each held element came from, 0 elsewhere; no element comes twice."""
    blocks = np.zeros((matrix.tp, matrix.spec.numel), dtype=int)
    for part in matrix.held(move, dp_rank, tp_rank):
        area = blocks[part.block, part.run.start : part.run.end]
        assert area.size == part.run.size
        assert not area.any()
        area[:] = 100 * (part.dp + 1) + part.tp
    shaped = blocks.reshape(matrix.tp, *matrix.spec.shape)
    dim = matrix.spec.tp_split_dim
    return shaped[tp_rank] if dim is None else np.concatenate(list(shaped), axis=dim)


def expected(layout: Layout, name: str, tp: int, move: str, dp_rank: int, tp_rank: int) -> np.ndarray:
    """Return what `covered` must be, found by doing it: owners per flat element, blocks put side by side."""
    index = next(n for n, spec in enumerate(layout.specs) if spec.name == name)
    spec, bucket = layout.specs[index], next(b for b in layout.buckets if index in b.params)
    where = layout.global_ranges[index]
    owner = (np.arange(where.start, where.end) - bucket.offset) // bucket.shard_size
    blank = np.zeros(spec.shape, dtype=int)

    def block(values: np.ndarray, t: int) -> np.ndarray:
        return np.where(values >= 0, 100 * (values + 1) + t, 0).reshape(spec.shape)

    def assemble(blocks: list[np.ndarray]) -> np.ndarray:
        return blocks[tp_rank] if spec.tp_split_dim is None else np.concatenate(blocks, axis=spec.tp_split_dim)

    held, everywhere = HOLDINGS[move].where, move in ("gradients", "all_gather")
    if not everywhere and dp_rank not in owner:
        return assemble([blank] * tp)
    mine = np.full(spec.numel, dp_rank)
    if move in ("gradients", "tp_shard"):
        return assemble([block(mine, t) if t == tp_rank else blank for t in range(tp)])
    if held == "piece":
        piece = np.where(owner == dp_rank, dp_rank, -1)
        return assemble([block(piece, t) if t == tp_rank else blank for t in range(tp)])
    if move == "newton_schulz":
        return assemble([block(mine, tp_rank)] * tp)
    if move == "tp_gather":
        return assemble([block(owner, t) for t in range(tp)])
    return assemble([block(owner, t) if t == tp_rank else blank for t in range(tp)])


@every_case
def test_every_rank_holds_what_the_layout_says(layout: Layout, tp: int, name: str) -> None:
    matrix = CutMatrix.find(layout, name, tp)
    for move in HOLDINGS:
        for dp_rank in range(layout.dp):
            for tp_rank in range(tp):
                wanted = expected(layout, name, tp, move, dp_rank, tp_rank)
                assert (covered(matrix, move, dp_rank, tp_rank) == wanted).all(), (move, dp_rank, tp_rank)


@pytest.mark.parametrize(("dim", "block"), [(0, 0), (0, 1), (1, 1), (None, 0)])
def test_the_outline_of_a_run_goes_around_exactly_its_elements(dim: int | None, block: int) -> None:
    for run in (Range(a, b) for a in range(12) for b in range(a + 1, 13)):
        check_outline(run, dim, block)


def check_outline(run: Range, dim: int | None, block: int) -> None:
    matrix = CutMatrix.find(plan([ParamSpec("w", (3, 4), "float32", dim)], 1), "w", 2)
    corners = matrix.outline(Part(run, block, 0, 0))
    rows, columns = matrix.whole
    inside = np.zeros((rows, columns), dtype=int)  # by the ray that goes left from each element's middle
    for (x, y), (to_x, to_y) in zip(corners, corners[1:] + corners[:1], strict=True):
        assert x == to_x or y == to_y
        if x == to_x:
            inside[min(y, to_y) : max(y, to_y), x:] += 1
    down, right = (3 * block * (dim == 0), 4 * block * (dim == 1))
    wanted = np.zeros((rows, columns), dtype=int)
    wanted[down : down + 3, right : right + 4] = [
        [run.start <= 4 * row + column < run.end for column in range(4)] for row in range(3)
    ]
    assert (inside % 2 == wanted).all()


def test_moves_are_those_of_the_step() -> None:
    assert " ".join(MOVES) == (
        "reduce_scatter momentum dp_gather tp_gather newton_schulz tp_shard dp_shard apply all_gather"
    )
    assert tuple(HOLDINGS) == ("gradients", *MOVES)


# The moving picture


def polygons(figure: Figure, kind: str = "from-") -> list[Polygon]:
    """Return what is painted as held, panel after panel: TP ranks from left to right, DP ranks downwards."""
    return [p for p in figure.axes[0].patches if isinstance(p, Polygon) and (p.get_gid() or "").startswith(kind)]


def test_captions_name_every_move_and_its_bytes() -> None:
    layout, name = plan(SPECS, 4, 150), "rows"
    bucket = layout.buckets[0]
    captions = [frame.caption for frame in frames_of_step(layout, name, 2)]
    assert [line.split(":")[0] for line in captions] == [
        "Before the step",
        *(f"{n}. {move}" for n, move in enumerate(MOVES, 1)),
    ]
    sent = {
        1: ring_bytes("reduce_scatter", 4 * bucket.padded, 4),
        3: ring_bytes("all_gather", 2 * bucket.padded, 4),
        4: ring_bytes("all_gather", 2 * 2 * SPECS[0].numel, 2),
        9: ring_bytes("all_gather", 4 * bucket.padded, 4),
    }
    together = sum(len(SPECS[index].shape) == 2 for index in bucket.params)
    assert together > 1
    for n, line in enumerate(captions[1:], 1):
        whose = "" if n == 4 else f", of all {together} matrices in one message"  # over TP it is this matrix alone
        assert line.endswith(f"Each sends {style.in_bytes(sent[n])}{whose}." if n in sent else "Nothing is sent."), line
    owners = CutMatrix.find(layout, name, 2).owners
    assert f"this work is done {2 * len(owners)} times" in captions[5]
    assert "which we do not draw" not in captions[0]
    small = [frame.caption for frame in frames_of_step(small_layer_layout(), "weight", 2)]
    assert small[0].endswith(" The same bucket holds bias, 8 elements, which we do not draw.")
    assert "one message" not in " ".join(small)


def test_what_a_rank_receives_without_needing_it_is_pale_and_said() -> None:
    layout = plan([ParamSpec("w", (4, 24), "float32", 0), ParamSpec("v", (2, 24), "float32", 0)], 3)
    for move, frame in zip(HOLDINGS, frames_of_step(layout, "w", 2), strict=True):
        pale = polygons(frame.figure, "spare-")
        assert len(pale) == (4 if move == "dp_gather" else 0), move  # two pieces on each TP rank of DP 2
        assert texts(frame.figure).count("not needed here") == len(pale) / 2
        if pale:
            assert frame.alt.endswith("DP 2 96 elements from DP 0, 1, which it does not need.")


def test_in_the_example_all_ranks_own_a_piece_and_cuts_fall_inside_rows() -> None:
    matrix = CutMatrix.find(small_layer_layout(), "weight", 2)
    pieces = [matrix.held("momentum", r, 0)[0].run for r in range(4)]
    assert matrix.whole == (8, 16)
    assert [piece.size for piece in pieces] == [18, 18, 18, 10]
    assert all(piece.end % 8 for piece in pieces[:-1])


def test_alt_text_has_the_true_numbers() -> None:
    layout = plan([ParamSpec("w", (4, 6), "float32", 0), ParamSpec("v", (2, 6), "float32", 0)], 3)
    told = dict(zip(HOLDINGS, (frame.alt for frame in frames_of_step(layout, "w", 2)), strict=True))
    assert told["reduce_scatter"] == (
        "After reduce_scatter, w, 8 × 6, on 3 DP × 2 TP ranks. Each holds its piece of the mean gradient: each TP rank "
        "of DP 0 12 elements from DP 0; DP 1 12 elements from DP 1; DP 2 nothing."
    )
    assert told["tp_gather"].endswith(
        "each TP rank of DP 0 48 elements from DP 0, 1; DP 1 48 elements from DP 0, 1; DP 2 nothing."
    )


@pytest.mark.parametrize(
    ("dp", "tp", "name", "message"),
    [
        (4, 2, "bias", "no matrix 'bias'"),
        (4, 2, "unknown", "its matrices are rows, columns"),
        (9, 2, "rows", "9 DP"),
        (2, 5, "rows", "5 TP"),
    ],
)
def test_a_step_that_cannot_be_drawn_says_why(dp: int, tp: int, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        frames_of_step(plan(SPECS, dp, 150), name, tp)


# The strip


def test_the_strip_highlights_where_a_chapter_is() -> None:
    here = {"apply", "tp_gather"}
    names = {str(patch.get_gid()) for patch in draw_strip(here).axes[0].patches}
    assert {name for name in names if "-here" in name} == {f"move-{move}-here" for move in here}
    assert describe_strip(here).endswith("You are here: tp_gather, apply.")


@pytest.mark.parametrize("here", [set(), {"gather"}])
def test_the_strip_knows_its_moves(here: set[str]) -> None:
    for make in (draw_strip, describe_strip):
        with pytest.raises(ValueError, match="it must be some of reduce_scatter"):
            make(here)
