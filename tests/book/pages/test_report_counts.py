"""One report, counted in six ways: the film of the claims page, and the numbers in it."""

import numpy as np
import pytest
from figure_helpers import assert_readable, boxes, lines, texts
from matplotlib.colors import to_hex

from muonbook.figures import player, style
from muonbook.measure import reported, results
from tools.pages import report_counts


def test_six_ways_of_counting_lead_from_the_reports_number_to_that_of_whole_steps_on_one_grid() -> None:
    counted = report_counts.ways(results.load("report_traces"))
    assert [way.written for way in counted] == ["0.57", "0.594", "0.45", "0.24", "0.585", "1.71"]
    events, kernels, ranks, calls, step, one_grid = counted
    for name in ("muon", "adamw"):  # the first change takes away what had been counted again, and nothing else
        assert getattr(events, name)[report_counts.ONCE] == sum(getattr(kernels, name).values())
    # on one scale: what the calls leave out is what AdamW itself sends
    assert calls.bar == step.bar == one_grid.bar
    assert calls.muon[report_counts.LEFT_OUT] == step.muon[report_counts.REST] == sum(one_grid.adamw.values())
    assert ranks.muon[report_counts.WAITING] > 0.3 * sum(ranks.muon.values())


@pytest.fixture(scope="module")
def walk() -> list[player.Frame]:
    return report_counts.frames_of_ways(report_counts.ways(results.load("report_traces")))


def test_every_frame_of_the_walk_shows_results_so_far_and_inks_its_own(walk: list[player.Frame]) -> None:
    results_in_order = ["0.57", "0.594", "0.45", "0.24", "0.585", "1.71"]
    assert player.html("ways", walk)
    for now, frame in enumerate(walk):
        stones = [patch for patch in frame.figure.axes[0].patches if (patch.get_gid() or "").startswith("stone-")]
        assert [to_hex(stone.get_facecolor()) == style.INK.lower() for stone in stones] == [n == now for n in range(6)]
        written = [text for text in texts(frame.figure) if text in ("?", *results_in_order)]
        assert written == [result if n <= now else "?" for n, result in enumerate(results_in_order)]
        assert frame.caption.startswith(f"{written[now]}: ")
        assert len(frame.caption.split()) <= 12
        assert f"Muon / AdamW {written[now]}." in frame.alt
        assert_readable(frame.figure)


def test_adamws_bar_shrinks_to_the_length_of_the_dashes_and_to_a_guide(walk: list[player.Frame]) -> None:
    calls, step, one_grid = (frame.figure for frame in walk[3:])
    (left_out,), (rest,) = boxes(calls, f"Muon-{report_counts.LEFT_OUT}"), boxes(step, f"Muon-{report_counts.REST}")
    assert left_out.get_bbox().bounds == rest.get_bbox().bounds
    assert left_out.get_linestyle() == rest.get_linestyle() != "-"
    before, after = (boxes(figure, "AdamW-")[0].get_bbox() for figure in (step, one_grid))
    assert before.width == pytest.approx(report_counts.ACROSS)
    assert after.extents[::2] == pytest.approx(rest.get_bbox().extents[::2])
    ((guide,),) = (line.get_segments() for line in lines(one_grid, "guide"))
    assert guide[:, 0] == pytest.approx([after.x1, after.x1])
    assert not lines(calls, "guide") + lines(step, "guide")


def test_every_ranks_dot_stands_on_the_scale_of_the_bars(walk: list[player.Frame]) -> None:
    figure, ratios = walk[2].figure, report_counts.by_rank(results.load("report_traces"))
    dots = {line.get_gid(): np.ravel(line.get_xdata())[0] for line in figure.axes[0].lines if line.get_gid()}
    (mean,) = lines(figure, "mean")
    assert len(dots) == 4
    for who in (f"rank {rank}" for rank in range(4)):
        assert dots[f"dot-{who}"] == pytest.approx(style.MARGIN + report_counts.ACROSS * ratios[who])
        assert f"{who} {ratios[who]:.3f}" in walk[2].alt
    bar = boxes(figure, "Muon-")[-1].get_bbox()
    assert mean.get_segments()[0][0][0] == pytest.approx(bar.x1)


def test_which_rank_one_asks_decides_the_ratio_of_one_and_the_same_run() -> None:
    ratios = report_counts.by_rank(results.load("report_traces"))
    single = [ratio for who, ratio in ratios.items() if who.startswith("rank ")]
    assert len(single) == 4
    assert min(single) < ratios["all four"] < max(single) < 0.6
    assert ratios["all four, less waiting"] < min(single)


def test_a_whole_step_of_the_reports_model_is_never_cheaper_than_adamws() -> None:
    for dp, tp in (report_counts.ADAMWS_GRID, report_counts.GRID):
        flat, cut, owner = (reported.over_adamw(dp, tp, name) for name in ("gather_all", "gather_cut", "owner"))
        assert flat > cut >= 0.999
        assert owner >= 0.999
