"""The price of TP as a share of the grid: red columns are the DP ranks that hold a piece, the numbers the planner's."""

import numpy as np
import pytest
from figure_helpers import assert_readable, texts

from muonbook.ch12 import byte_tables, figure_bytes
from muonbook.ch12.figure_holders import SHOWN, frames_of_holders
from muonbook.planner.choices.repeats import repeats

TP, RANKS = 8, [4, 64, 1024]


@pytest.fixture(scope="module")
def over() -> dict[str, tuple[list[int], list[float]]]:
    return figure_bytes.growth_curves("llama3_70b", TP, RANKS)


def test_red_columns_are_the_holders_and_the_numbers_those_of_the_curves(over) -> None:
    frames = frames_of_holders("llama3_70b", "blocks.40.up", TP, over, "A model")
    for n, (dp, frame) in enumerate(zip(RANKS, frames, strict=True)):
        assert_readable(frame.figure)
        assert len({tuple(each.figure.get_size_inches()) for each in frames}) == 1
        cells = [np.asarray(mesh.get_array()) for mesh in frame.figure.axes[0].collections if mesh.get_gid()]
        found = repeats("llama3_70b", dp, TP, "blocks.40.up", SHOWN)
        for colours, each in zip(cells, found, strict=True):
            assert colours.shape == (TP, dp, 3)
            red = (colours == colours.reshape(-1, 3)[each.busy.argmax()]).all(axis=2)
            assert np.array_equal(red, each.busy)
            assert f"{over[each.title][1][n]:.2f} ×" in texts(frame.figure)
            assert f"{each.title} {each.dp_ranks}" in frame.caption
        assert frame.alt.startswith(f"A model: {dp:,} DP × 8 TP ranks. Red columns of {dp:,}: ")


def test_the_ratio_grows_by_the_red_share_times_seven_quarters(over) -> None:
    for n, dp in enumerate(RANKS):
        bucketed, cut = repeats("llama3_70b", dp, TP, "blocks.40.up", SHOWN)
        assert cut.dp_ranks < bucketed.dp_ranks
        by_formula = 1.25 + 1.75 * bucketed.mean / TP / (dp - 1)  # embeddings, AdamW's, bring it down
        assert 0.97 * by_formula < over["bucketed"][1][n] < by_formula


def test_all_ratios_stand_in_a_table(over) -> None:
    first, *rows = byte_tables.growth_lines(over)
    assert first.split("  ")[1:] == list(over)
    assert [row.rsplit("  ", 1)[1] for row in rows] == ["4 DP ranks", "64 DP ranks", "1,024 DP ranks"]
    assert [float(word) for word in rows[-1].split()[:4]] == [round(curve[1][-1], 2) for curve in over.values()]
