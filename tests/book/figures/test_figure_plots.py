"""Plots tell the truth: every point and bar where its number says, names that stand apart, scales that are shared."""

import numpy as np
import pytest
from figure_helpers import boxes, curves, texts

from muonbook.figures import style
from muonbook.figures.plots import (
    describe_bars,
    describe_curves,
    describe_dots,
    describe_spectra,
    draw_bars,
    draw_curves,
    draw_dots,
    power,
)

X = np.arange(1, 101)
LOSS = {"Muon": (X, 2 * np.exp(-X / 20) + 0.1), "AdamW": (X, 2 * np.exp(-X / 30) + 0.11), "SGD": (X, 3 - X / 100)}
MEMORY = {
    "DDP": {"parameters": 4e6, "gradients": 4e6, "state": 8e6},
    "ZeRO-1": {"parameters": 4e6, "state": 2e6},
}


# Curves


def test_every_point_is_drawn_and_every_end_is_named() -> None:
    figure = draw_curves(LOSS, "step", "loss", title="Loss", note="One seed.")
    for name, line in curves(figure).items():
        assert np.array_equal(line.get_xdata(), LOSS[name][0])
        assert np.array_equal(line.get_ydata(), LOSS[name][1])
    assert {text.get_text() for text in figure.axes[1].texts} == set(LOSS)
    assert {"Loss", "One seed.", "loss"} <= set(texts(figure))
    assert figure.axes[1].get_xlabel() == "step"


@pytest.mark.parametrize(
    ("value", "told"), [(1e-5, "1e−5"), (2e-4, "0.0002"), (0.5, "0.5"), (1e3, "1,000"), (2e4, "20k"), (1e8, "100M")]
)
def test_numbers_along_a_logarithmic_axis_need_no_small_type(value: float, told: str) -> None:
    assert power(value) == told


def test_what_an_axis_cannot_show_is_left_out() -> None:
    figure = draw_curves({"a": ([0, 1, 2, 3], [1, 0, np.nan, 4])}, "x", "y", log_y=True)
    assert np.asarray(curves(figure)["a"].get_ydata()).tolist() == [1, 4]


# Bars


def test_stacked_bars_have_the_length_of_their_numbers() -> None:
    figure = draw_bars(MEMORY, "Memory per rank")
    scale = (style.WIDTH - 2 * style.MARGIN) / 16e6
    for label, parts in MEMORY.items():
        at = style.MARGIN
        for part, value in parts.items():
            (box,) = boxes(figure, f"bar-{label}-{part}")
            assert (box.get_x(), box.get_width()) == pytest.approx((at, value * scale))
            at += value * scale
    assert {"16 MB", "6 MB", "DDP", "parameters", "state"} <= set(texts(figure))


# Alt text


def test_alt_text_has_the_true_numbers() -> None:
    assert describe_curves({"a": ([1, 2, 4], [3.0, -0.5, 1.234567])}, "step", "loss", "Loss") == (
        "Loss. loss over step. a: from 3 to 1.23, least −0.5, greatest 3, for step 1 to 4."
    )
    assert describe_bars(MEMORY) == (
        "Bars. DDP: parameters 4 MB, gradients 4 MB, state 8 MB; ZeRO-1: parameters 4 MB, state 2 MB."
    )
    assert describe_bars({"a": 0.5}, "Ratios", unit="×") == "Ratios. a: 0.5 ×."
    assert describe_spectra({"M": [1, 4, 2]}) == "Singular values. M: largest 4, median 2, smallest 1."


# ---- Dots -------------------------------------------------------------------------------------------------

DOTS = {"a draw": [0.5, 1.0, 1.25], "a claim": [0.25, 0.75]}


def test_dots_stand_where_their_values_are_red_below_the_level() -> None:
    figure = draw_dots(DOTS, "Dots", "Of some seeds.")
    scale = (style.WIDTH - 2 * style.MARGIN) / (1.05 * 1.25)
    for label, values in DOTS.items():
        for side, wanted in (("below", [v for v in values if v < 1]), ("above", [v for v in values if v >= 1])):
            (dots,) = (c for c in figure.axes[0].collections if c.get_gid() == f"dots-{label}-{side}")
            x = np.asarray(dots.get_offsets())[:, 0].tolist()
            assert x == pytest.approx([style.MARGIN + value * scale for value in wanted])
    assert {"1 of 3", "2 of 2"} <= set(texts(figure))


def test_dots_are_told_with_their_range_and_how_many_are_below() -> None:
    told = describe_dots(DOTS, "Dots")
    assert told == "Dots. a draw: 0.5 to 1.25, 1 of 3 below 1; a claim: 0.25 to 0.75, 2 of 2 below 1."
