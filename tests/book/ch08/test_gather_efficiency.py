"""What a gather brings to a rank: every element sorted once, on maps that can be checked by hand."""

from fractions import Fraction

import pytest
from matplotlib.patches import Rectangle

from distmuon.sharding.layout import ParamSpec, plan
from muonbook.ch08 import figure_freight, gather_efficiency
from muonbook.ch08.trace_one_matrix import SMALL
from muonbook.measure.formulas import mean_owners

MUON = (0, 1)  # A [3, 4] and B [4, 5]; AdamW takes b [3]; four shards of 9, one element of padding


def test_every_element_is_of_use_or_not() -> None:
    layout = plan(SMALL, 4)
    sorted_ = [[round(36 * share) for share in gather_efficiency.freight_of(layout, MUON, rank)] for rank in range(4)]
    assert sorted_ == [[12, 0, 20, 4], [32, 0, 0, 4], [20, 0, 12, 4], [20, 0, 12, 4]]
    assert [36 * share for share in gather_efficiency.mean_freight(layout, MUON)] == pytest.approx([21, 0, 11, 4])


def test_what_a_rank_owns_whole_it_had_before() -> None:
    layout = plan([ParamSpec("A", (2, 4), "float32"), ParamSpec("B", (2, 4), "float32")], 2)
    assert gather_efficiency.freight_of(layout, MUON, 0) == (0, 0.5, 0.5, 0)
    assert gather_efficiency.only_cut_ratio(layout, MUON) == 1
    assert mean_owners(layout, MUON) == gather_efficiency.repeated_flops(layout, MUON) == 1


def test_a_bucket_without_matrices_is_not_gathered() -> None:
    layout = plan(SMALL, 4, bucket_size=30)  # b has a bucket of its own
    assert len(layout.buckets) == 2
    assert gather_efficiency.freight_of(layout, MUON, 3) == (20 / 32, 0, 12 / 32, 0)


def test_only_cut_matrices_travel_among_their_owners() -> None:
    layout = plan(SMALL, 4)  # A has two owners, B three
    received = (12 * 1 + 20 * 2) / 4  # elements, mean over ranks
    assert gather_efficiency.only_cut_ratio(layout, MUON) == pytest.approx(1 + 2 * received / (8 * 3 / 4 * 32))
    assert mean_owners(layout, MUON) == Fraction(12 * 2 + 20 * 3, 32)


def test_the_figure_shows_every_share_and_says_what_is_of_use() -> None:
    rows = {
        "rank 0": gather_efficiency.Freight(0.5, 0.0, 0.3, 0.2),
        "rank 1": gather_efficiency.Freight(0.25, 0.25, 0.5, 0.0),
    }
    axes = figure_freight.draw_freight(rows, "What a gather brings").axes[0]
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    widths = {box.get_gid() or "": box.get_width() for box in boxes}
    full = sum(width for name, width in widths.items() if name.endswith("rank 0"))
    assert widths["cut-rank 0"] / full == pytest.approx(0.5)
    assert widths["others-rank 1"] / full == pytest.approx(0.5)
    assert {"of use: 50 %", "of use: 25 %"} <= {text.get_text() for text in axes.texts}
    assert "rank 1: 25 % cut, 25 % mine, 50 % others, 0 % dead." in figure_freight.describe_freight(rows, "Freight")
