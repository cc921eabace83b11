"""One report, counted in six ways: the table of the claims page, and the numbers in it."""

import pytest

from muonbook.measure import reported, results
from tools.pages import report_counts


def test_six_ways_of_counting_lead_from_the_reports_number_to_that_of_whole_steps_on_one_grid() -> None:
    counted = report_counts.ways(results.load("report_traces"))
    assert [way.written for way in counted] == ["0.57", "0.594", "0.45", "0.24", "0.585", "1.71"]
    events, kernels, ranks, calls, step, one_grid = counted
    for name in ("muon", "adamw"):  # the first change takes away what had been counted again, and nothing else
        assert getattr(events, name)["counted once"] == sum(getattr(kernels, name).values())
    # what the calls leave out is what AdamW itself sends
    assert step.muon["the rest"] == sum(step.muon.values()) - sum(calls.muon.values()) == sum(one_grid.adamw.values())
    assert ranks.muon["waiting"] > 0.3 * sum(ranks.muon.values())
    # time and bytes are of the same five steps, so one over the other is the rate that the page names
    rate = sum(calls.adamw.values()) / (ranks.adamw["sending"] / 1000)
    assert rate / 1e9 == pytest.approx(results.load("claims")["projection"]["gigabytes_per_second"])


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
