"""Chapter 15's worker and its measurements: bytes on four grids, shares, repeated work, and what its tables say."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import stored_pages
import worlds

from distmuon import launch
from distmuon.optim.newton_schulz import flops
from muonbook.baselines import TITLES
from muonbook.ch15 import experiments, regimes, timed_steps
from muonbook.ch15.survey import rows, with_a_square
from muonbook.measure import results
from muonbook.measure.workload import TIMED
from muonbook.planner import cost_model
from muonbook.planner.choices import compared
from muonbook.planner.fabrics import FABRICS
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.planned_baselines import PLANNED_BASELINES
from muonbook.planner.planned_worlds import specs_of
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldSetting
from muonbook.runnable_baselines import RUNNABLE
from tools.pages import published

WORKER = str(worlds.ROOT / "scripts" / "15_regimes.py")


def test_skewed_grids_send_what_was_predicted() -> None:
    out = stored_pages.printed("15_regimes", "python ../scripts/15_regimes.py --skew")
    _, grids, *rows, equal = out.splitlines()
    assert re.findall(r"\d x \d", grids) == [f"{dp} x {tp}" for dp, tp in regimes.GRIDS]
    assert equal == "Counted = predicted: True."
    assert [row.split("  ")[-1] for row in rows] == [TITLES[name] for name in ("zero1", "ddp", *regimes.MUON_LAYOUTS)]
    zero1, ddp, bucketed, flat, cut, owner = (float(row.split()[0]) for row in rows)
    assert 1.24 < bucketed / zero1 < 1.25  # the head's and the embedding's bytes do not grow
    assert (f"{flat / zero1:.2f}", owner) == ("1.25", zero1)
    assert owner < cut < 1.02 * zero1
    assert zero1 == pytest.approx(ddp, rel=1e-3)


def test_a_command_without_a_job_is_answered_in_a_sentence() -> None:
    ending = worlds.answer(WORKER)
    assert (ending.code, ending.err) == (2, "error: choose one of --skew, --check and --hint.\n")


# ---- Measuring --------------------------------------------------------------------------------------------


def test_a_share_is_measured_per_batch() -> None:
    found = launch.run(timed_steps.optimizer_share, (32, regimes.token_counts(1024), 1))[0]
    assert found.keys() == {"muon", "adamw"}
    assert all(
        len(shares) == 5 and all(len(each) == 1 and min(each) > 0 for each in shares) for shares in found.values()
    )


def test_the_slowest_rank_of_a_round_counts_and_rounds_are_compared_in_pairs() -> None:
    ranks = [
        {"muon": {"seconds": [3.0, 2.0, 8.0]}, "zero1": {"seconds": [1.0, 2.0, 3.0]}},
        {"muon": {"seconds": [1.0, 6.0, 4.0]}, "zero1": {"seconds": [1.5, 1.0, 4.0]}},
    ]
    assert regimes.slowest(ranks, "muon") == [3, 6, 8]
    assert regimes.ratios(ranks, "muon", "zero1") == {"median": 2, "quartiles": [2, 2.5], "count": 3, "range": [2, 3]}


def demand(baseline: regimes.SizedBaseline) -> dict[str, int]:
    workload, timed = replace(regimes.LINKED, bucket_size=baseline.bucket_size), RUNNABLE[baseline.baseline]
    ledger = timed.predict(workload, regimes.RANKS, 1, (0, 0))
    return cost_model.demand(ledger, {"dp": regimes.RANKS, "world": regimes.RANKS})


def test_what_a_step_asks_of_the_link() -> None:
    """What is reduced, and what a boundary cuts, goes straight to others; cut buckets take more messages."""
    found = {name: demand(baseline) for name, baseline in regimes.LINKS.items()}
    exchanged = {name: each["exchange_bytes"] for name, each in found.items()}
    assert exchanged["ddp"] == 0
    assert found["ddp"]["messages"] == 2 * (regimes.RANKS - 1)
    assert exchanged["zero1"] == pytest.approx(found["ddp"]["ring_bytes"] / 2, rel=1e-3)
    assert exchanged["zero1_small"] == pytest.approx(exchanged["zero1"], rel=1e-3)
    assert found["zero1_small"]["messages"] > 2 * found["zero1"]["messages"]
    assert exchanged["muon_flat"] == pytest.approx(exchanged["zero1"], rel=1e-3)
    assert exchanged["muon_cut"] > exchanged["muon_flat"]
    assert found["muon_cut"]["ring_bytes"] == pytest.approx(found["zero1"]["ring_bytes"], rel=1e-3)


# ---- What the page says -----------------------------------------------------------------------------------


def test_what_the_page_says_of_the_70b_on_1024_ranks_is_planned() -> None:
    plans = experiments.planned("llama3_70b", 128, 8, 1 << 22)
    assert all(each.muon.fits for each in plans.values())
    ratios = experiments.step_ratios(plans)
    assert [f"{ratio:.2f}" for ratio in ratios.values()] == ["2.72", "1.10", "1.05", "1.02"]
    saved = [f"{0.75 * ratios[title]:.2f}" for title in ("gather cut", "gather all, bucketed")]
    assert saved == ["0.79", "2.04"]  # of AdamW's time, with three quarters of its steps
    bucketed = plans["muon"]
    hidden = [sum(plan.seconds[part] for part in ("gradients", "momentum", "parameters") if part in plan.seconds)
              for plan in (bucketed.muon, bucketed.adamw)]  # fmt: skip
    took = [plan.step_seconds - each for plan, each in zip((bucketed.muon, bucketed.adamw), hidden, strict=True)]
    assert f"{took[0] / took[1]:.2f}" == "2.96"  # if all that goes over DP hides
    more = experiments.step_ratios(experiments.planned("llama3_70b", 128, 8, 1 << 24))
    assert f"{more['gather all, bucketed']:.2f}" == "1.48"
    shares = experiments.share_of_passes(plans)
    assert [f"{share:.2g}" for share in shares.values()] == ["0.76", "1.4e+02", "3.1e+02"]
    assert not experiments.planned("llama3_70b", 1024, 1, 1 << 23)["muon_flat"].muon.fits
    seconds = bucketed.muon.seconds
    assert f"{100 * seconds['Newton–Schulz'] / shares['and waiting for the slowest rank']:.1f}" == "4.3"  # passes
    assert [f"{each:.1f}" for each in (sum(seconds.values()), seconds["Newton–Schulz"])] == ["21.9", "13.3"]
    specs, indices = specs_of(MODELS["llama3_70b"], 8)
    part = PLANNED_BASELINES["muon"].lay_out(specs, indices, 128, 8)
    assert len(part.world.matrices) == 60  # type: ignore[union-attr]
    for _, held in part.world.matrices:  # type: ignore[union-attr]
        work, done = np.zeros(128), np.zeros(128, int)
        for row in held:
            work[row.slice] += flops(specs[row.place].full_shape(8))
            done[row.slice] += 1
        large = [row for row in held if row.slice.start <= work.argmax() < row.slice.stop]
        assert len(large) == 2  # the slowest rank has the end of one and the beginning of the next
        assert all(specs[row.place].numel > 8_000_000 for row in large)
        assert np.median(done) == 1


@pytest.mark.parametrize(("grid", "times"), [((128, 8), ["188", "11"]), ((1024, 1), ["181", "4"])])
def test_the_page_s_own_count_of_repeats_is_the_planner_s(grid: tuple[int, int], times: list[str]) -> None:
    page = [cell.source for cell in stored_pages.cells("15_regimes")]
    names: dict[str, Any] = {"plans": experiments.planned("llama3_70b", *grid, 1 << 23)}
    for start in ("import torch", "# Edit: the matrices", "D, T = 128, 8"):
        (source,) = (each for each in page if each.startswith(start))
        exec(source.replace("D, T = 128, 8", f"D, T = {grid}"), names)
    by_hand = [names["times_done"](shard) for shard in names["shards"].values()]
    assert [f"{each:.0f}" for each in by_hand] == times
    if grid == (128, 8):
        assert f"{by_hand[0] / 8:.1f}" == "23.5"  # DP ranks
    planned = [names["plans"][name].repeats for name in ("muon", "muon_flat")]
    assert by_hand == pytest.approx(planned, rel=0.03)


def test_a_gpu_reaches_less_with_one_small_matrix_than_plans_assume() -> None:
    (row,) = (row for row in results.load("gpu")["speed"]["rows"] if row["shape"] == "1024x4096")
    assert f"{row['share_of_peak']:.0%}" == "12%"


def test_predicted_bytes_are_those_that_eight_processes_sent() -> None:
    for row in results.load("regimes")["skew"]:
        over_dp, over_tp = experiments.predicted_bytes(TIMED, row["dp"], row["tp"])
        assert over_dp + over_tp == row["zero1"]["sent_bytes"]
        assert (over_tp > 0) == (row["tp"] > 1)


def test_what_the_page_says_of_the_stored_measurements() -> None:
    found = results.load("regimes")
    shares = [row["median"] for row in found["share"]["256"]["muon"]]
    assert all(share < 5 * 256 / tokens for share, tokens in zip(shares, found["share"]["256"]["tokens"], strict=True))
    assert 3 < shares[-5] / shares[-3] < 5
    assert 3 < shares[-3] / shares[-1] < 5
    four = {(row["dp"], row["tp"]): [row[name]["over_zero1"]["median"] for name in regimes.MUON_LAYOUTS]
            for row in found["skew"]}  # fmt: skip
    assert [f"{ratio:.1f}" for ratio in (min(four[1, 8][:3]), four[1, 8][3])] == ["2.6", "1.3"]


def test_the_formula_of_a_step_over_a_link_is_within_what_the_page_says() -> None:
    links = results.load("regimes")["links"]
    names = ("muon", "muon_cut", "muon_owner")

    def seconds(name: str, mbit: float) -> float:
        asked = links["baselines"][name]
        sent = asked["ring_bytes"] + asked["exchange_bytes"]
        return asked["computation_seconds"]["median"] + sent / (mbit * 1e6 / 8)

    off, by_rate = [], []
    for step in links["steps"]:
        by_rate.append([step[name]["over_zero1"]["median"] for name in names])
        if mbit := step["rate_mbit"]:
            off += [abs(seconds(n, mbit) / seconds("zero1", mbit) - step[n]["over_zero1"]["median"]) for n in names]
    assert 0.06 < max(off) < 0.075
    assert all(slow < fast for slow, fast in zip(by_rate[0], by_rate[-1], strict=True))


def test_what_the_page_says_of_more_ranks_and_advises_is_planned() -> None:
    worlds = results.load("worlds")
    found = rows(worlds["cells"], fabric="nvlink_infiniband", tokens=1 << 22)
    over = {
        name: {(row["model"], row["ranks"]): row["over_adamw"] for row in rows(found, baseline=name) if row["tp"]}
        for name in ("muon", "muon_cut", "muon_owner")
    }
    assert max(over["muon_cut"].values()) < 4 / 3
    for name, takes in {"muon_cut": {512: "1.1", 4096: "1.3"}, "muon": {64: "1.0"}}.items():
        assert {ranks: f"{over[name]['gpt2', ranks]:.1f}" for ranks in takes} == takes
    assert f"{over['muon']['llama3_70b', 1024]:.1f}" == "2.7"
    assert max(ratio for at, ratio in over["muon_owner"].items() if at[0] == "llama3_70b") < 1.02
    (row,) = rows(found, baseline="muon_owner", model="llama3_70b", ranks=4096)
    assert row["why"] == "no room"
    large = {at for at in over["muon"] if at[0] in ("llama3_70b", "gpt3_175b") and at[1] >= 512}
    assert {at for at, ratio in over["muon"].items() if ratio > 2} == large
    padded = {at for at, ratio in over["muon_owner"].items() if ratio > 4 / 3}
    assert padded == {("gpt2", 1024), ("gpt2", 4096), ("llama3_8b", 4096)}
    tp = {(row["model"], row["ranks"]): row["tp"] for row in rows(found, baseline="muon_owner")}
    for at, ratio in over["muon_owner"].items():
        few = at[1] // tp[at] <= 128 or at[0] == "gpt3_175b"
        ahead = ratio < over["muon_cut"][at]
        assert ahead == ((few or at == ("moonlight", 512)) and at[0] != "gpt2"), at


def test_what_the_page_says_of_moonlight_is_its_shape() -> None:
    shape = MODELS["moonlight"]
    assert shape.experts is not None
    routed = [weight for weight in shape.weights() if ".experts." in weight.name]
    assert {weight.shape for weight in routed} == {(1408, 2048), (2048, 1408)}
    assert (shape.experts.active, shape.experts.routed) == (6, 64)
    others = 1 - sum(weight.used * 1408 * 2048 for weight in routed) / shape.active
    assert 0.45 < others < 0.5  # nearly half


def test_plans_are_off_from_what_clusters_added_by_what_the_page_says() -> None:
    (page,) = (cell.source for cell in stored_pages.cells("15_regimes") if "DMuon's owners" in cell.source)
    added = [figure for figure in published.FIGURES if figure.what == published.ADDED]
    nvidia = [figure for figure in added if figure.by.startswith("NVIDIA")]
    measured, planned = ([f"{100 * each:.1f} %" for each in row] for row in
                         zip(*((figure.published, figure.planned()) for figure in nvidia), strict=True))  # fmt: skip
    assert f"NVIDIA measured {' and '.join(measured)} in two" in page
    assert f"our plans say {' and '.join(planned)}." in page
    (owners,) = (figure for figure in added if figure.world.endswith("one owner per matrix"))
    theirs, ours = (1000 * published.DMUON_ADAMW * share for share in (owners.published, owners.planned()))
    assert f"added {theirs:.0f} ms to a step where we planned {ours:.0f}." in page


def test_why_the_least_tp_nearly_always_wins_is_what_the_page_says() -> None:
    fabric = FABRICS["nvlink_infiniband"]
    rate = {tp: tp * fabric.links(4096 // tp, tp)["dp"].bytes_per_second for tp in (1, 2, 4, 8, 16)}
    assert rate[1] == rate[2] == rate[4] == rate[8] == rate[16] / 2  # of T rings; 16 TP ranks fill two hosts

    def seconds(model: str, tp: int) -> dict[str, float]:
        world = WorldSetting(MODELS[model], Degrees(4096 // tp, tp), tokens=1 << 22)
        (cut,) = (each for each in compared(world) if each.baseline.title == "gather cut")
        return dict(cut.muon.seconds)

    few, many = seconds("moonlight", 8), seconds("moonlight", 16)
    assert many["gradients"] == pytest.approx(few["gradients"] / 2, rel=0.02)
    assert many["activations (tp)"] > few["activations (tp)"]
    one, four = (seconds("gpt2", tp)["gradients"] for tp in (1, 4))
    sent = 4 * MODELS["gpt2"].parameters / rate[1]  # float32
    assert sent < 0.1 * one < four < one / 2  # so nearly all of it is latency


def test_where_an_equal_grid_wins_is_what_the_page_says() -> None:
    cells = with_a_square(rows(results.load("worlds")["cells"], baseline="muon_cut"))
    best = [dict(cell) for cell in cells if cell["square_cost"] == 0]
    huge = rows(best, model="gpt3_175b", ranks=512, tp=16)
    moonlight = rows(best, model="moonlight", tokens=1 << 20)
    assert (len(best), len(huge), len(moonlight)) == (16, 12, 4)
    assert all("ethernet" in cell["fabric"] for cell in moonlight)


def test_the_quickest_grid_is_another_one_in_the_paper_s_layout_as_the_claims_page_says() -> None:
    skew = results.load("regimes")["skew"]
    seconds = {name: {(row["dp"], row["tp"]): row[name]["seconds"]["median"] for row in skew} for name in regimes.SKEW}
    quickest = {name: min(of, key=lambda grid: of[grid]) for name, of in seconds.items()}
    assert (quickest["muon"], quickest["muon_cut"]) == ((4, 2), (8, 1))
