"""The price of TP as a share of the grid: red columns are the DP ranks that hold a piece, the numbers the planner's."""

import numpy as np
import pytest
from figure_helpers import assert_readable, boxes, texts
from matplotlib.colors import to_hex

from muonbook.ch12 import byte_tables, planned_bytes
from muonbook.ch12.figure_holders import SHOWN, D, T, frames_of_holders, frames_of_parts
from muonbook.figures import style
from muonbook.planner.choices.repeats import repeats

TP, RANKS = 8, [4, 64, 1024]


@pytest.fixture(scope="module")
def added() -> dict[str, dict[int, planned_bytes.Added]]:
    return planned_bytes.growth("llama3_70b", TP, RANKS)


def test_red_columns_are_the_holders_and_the_numbers_those_of_the_curves(added) -> None:
    frames = frames_of_holders("llama3_70b", "blocks.40.up", TP, added, "A model")
    for dp, frame in zip(RANKS, frames, strict=True):
        assert_readable(frame.figure)
        assert len({tuple(each.figure.get_size_inches()) for each in frames}) == 1
        cells = [np.asarray(mesh.get_array()) for mesh in frame.figure.axes[0].collections if mesh.get_gid()]
        found = repeats("llama3_70b", dp, TP, "blocks.40.up", SHOWN)
        for colours, each in zip(cells, found, strict=True):
            assert colours.shape == (TP, dp, 3)
            red = (colours == colours.reshape(-1, 3)[each.busy.argmax()]).all(axis=2)
            assert np.array_equal(red, each.busy)
            assert f"+{7 / 4 * each.busy.any(axis=0).sum() / (dp - 1):.2f}" in texts(frame.figure)
            assert f"{each.title} {each.dp_ranks}" in frame.caption
            assert f"{each.title} {added[each.title][dp].ratio:.2f}" in frame.caption
        assert frame.alt.startswith(f"A model: {dp:,} DP × 8 TP ranks. Red columns of {dp:,}: ")


def test_one_part_goes_to_other_dp_ranks_and_over_tp_where_a_dp_rank_holds_it() -> None:
    frames = frames_of_parts("One part")
    for holders, frame in enumerate(frames):
        assert_readable(frame.figure)
        colours = [
            [to_hex(boxes(frame.figure, f"part-{d}-{t}")[0].get_facecolor()) for d in range(D)] for t in range(T)
        ]
        assert sum(row.count(to_hex(style.ACCENT)) for row in colours) == holders * (T - 1)
        assert colours[0].count(to_hex(style.COLD)) == D - 1
        added = holders * (T - 1) / 4 / (D - 1)  # the page's formula
        assert (f"{added:.2f} more" in frame.alt) == (holders > 0)


def test_tp_adds_its_seven_quarters_of_the_holders_share_and_dp_a_quarter_where_all_travels(added) -> None:
    for dp in RANKS:
        bucketed, cut = repeats("llama3_70b", dp, TP, "blocks.40.up", SHOWN)
        assert cut.dp_ranks < bucketed.dp_ranks
        for each in (bucketed, cut):  # embeddings, AdamW's, bring it down
            by_formula = 1.75 * each.mean / TP / (dp - 1)
            assert 0.96 * by_formula < added[each.title][dp].tp < by_formula
        assert 0.24 < added["bucketed"][dp].dp < 0.25
        assert 0 <= added["owner"][dp].dp < (0.03 if dp < 1024 else 3)  # padding


def test_all_ratios_stand_in_a_table(added) -> None:
    first, *rows = byte_tables.growth_lines(added)
    assert first.split("  ")[1:] == list(added)
    assert [row.rsplit("  ", 1)[1] for row in rows] == ["4 DP ranks", "64 DP ranks", "1,024 DP ranks"]
    assert [float(word) for word in rows[-1].split()[:4]] == [round(of[1024].ratio, 2) for of in added.values()]
