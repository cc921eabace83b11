"""The museum's picture: one pair of drawings for every exhibit, with what the exhibits really do in it."""

import pytest
from figure_helpers import assert_readable, texts
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from distmuon.sharding.layout import ParamSpec, plan
from muonbook.ch11.figures import LABELS, SHORTER, describe_museum, draw_museum, spectrum_of
from muonbook.ch11.museum import EXHIBITS, without_padding
from muonbook.figures.healthy import HEALTHY, is_healthy
from muonbook.figures.style import ACCENT, MUTED, PADDING


def halves(name: str) -> list[list[Rectangle]]:
    """Return the boxes in the right frame of an exhibit's pair, and those in the wrong one."""
    boxes = [patch for patch in draw_museum("", "", [name]).axes[0].patches if isinstance(patch, Rectangle)]
    frames = {to_hex(box.get_edgecolor()).upper(): box for box in boxes if box.get_linewidth() == 1.2}
    inside = []
    for frame in (frames[MUTED], frames[ACCENT]):
        low, high = frame.get_x(), frame.get_x() + frame.get_width()
        inside.append([box for box in boxes if box is not frame and low <= box.get_x() < high])
    return inside


def test_every_exhibit_has_a_pair_and_no_other_has() -> None:
    assert set(LABELS) == set(EXHIBITS)
    figure = draw_museum("The museum", "Which one?")
    assert {SHORTER.get(name, name) for name in LABELS} < set(texts(figure))
    assert "Which one?" in texts(figure)
    assert_readable(figure)
    words = describe_museum("The museum")
    assert words.startswith("The museum. 11 pairs of small drawings, right and wrong next to each other.")
    assert all(f"{name}: {label.right} Broken: {label.wrong}" in words for name, label in LABELS.items())


def test_orthogonalized_whole_singular_values_keep_to_the_band_and_otherwise_they_do_not() -> None:
    assert all(map(is_healthy, spectrum_of("whole")))
    for what in ("blocks", "momentum"):
        values = spectrum_of(what)
        assert values[0] > HEALTHY[1]
        assert values[-1] < HEALTHY[0]
        assert not any(map(is_healthy, (values[0], values[-1])))
    blocks = halves("block-wise Newton–Schulz")
    heights = [[-box.get_height() if box.get_height() < 0 else box.get_height() for box in half] for half in blocks]
    assert len(heights[0]) == len(heights[1]) == 7  # the band, and six values
    assert heights[1][1] / heights[0][1] == pytest.approx(spectrum_of("blocks")[0] / spectrum_of("whole")[0])


def test_a_bucket_without_padding_is_the_one_that_the_exhibit_plans() -> None:
    spec = ParamSpec("w", (5, 1), "float32")
    layout = plan([spec], 2)
    padded, bare = (planned.buffers[0].buckets[0].padded for planned in (layout, without_padding(layout)))
    right, wrong = halves("missing padding")
    assert (len(right), len(wrong)) == (padded, bare) == (6, 5)
    assert [to_hex(box.get_facecolor()).upper() for box in right].count(PADDING) == 1


def test_the_early_cast_is_nan_and_the_late_one_is_not() -> None:
    written = texts(draw_museum("", "", ["cast before normalizing"]))
    assert written.count("NaN") == 1
    right, wrong = halves("cast before normalizing")
    assert len({to_hex(box.get_facecolor()) for box in right}) > 3
    assert {to_hex(box.get_facecolor()) for box in wrong} == {"#ffffff"}
