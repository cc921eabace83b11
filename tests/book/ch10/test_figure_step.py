"""One matrix through the nine moves: every piece where the layout puts it, every byte as predicted."""

from typing import Any

import numpy as np
import pytest
from figure_helpers import assert_readable, boxes, texts
from matplotlib.colors import to_hex

from distmuon.sharding.layout import Layout, ParamSpec, Range, plan
from distmuon.sharding.ledger import ring_bytes
from muonbook.ch10.figure_step import (
    HOLDS,
    MOVES,
    CutMatrix,
    describe_held,
    describe_step,
    draw_held,
    draw_step,
    rectangles,
)
from muonbook.figures import style

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
    found = np.zeros(matrix.whole, dtype=int)
    for part in matrix.held(move, dp_rank, tp_rank):
        area = found[part.row : part.row + part.rows, part.column : part.column + part.columns]
        assert area.shape == (part.rows, part.columns)
        assert not area.any()
        area[:] = 100 * (part.dp + 1) + part.tp
    return found


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

    held, everywhere = HOLDS[move][1], move in ("gradients", "all_gather")
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
    for move in HOLDS:
        for dp_rank in range(layout.dp):
            for tp_rank in range(tp):
                wanted = expected(layout, name, tp, move, dp_rank, tp_rank)
                assert (covered(matrix, move, dp_rank, tp_rank) == wanted).all(), (move, dp_rank, tp_rank)


@pytest.mark.parametrize("run", [Range(a, b) for a in range(13) for b in range(a, 13)])
def test_a_run_is_at_most_three_rectangles_and_exactly_its_elements(run: Range) -> None:
    found = np.zeros((3, 4), dtype=int)
    pieces = rectangles(run, 4)
    for row, column, rows, columns in pieces:
        found[row : row + rows, column : column + columns] += 1
    assert len(pieces) <= 3
    assert found.ravel().tolist() == [int(run.start <= n < run.end) for n in range(12)]


def test_moves_are_those_of_the_step() -> None:
    assert " ".join(MOVES) == (
        "reduce_scatter momentum dp_gather tp_gather newton_schulz tp_shard dp_shard apply all_gather"
    )
    assert set(HOLDS) == {"gradients", *MOVES}


# The pictures


@every_case
def test_type_stays_on_the_card_and_apart(layout: Layout, tp: int, name: str) -> None:
    assert_readable(draw_step(layout, name, tp))
    for move in ("gradients", "dp_gather", "apply"):
        assert_readable(draw_held(layout, name, tp, move))


@pytest.mark.parametrize("move", list(HOLDS))
def test_panels_are_true_to_scale_in_colours_and_hatches(move: str) -> None:
    layout, tp, name = CASES[0]
    figure, matrix = draw_held(layout, name, tp, move), CutMatrix.find(layout, name, tp)
    outlines = [box for box in boxes(figure, "held-") if str(box.get_gid()).endswith("-whole")]
    assert len(outlines) == layout.dp * tp
    scale = outlines[0].get_width() / matrix.whole[1]
    for r in range(layout.dp):
        for t in range(tp):
            drawn, parts = boxes(figure, f"held-dp{r}-tp{t}-from"), matrix.held(move, r, t)
            outline = outlines[r * tp + t]
            for box, part in zip(drawn, parts, strict=True):
                assert to_hex(box.get_facecolor()) == to_hex(style.dp_colour(part.dp))
                assert (box.get_hatch() or "") == style.TP_HATCHES[part.tp]
                at = [box.get_x() - outline.get_x(), box.get_y() - outline.get_y(), box.get_width(), box.get_height()]
                assert at == pytest.approx(
                    [part.column * scale, part.row * scale, part.columns * scale, part.rows * scale]
                )


def test_step_shows_every_move_mark_and_byte() -> None:
    layout, name = plan(SPECS, 4, 150), "rows"
    index, bucket = 0, plan(SPECS, 4, 150).buckets[0]
    assert index in bucket.params
    shown = texts(draw_step(layout, name, 2, dp_rank=1, tp_rank=1))
    assert set(MOVES) <= set(shown)
    assert {"G[I_tp, J]{U_dp}", "G[N_dp]", "M[N_dp]", "M[I_tp, J]", "M[I, J]", "O[I, J]", "W[I_tp, J]"} <= set(shown)
    sent = [
        ring_bytes("reduce_scatter", 4 * bucket.padded, 4),
        ring_bytes("all_gather", 2 * bucket.padded, 4),
        ring_bytes("all_gather", 2 * 2 * SPECS[0].numel, 2),
        ring_bytes("all_gather", 4 * bucket.padded, 4),
    ]
    for number in sent:
        assert f"sends {style.in_bytes(number)}" in shown
    assert shown.count("sends nothing") == 2
    wider = texts(draw_step(layout, name, 2, gather_dtype="float32"))
    assert f"sends {style.in_bytes(ring_bytes('all_gather', 2 * 4 * SPECS[0].numel, 2))}" in wider


def test_opposite_moves_stand_on_one_level() -> None:
    axes = draw_step(*CASES[0][::2], 2).axes[0]
    height = {text.get_text(): text.get_position()[1] for text in axes.texts}
    for down, up in (
        ("reduce_scatter", "all_gather"), ("momentum", "apply"), ("dp_gather", "dp_shard"), ("tp_gather", "tp_shard"),
    ):  # fmt: skip
        assert height[down] == height[up]


def test_the_strip_shows_the_shards_part_in_the_matrix() -> None:
    layout = plan(SPECS, 4, 150)
    bucket = layout.buckets[0]
    for dp_rank in layout.owners(bucket, 1):
        (left,) = boxes(draw_step(layout, "columns", 2, dp_rank), "step-momentum-piece")
        meta = layout.meta(bucket, 1, dp_rank)
        assert left.get_width() / 176 == pytest.approx(meta.local_range.size / bucket.padded)
        assert (left.get_x() - style.MARGIN) / 176 == pytest.approx(meta.local_range.start / bucket.padded)


def test_one_process_sends_nothing() -> None:
    shown = texts(draw_step(plan(SPECS, 1), "rows", 1))
    assert shown.count("sends nothing") == 6


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bias", {}, "no matrix 'bias'"),
        ("unknown", {}, "its matrices are rows, columns"),
        ("rows", {"dp_rank": 3}, "DP 3, TP 0 owns nothing"),
        ("rows", {"tp_rank": 2}, "TP 0 to 1"),
    ],
)
def test_a_step_that_cannot_be_drawn_says_why(name: str, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_step(plan(SPECS, 4, 150), name, 2, **options)


@pytest.mark.parametrize(
    ("dp", "tp", "move", "message"),
    [(4, 2, "gather", "move is 'gather'"), (9, 2, "apply", "9 DP"), (2, 5, "apply", "5 TP")],
)
def test_what_ranks_hold_that_cannot_be_drawn_say_why(dp: int, tp: int, move: str, message: str) -> None:
    for make in (draw_held, describe_held):
        with pytest.raises(ValueError, match=message):
            make(plan(SPECS, dp, 150), "rows", tp, move)


# Alt text


def test_alt_text_has_the_true_numbers() -> None:
    layout = plan([ParamSpec("w", (4, 6), "float32", 0), ParamSpec("v", (2, 6), "float32", 0)], 3)
    assert describe_held(layout, "w", 2, "reduce_scatter") == (
        "w, 8 × 6, after reduce_scatter, on 3 DP × 2 TP ranks. Each TP rank of DP 0 12 elements from DP 0; "
        "DP 1 12 elements from DP 1; DP 2 nothing."
    )
    assert describe_held(layout, "w", 2, "tp_gather").endswith(
        "Each TP rank of DP 0 48 elements from DP 0, 1; DP 1 48 elements from DP 0, 1; DP 2 nothing."
    )
    told = describe_step(layout, "w", 2)
    assert "as seen by DP 0, TP 0 of 3 DP × 2 TP: reduce_scatter leaves G[N_dp], 12 of 24 elements, sends 96 B;" in told
    assert "tp_gather leaves M[I, J], 8 × 6, sends 48 B; newton_schulz leaves O[I, J], 8 × 6, sends nothing;" in told
