"""Plots tell the truth: every point and bar where its number says, names that stand apart, scales that are shared."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from figure_helpers import assert_readable, boxes, curves, texts
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

from muonbook.figures import style
from muonbook.figures.plots import (
    LINES,
    apart,
    describe_bars,
    describe_curves,
    describe_dots,
    describe_spectra,
    draw_bars,
    draw_curves,
    draw_dots,
    draw_spectra,
    line_styles,
    power,
)
from muonbook.figures.style import OPTIMIZERS

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


def test_six_lines_look_different_without_colour_and_none_is_a_ranks() -> None:
    looks = set()
    for line in LINES:
        shade = int(sum(int(to_hex(line["color"])[n : n + 2], 16) for n in (1, 3, 5)) / 3 / 48)
        looks.add((shade, str(line["ls"])))
        assert to_hex(line["color"]).upper() not in {style.dp_colour(r).upper() for r in range(24)}
    assert len(looks) == len(LINES) == 6


def test_an_optimizer_looks_the_same_in_every_picture() -> None:
    ours = {name: (look["color"], look["ls"]) for name, look in OPTIMIZERS.items()}
    assert len({colour for colour, _ in ours.values()}) == len({dashes for _, dashes in ours.values()}) == 3
    assert not {to_hex(colour).upper() for colour, _ in ours.values()} & {style.dp_colour(r).upper() for r in range(24)}
    for names in (["SGD", "AdamW", "Muon"], ["the floor", "Muon", "AdamW, DDP"], ["Muon"]):
        styles = line_styles(names)
        for name in set(names) - {"the floor"}:
            assert (styles[name]["color"], styles[name]["ls"]) == ours[name.split(",")[0]]
    beside = line_styles(["Muon, always", "Muon, once", *(f"other {n}" for n in range(4))])
    colours = [look["color"] for look in beside.values()]
    assert colours[0] == OPTIMIZERS["Muon"]["color"] != colours[1]
    assert colours[0] not in colours[1:]
    assert line_styles(["Muon's bytes"])["Muon's bytes"] == LINES[0]  # not an optimizer's line


@pytest.mark.parametrize(
    ("value", "told"), [(1e-5, "1e−5"), (2e-4, "0.0002"), (0.5, "0.5"), (1e3, "1,000"), (2e4, "20k"), (1e8, "100M")]
)
def test_numbers_along_a_logarithmic_axis_need_no_small_type(value: float, told: str) -> None:
    assert power(value) == told


@pytest.mark.parametrize(("log", "spread"), [(False, 1e-3), (True, 1e-3), (False, 5.0)])
def test_names_at_the_ends_stay_on_the_card_and_apart(log: bool, spread: float) -> None:
    series = {f"Curve number {n}": (X, 10.0 + spread * n - X / 50) for n in range(6)}
    assert_readable(draw_curves(series, "step", "loss", "Six", log_x=log, log_y=log))


def test_long_names_stand_over_the_plot() -> None:
    names = ["Newton–Schulz with the coefficients of Muon", "the exact polar factor"]
    figure = draw_curves(dict.fromkeys(names, LOSS["Muon"]), "step", "loss")
    assert set(names) <= set(texts(figure))
    assert not figure.axes[1].texts
    assert_readable(figure)


def test_bands_marks_and_levels_are_drawn_where_they_belong() -> None:
    x, y = LOSS["Muon"]
    bands, levels = {"Muon": (x, y - 0.1, y + 0.1)}, [(1.0, "counting")]
    figure = draw_curves(LOSS, "step", "loss", bands=bands, marks=[(40, "decay")], levels=levels)
    (band,) = [c for c in figure.axes[1].collections if c.get_gid() == "band-Muon"]
    points = np.asarray(band.get_paths()[0].vertices)
    assert points[:, 1].min() == pytest.approx((y - 0.1).min())
    assert points[:, 1].max() == pytest.approx((y + 0.1).max())
    assert [40, 40] in [np.asarray(line.get_xdata()).tolist() for line in figure.axes[1].lines]
    assert [1, 1] in [np.asarray(line.get_ydata()).tolist() for line in figure.axes[1].lines]
    assert {"decay", "counting"} <= {text.get_text() for text in figure.axes[1].texts}
    assert describe_curves(LOSS, "step", "loss", levels=levels).endswith("; counting at 1.")
    assert_readable(figure)


def test_what_an_axis_cannot_show_is_left_out() -> None:
    figure = draw_curves({"a": ([0, 1, 2, 3], [1, 0, np.nan, 4])}, "x", "y", log_y=True)
    assert np.asarray(curves(figure)["a"].get_ydata()).tolist() == [1, 4]
    with pytest.raises(ValueError, match="no point"):
        draw_curves({"a": ([0], [1])}, "x", "y", log_x=True)


@pytest.mark.parametrize(
    ("series", "options", "message"),
    [
        ({}, {}, "0 series"),
        ({f"{n}": ([1], [1]) for n in range(7)}, {}, "7 series"),
        ({"a": ([1, 2], [1])}, {}, "'a' has x"),
        ({"a": ([], [])}, {}, "no point"),
        ({"a": ([1], [1])}, {"bands": {"b": ([1], [1], [1])}}, r"bands \['b'\]"),
    ],
)
def test_curves_that_cannot_be_drawn_say_why(series: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_curves(series, "x", "y", **options)


def test_labels_are_moved_as_little_as_order_and_distance_ask() -> None:
    assert apart({"a": 50, "b": 90}, 10, 0, 100) == {"a": 50, "b": 90}
    moved = apart({"a": 99, "b": 98, "c": 97, "d": 5}, 10, 0, 100)
    assert list(moved.values()) == [5, 80, 90, 100]
    assert list(moved) == ["d", "c", "b", "a"]
    crowd = list(apart({f"{n}": 0.0 for n in range(5)}, 10, 4, 100).values())
    assert crowd[0] == 4
    assert all(after - before >= 10 for before, after in pairwise(crowd))


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
    assert_readable(figure)


def test_grouped_bars_start_together() -> None:
    figure = draw_bars({"gather_all": {"counted": 3, "predicted": 4}}, grouped=True, unit="calls")
    counted, predicted = boxes(figure, "bar-")
    assert counted.get_x() == predicted.get_x()
    assert counted.get_width() / predicted.get_width() == pytest.approx(3 / 4)
    assert counted.get_y() < predicted.get_y()
    assert "3 calls / 4 calls" in texts(figure)


def test_dashes_mark_a_level_on_every_bar() -> None:
    figure = draw_bars({"steps": 0.5, "time": 2.0}, unit="", level=1.0)
    places = {label: boxes(figure, f"bar-{label}-")[0].get_extents() for label in ("steps", "time")}
    for label, each in places.items():
        found = figure.findobj(LineCollection)
        (level,) = (
            lines for lines in found if isinstance(lines, LineCollection) and lines.get_gid() == f"level-{label}"
        )
        (x, _), (same, _) = figure.axes[0].transData.transform(level.get_segments()[0])
        assert x == same == pytest.approx(each.x0 + (places["time"].width / 2), abs=1)


def test_a_part_that_has_a_colour_elsewhere_and_an_optimizer_keep_it() -> None:
    figure = draw_bars({"rank": {"Muon": 2.0, "tower": 1.0}}, "Parts", colours={"tower": "#123456"})
    (muon,), (tower,) = boxes(figure, "bar-rank-Muon"), boxes(figure, "bar-rank-tower")
    assert to_hex(tower.get_facecolor()) == "#123456"
    assert to_hex(muon.get_facecolor()).upper() == OPTIMIZERS["Muon"]["color"].upper()


def test_a_key_of_many_parts_takes_more_than_one_line() -> None:
    assert_readable(draw_bars({"rank": {f"a part with a long name, {n}": 1.0 for n in range(5)}}, "Parts"))


@pytest.mark.parametrize("rows", [{}, {"a": -1.0}, {"a": float("nan")}, {"a": {f"{n}": 1 for n in range(6)}}])
def test_bars_that_cannot_be_drawn_say_why(rows: Any) -> None:
    with pytest.raises(ValueError, match="bar"):
        draw_bars(rows)


# Spectra


def test_spectra_of_any_size_share_an_axis() -> None:
    figure = draw_spectra({"short": [1.0, 3.0], "long": np.linspace(0.1, 2, 40)}, "Singular values")
    line = curves(figure)["short"]
    assert np.asarray(line.get_xdata()).tolist() == [0.25, 0.75]
    assert np.asarray(line.get_ydata()).tolist() == [3.0, 1.0]
    assert figure.axes[1].get_yscale() == "log"
    assert_readable(figure)


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
    assert_readable(figure)
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
