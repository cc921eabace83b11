"""The price of TP: where one part of one matrix travels, and the formula beside the planner's numbers."""

import pytest
from figure_helpers import assert_readable, boxes
from matplotlib.colors import to_hex

from muonbook.ch12 import planned_bytes
from muonbook.ch12.figure_holders import D, T, frames_of_parts
from muonbook.ch15.experiments import repeats
from muonbook.figures import style
from muonbook.measure import formulas

TP, RANKS, SHOWN = 8, [4, 64, 1024], ("bucketed", "flat_cut")


@pytest.fixture(scope="module")
def added() -> dict[str, dict[int, planned_bytes.Added]]:
    return planned_bytes.growth("llama3_70b", TP, RANKS)


def test_one_part_goes_to_other_dp_ranks_and_over_tp_where_a_dp_rank_holds_it() -> None:
    frames = frames_of_parts("One part")
    for holders, frame in enumerate(frames):
        assert_readable(frame.figure)
        drawn = [box for d in range(D) for t in range(T) for box in boxes(frame.figure, f"part-{d}-{t}")]
        colours = [to_hex(box.get_facecolor()) for box in drawn]
        sent = holders * (T - 1) + (holders == 2)  # over TP, and from one holder to the other
        assert colours.count(to_hex(style.ACCENT)) == sent
        assert colours.count(to_hex(style.COLD)) == D - 1
        by_formula = float(formulas.ratio("gather_cut", D, T, 4, 4, 2, max(holders, 1))) - 1
        assert (f"{by_formula:.2f} more" in frame.alt) == (holders > 0)


def test_tp_adds_its_seven_quarters_of_the_holders_share_and_dp_a_quarter_where_all_travels(added) -> None:
    for dp in RANKS:
        bucketed, cut = repeats("llama3_70b", dp, TP, "blocks.40.up", SHOWN)
        assert cut.dp_ranks < bucketed.dp_ranks
        for each in (bucketed, cut):  # embeddings, AdamW's, bring it down
            by_formula = 1.75 * each.mean / TP / (dp - 1)
            assert 0.96 * by_formula < added[each.title][dp].tp < by_formula
        assert 0.24 < added["gather all, bucketed"][dp].dp < 0.25
        assert 0 <= added["owner"][dp].dp < (0.03 if dp < 1024 else 3)  # padding
