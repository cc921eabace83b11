"""Pictures that move, as text: the same bytes every time, names that never meet, nothing from outside, small."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from html import unescape

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures import player, style, svg
from muonbook.figures.player import Frame


def picture(number: int, hatches: Sequence[str] = ("", "////", "...."), rows: int = 8) -> Figure:
    """A card as chapters draw them: eight ranks' boxes with numbers, an arrow, a plot; frame `number` of many."""

    def paint(axes: Axes, top: float) -> None:
        for row in range(rows):
            colour = style.dp_colour(row)
            for column in range(4):
                looks = {"hatch": hatches[column % len(hatches)], "ec": style.hatch_on(colour)}
                style.box(axes, 20 + 40 * column, top + 22 * row, 34, 18, colour, **looks)
                style.put(axes, 23 + 40 * column, top + 22 * row, f"{number + row * column}")
        style.arrow(axes, (190, top + 10), (190 + 10 * number, top + 100))

    figure = style.card(f"Step <{number}> & more", "", (180.0, paint))
    plot = style.inset(figure.axes[0], 230, 80, 90, 80)
    plot.plot([0, 1, 2], [0, number / 3, 1], "--o")
    plot.set(xticks=[0, 1, 2], yticks=[0, 1, 2])
    plot.tick_params(labelsize=style.SMALL)
    return figure


@cache
def frame(n: int) -> Frame:
    return Frame(picture(n), f'Frame {n}: "so" & so.', f"Caption {n} < {n + 1}.")


def frames(count: int) -> list[Frame]:
    return [frame(n) for n in range(1, count + 1)]


@cache
def html(name: str, count: int = 3) -> str:
    return player.html(name, frames(count))


def test_the_same_frames_give_the_same_bytes() -> None:
    assert html("one") == player.html("one", frames(3))


def test_two_players_on_a_page_share_no_name_and_every_reference_is_met() -> None:
    page = html("one") + html("two")
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names)) > 10
    assert {re.split("-", name)[0] for name in names} == {"one", "two", "moving"}
    assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', page)) <= set(names)


def test_a_hatch_is_kept_once_for_all_frames() -> None:
    assert html("one", 4).count("<pattern") == html("one").count("<pattern") == 16


def test_nothing_comes_from_outside_and_nothing_reaches_the_page_around_it() -> None:
    page = html("one")
    assert set(re.findall(r"https?:[^\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert page.count("<style>") == page.count("<script>") == 1
    selectors = re.findall(r"^([^@{}\n]+){", page.partition("<style>")[2].partition("</style>")[0], re.MULTILINE)
    assert selectors
    assert all(".moving" in selector for selector in selectors)
    assert not re.search(r"\[\[|<\?xml|<!--|metadata|\bnan\b", page)


def test_the_words_are_those_of_the_frames() -> None:
    page = html("one")
    alts = [unescape(alt) for alt in re.findall(r'role="img" aria-label="([^"]+)"', page)]
    assert alts == [f'Frame {n}: "so" & so.' for n in (1, 2, 3)]
    assert [unescape(text) for text in re.findall(r"<p>(.+?)</p>", page)] == [
        f"Caption {n} < {n + 1}." for n in (1, 2, 3)
    ]
    assert "Step &lt;2&gt; &amp; more</text>" in page
    assert f"{player.FRAME_MS} + {player.LETTER_MS} * caption().length" in page
    assert player.words(frames(2)) == '1/2: Frame 1: "so" & so.\n2/2: Frame 2: "so" & so.'


def test_a_notebook_leaves_it_its_keys() -> None:
    """JupyterLab takes the keys of whatever has the focus in an output, unless an element around it says not to."""
    assert re.search(r'<figure class="moving"[^>]* data-lm-suppress-shortcuts="true">', html("one"))


def test_numbers_have_two_decimals_and_colours_are_left_alone() -> None:
    def paint(axes: Axes, top: float) -> None:
        axes.plot([20, 20 + 100 / 3], [top, top + 10 / 3], color="#1e2029")  # not a number, though it looks like 1e2029

    drawn = svg.inline(style.card("", "", (40.0, paint)), "a line", svg.Definitions("x"))
    assert 'd="M20 14L53.33 17.33"' in drawn
    assert "#1e2029" in drawn


def test_a_dotted_hatch_repeats_where_matplotlibs_does() -> None:
    drawn = player.html("dots", [Frame(picture(n, ("....",)), f"{n}") for n in (1, 2)])
    tile = drawn.partition("<pattern")[2].partition("</pattern>")[0]
    assert 'width="24" height="24"' in tile
    rows = np.array(re.findall(r"M(-?[\d.]+) (-?[\d.]+)h0", tile)).astype(float)
    assert set(rows[:, 1].round(2)) == set(np.arange(0.0, 25, 3))
    assert all((x + (1.5 if y % 6 == 3 else 0)) % 3 == 0 for x, y in rows.round(2))
    assert len(rows) == 5 * 9 + 4 * 8


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            lambda: [*frames(2), Frame(style.card("Other", ""), "another")],
            "frame 3 of ring is 360 x 49.6 points, and the first is 360 x 229.6: make them equal.",
        ),
        (lambda: [*frames(1), Frame(picture(2), " ")], "frame 2 of ring has no alt text; it says what changed"),
        (lambda: frames(1) * 2, "frame 2 of ring has the alt text of the frame before it; it says what changed."),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_sentence(given: Callable[[], list[Frame]], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        player.html("ring", given())


def test_pixels_are_refused() -> None:
    figure = style.card("", "", (60.0, lambda axes, top: None))
    plot = style.inset(figure.axes[0], 20, 20, 40, 40)
    plot.imshow(np.eye(3))
    plot.axis("off")
    with pytest.raises(ValueError, match="an image of pixels, which differs from machine to machine; draw shapes"):
        svg.inline(figure, "a square", svg.Definitions("x"))
