"""Collectives drawn as tensors: real values, measured sources, one colour per rank, one hatch per TP rank."""

from itertools import pairwise
from typing import Any

import pytest
import tensors_workers
from figure_helpers import assert_readable, boxes, texts
from matplotlib.colors import to_hex
from once import once

from distmuon import launch
from muonbook.ch09.tensors import Cell, cells, describe_collective, draw_collective
from muonbook.figures import style

SIZE = 3
OWN = [[10, 11], [20, 21], [30, 31]]
ALL = [value for shard in OWN for value in shard]
GATHERED = cells([ALL] * 3, [[0, 0, 1, 1, 2, 2]] * 3)
SUMMED = cells([[60, 63]] * 3, [[[0, 1, 2]] * 2] * 3)


@once
def reports() -> list[dict[str, Any]]:
    """Return what the ranks of one real group reported; it runs when the first test asks."""
    return launch.run(tensors_workers.collectives, dp=SIZE)


# Origins, measured


def test_sources_of_a_gather_are_the_ranks_in_order() -> None:
    for report in reports():
        _, values, sources = report["all_gather"]
        assert values == [10, 11, 20, 21, 30, 31]
        assert sources == [[0], [0], [1], [1], [2], [2]]


@pytest.mark.parametrize(("name", "length"), [("all_reduce", 2 * SIZE), ("reduce_scatter", 2)])
def test_a_sum_comes_from_every_rank(name: str, length: int) -> None:
    for rank, report in enumerate(reports()):
        _, values, sources = report[name]
        first = 2 * rank if name == "reduce_scatter" else 0
        assert values == [60 + 3 * (first + n) for n in range(length)]
        assert sources == [[0, 1, 2]] * length


def test_a_broadcast_comes_from_its_root() -> None:
    assert all(report["broadcast"][2] == [[0]] * 2 * SIZE for report in reports())


def test_blocks_keep_their_shape() -> None:
    for report in reports():
        assert report["rows"][2] == [[[rank]] * 2 for rank in (0, 0, 1, 1, 2, 2)]
        assert report["columns"][2] == [[[0], [0], [1], [1], [2], [2]]] * 2


def test_a_rank_may_be_left_with_nothing() -> None:
    assert [report["on rank 0 alone"][1] is None for report in reports()] == [False, True, True]


# Cells


def test_without_sources_every_value_is_its_ranks_own() -> None:
    assert cells([[1], [[2, 3]], None, [None]]) == [
        ((Cell("1", (0,)),),),
        ((Cell("2", (1,)), Cell("3", (1,))),),
        (),
        ((Cell(""),),),
    ]


def test_sources_may_be_ranks_lists_or_padding() -> None:
    assert cells([[1.5, 2, 0]], [[4, [0, 1], -1]])[0][0] == (Cell("1.5", (4,)), Cell("2", (0, 1)), Cell("", (-1,)))


@pytest.mark.parametrize(
    ("values", "sources"),
    [([[1, 2]], [[0]]), ([[[1, 2]]], [[0, 0]]), ([[[[1]]]], None), ([[]], None), ([[[]]], None), ([5], [0])],
)
def test_what_is_no_tensor_or_does_not_match_is_refused(values: Any, sources: Any) -> None:
    with pytest.raises(ValueError, match="rank 0"):
        cells(values, sources)


# Pictures


def test_every_value_is_written_in_the_colour_of_its_rank() -> None:
    figure = draw_collective(cells(OWN), GATHERED, op="all_gather")
    assert {"all_gather", "before", "after", "rank 0", "rank 2"} <= set(texts(figure))
    assert sorted(text for text in texts(figure) if text.isdigit()) == sorted(map(str, [*ALL, *ALL * 3]))
    for rank in range(3):
        drawn = boxes(figure, f"source-{rank}")
        assert len(drawn) == 2 + 2 * 3
        assert {to_hex(box.get_facecolor()) for box in drawn} == {to_hex(style.dp_colour(rank))}


def test_a_sum_has_an_equal_stripe_per_rank() -> None:
    figure = draw_collective(cells(OWN), SUMMED, op="all_reduce", axis="dp")
    frames = boxes(figure, "sum")
    assert len(frames) == 3 * 2
    row = frames[0].get_y()
    stripes = [b for b in boxes(figure, "source-") if frames[0].get_x() - 2 < b.get_x() < frames[1].get_x() - 2]
    stripes = [b for b in stripes if row < b.get_y() < row + 25]
    assert [b.get_gid() for b in stripes] == ["source-0", "source-1", "source-2"]
    for left, right in pairwise(stripes):
        assert right.get_x() == pytest.approx(left.get_x() + left.get_width())
        assert right.get_width() == pytest.approx(left.get_width())
    assert "Stripes: a sum of these ranks' values." in texts(figure)


def test_tp_ranks_share_a_colour_and_differ_in_hatch() -> None:
    blocks = [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    whole = [[*a, *b] for a, b in zip(*blocks, strict=True)]
    figure = draw_collective(cells(blocks), cells([whole] * 2, [[[0, 0, 1, 1]] * 2] * 2), axis="tp")
    for rank in range(2):
        drawn = boxes(figure, f"source-{rank}")
        assert {box.get_hatch() or "" for box in drawn} == {style.TP_HATCHES[rank]}
        assert {to_hex(box.get_facecolor()) for box in drawn} == {to_hex(style.dp_colour(0))}
    assert {"TP 0", "TP 1"} <= set(texts(figure))


def test_padding_is_grey_and_the_undefined_is_a_dashed_outline() -> None:
    figure = draw_collective(cells([[1], [None]]), cells([[1, 0]] * 2, [[0, -1]] * 2))
    assert {to_hex(box.get_facecolor()) for box in boxes(figure, "source--1")} == {to_hex(style.PADDING)}
    (blank,) = boxes(figure, "undefined")
    assert to_hex(blank.get_facecolor(), keep_alpha=True).endswith("00")
    assert "Grey: padding. Dashed: nothing of it here." in texts(figure)
    assert not any("Dashed" in text for text in texts(draw_collective(cells(OWN), GATHERED)))


@pytest.mark.parametrize(
    ("before", "after", "options"),
    [
        (cells(OWN), SUMMED, {"op": "all_reduce", "caption": "The sum is everywhere. " * 8, "title": "Sums " * 12}),
        (cells([list(range(100, 110))] * 8), cells([list(range(10))] * 8), {"op": "all_to_all"}),
        (cells([None, [1, 2]]), cells([[1, 2], None]), {"op": "send"}),
        (cells([[-1000, 12345]] * 2), cells([[0.125, 1]] * 2), {"axis": "dp"}),
    ],
)
def test_type_stays_on_the_card_and_apart(before: Any, after: Any, options: Any) -> None:
    assert_readable(draw_collective(before, after, **options))


@pytest.mark.parametrize(
    ("before", "after", "options", "message"),
    [
        (cells(OWN), GATHERED, {"axis": "pp"}, "axis is 'pp'"),
        (cells(OWN), GATHERED[:2], {}, "3 ranks before and 2 after"),
        (cells([None]), cells([[1]]), {}, "a tensor"),
        (cells([list(range(40))]), cells([[1]]), {}, "do not fit"),
    ],
)
def test_what_cannot_be_drawn_says_why(before: Any, after: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_collective(before, after, **options)


def test_alt_text_tells_values_and_sources() -> None:
    assert describe_collective(cells(OWN), GATHERED, op="all_gather") == (
        "all_gather, drawn as tensors of 3 ranks. Before: rank 0: 10, 11; rank 1: 20, 21; rank 2: 30, 31. After: every "
        "rank holds 10, 11 from rank 0, 20, 21 from rank 1, 30, 31 from rank 2."
    )
    told = describe_collective(
        cells([None, [[1, 2], [3, 0]]], [None, [[1, 1], [1, -1]]]), cells([[3], [None]], [[[0, 1]], [[]]]), axis="tp"
    )
    assert "Before: TP 0: no tensor; TP 1: 1, 2 / 3, padding. After: TP 0: 3 from TP 0 + 1; TP 1: undefined." in told
