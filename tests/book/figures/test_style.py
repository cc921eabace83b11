"""Type that a phone can show: nothing smaller is saved, and rows of text are as long as there is room."""

import re
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures import style


def test_what_a_phone_would_show_too_small_is_not_saved(tmp_path: Path) -> None:
    def written(size: float, text: str = "a label", math: bool = False) -> Figure:
        figure = style.page([*style.heading("A title", "a note"), (20.0, lambda axes, top: None)])
        figure.axes[0].text(20, 65, text, size=size, parse_math=math)
        return figure

    told = "'a label' is written in 11 points; the smallest type for a phone is 11.25."
    for suffix in (".png", ".svg"):
        with pytest.raises(ValueError, match=re.escape(told)):
            style.save(written(11), tmp_path / f"small{suffix}", "a card")
    with pytest.raises(ValueError, match=r"is written in 7\.875 points"):
        style.png(written(style.SMALL, "$10^{-2}$", math=True), "a card")
    figure = style.card("", "")
    style.inset(figure.axes[0], 30, 5, 100, 10).tick_params(labelsize=8)
    with pytest.raises(ValueError, match="is written in 8 points"):  # numbers along an axis are type as well
        style.png(figure, "a plot")
    assert not list(tmp_path.iterdir())
    style.save(written(style.SMALL), tmp_path / "large.png", "a card")
    assert style.SMALL * 358 / style.WIDTH > 11  # pixels, on a card that is 358 of them wide


@pytest.mark.parametrize(("x", "y"), [(-3, 20), (330, 20), (20, -3), (20, 60)])
def test_words_beyond_the_edge_of_the_card_are_refused(x: float, y: float) -> None:
    with pytest.raises(ValueError, match="'a label' goes beyond the edge of the picture"):
        style.png(style.page([(40.0, lambda axes, top: style.put(axes, x, y, "a label"))]), "a card")


def test_words_on_other_words_are_refused_and_rows_of_type_are_not() -> None:
    def two_lines(apart: float, right: float = 0.0) -> Figure:
        def paint(axes: Axes, top: float) -> None:
            style.put(axes, 20, top, "gather cut")
            style.put(axes, 20 + right, top + apart, "owner", bold=True)

        return style.page([(60.0, paint)])

    for apart in (0.0, 6.0):
        with pytest.raises(ValueError, match=re.escape("'gather cut' lies on 'owner'; move one of them.")):
            style.png(two_lines(apart), "two lines")
    style.require_readable(two_lines(style.ROW), "one below the other")
    style.require_readable(two_lines(0.0, right=style.wide("gather cut")), "one beside the other")
    boxed = style.card("", "")
    for x in (20, 60):
        boxed.axes[0].text(x, 20, "flat", size=style.SMALL, bbox={"pad": 9})
    style.require_readable(boxed, "a box around words is no words")


def test_text_is_wrapped_by_its_measure() -> None:
    text = "Every rank holds a shard of every bucket, and the whole of none of them. " * 12
    for size, bold in ((style.SMALL, False), (style.TITLE, True)):
        rows = style.wrapped(text, 200, size, bold)
        assert " ".join(rows) == text.strip()
        assert all(style.wide(row, size, bold) <= 200 for row in rows)
        following = [row.split()[0] for row in rows[1:]]
        assert all(style.wide(f"{row} {word}", size, bold) > 200 for row, word in zip(rows, following, strict=False))
    cut = style.wrapped(text, 200, rest=" and more")
    assert len(cut) == 8
    assert cut[-1].endswith(" and more")
    assert style.wide(cut[-1], bold=False) <= 200
    assert style.wrapped("short", 200, rest=" and more") == ["short"]
