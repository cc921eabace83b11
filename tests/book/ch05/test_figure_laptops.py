"""Laptops in a grid: one per rank, in its colour and hatch, and arrows inside the groups that are asked for."""

import pytest
from figure_helpers import assert_readable, texts
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from muonbook.ch05.figure_laptops import describe_laptops, draw_laptops, groups_of
from muonbook.figures.style import TP_HATCHES, dp_colour


def drawn(figure: Figure, start: str) -> list:
    return [patch for patch in figure.axes[0].patches if (patch.get_gid() or "").startswith(start)]


@pytest.mark.parametrize(("dp", "tp"), [(4, 2), (2, 2), (8, 1), (1, 3)])
def test_a_screen_has_the_colour_and_the_hatch_of_its_rank(dp: int, tp: int) -> None:
    figure = draw_laptops(dp, tp)
    assert_readable(figure)
    screens = drawn(figure, "rank ")
    assert [screen.get_gid() for screen in screens] == [f"rank {rank}" for rank in range(dp * tp)]
    for rank, screen in enumerate(screens):
        assert to_hex(screen.get_facecolor()) == to_hex(dp_colour(rank // tp))
        assert (screen.get_hatch() or "") == TP_HATCHES[rank % tp]
    assert {f"DP {row}" for row in range(dp)} | {f"TP {column}" for column in range(tp)} <= set(texts(figure))
    assert not drawn(figure, "dp ") + drawn(figure, "tp ")


@pytest.mark.parametrize(
    ("look", "groups", "arrows"),
    [({"groups": "dp"}, (2, 0), (6, 0)), ({"groups": "tp"}, (0, 4), (0, 4)), ({"of": 5}, (1, 1), (3, 1))],
)
def test_frames_and_arrows_are_those_of_the_groups(look: dict, groups: tuple, arrows: tuple) -> None:
    figure = draw_laptops(4, 2, **look, title="Who talks to whom")
    assert_readable(figure)
    assert tuple(len(drawn(figure, f"{name} group")) for name in ("dp", "tp")) == groups
    assert tuple(len(drawn(figure, f"{name} talks")) for name in ("dp", "tp")) == arrows


def test_groups_in_words() -> None:
    assert groups_of(4, 2, of=5) == [("dp", [1, 3, 5, 7]), ("tp", [4, 5])]
    assert describe_laptops(4, 2, of=5, title="Rank 5") == (
        "Rank 5: 8 laptops, one per rank, in 4 rows (DP 0 to 3) and 2 columns (TP 0 to 1); arrows and a frame join the "
        "DP group of ranks 1, 3, 5, 7, the TP group of ranks 4, 5."
    )


@pytest.mark.parametrize(
    ("grid", "look", "message"),
    [((2, 8), {}, "2 x 8"), ((9, 1), {}, "9 x 1"), ((2, 2), {"groups": "pp"}, "'pp'"), ((2, 2), {"of": 4}, "0 to 3")],
)
def test_what_cannot_be_drawn_says_why(grid: tuple[int, int], look: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_laptops(*grid, **look)
