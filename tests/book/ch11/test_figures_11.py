"""The museum's picture: one pair of drawings for every exhibit of the tour, with what it really does in it."""

import pytest
from figure_helpers import assert_readable, texts
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from muonbook.ch11.figures import LABELS, describe_museum, draw_museum, spectrum_of
from muonbook.ch11.museum import EXHIBITS
from muonbook.figures.healthy import HEALTHY, is_healthy
from muonbook.figures.style import ACCENT, MUTED


def halves(name: str) -> list[list[Rectangle]]:
    """Return the boxes in the right frame of an exhibit's pair, and those in the wrong one."""
    boxes = [patch for patch in draw_museum("", [name]).axes[0].patches if isinstance(patch, Rectangle)]
    frames = {to_hex(box.get_edgecolor()).upper(): box for box in boxes if box.get_linewidth() == 1.2}
    inside = []
    for frame in (frames[MUTED], frames[ACCENT]):
        low, high = frame.get_x(), frame.get_x() + frame.get_width()
        inside.append([box for box in boxes if box is not frame and low <= box.get_x() < high])
    return inside


def test_every_exhibit_of_the_tour_has_a_pair() -> None:
    assert set(LABELS) < set(EXHIBITS)
    figure = draw_museum("The museum")
    assert set(LABELS) < set(texts(figure))
    assert_readable(figure)
    words = describe_museum("The museum")
    assert words.startswith("The museum. 6 pairs of small drawings, right and wrong next to each other.")
    assert all(f"{name}: {label.right} Broken: {label.wrong}" in words for name, label in LABELS.items())


def test_orthogonalized_whole_singular_values_keep_to_the_band_and_in_blocks_they_do_not() -> None:
    assert all(map(is_healthy, spectrum_of("whole")))
    values = spectrum_of("blocks")
    assert values[0] > HEALTHY[1]
    assert values[-1] < HEALTHY[0]
    assert not any(map(is_healthy, (values[0], values[-1])))
    blocks = halves("block-wise Newton–Schulz")
    heights = [[-box.get_height() if box.get_height() < 0 else box.get_height() for box in half] for half in blocks]
    assert len(heights[0]) == len(heights[1]) == 7  # the band, and six values
    assert heights[1][1] / heights[0][1] == pytest.approx(spectrum_of("blocks")[0] / spectrum_of("whole")[0])


def test_a_rank_with_its_own_piece_alone_has_less_of_the_matrix() -> None:
    right, wrong = halves("owned piece only")
    assert len(right) == len(wrong) == 20
    assert [to_hex(box.get_facecolor()) == "#ffffff" for box in wrong] == 9 * [False] + 11 * [True]
    assert "#ffffff" not in {to_hex(box.get_facecolor()) for box in right}
