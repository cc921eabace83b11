"""The survey of planned worlds: the same every time, and what is stored is what today's code plans."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distmuon.sharding.layout import FLAT, ParamSpec, plan
from muonbook.ch15.worlds.planned_steps import TimedWorld
from muonbook.ch15.worlds.survey import (
    FAST,
    MOONLIGHT_TOKENS,
    SQUARES,
    TOKENS,
    WORLDS,
    assumptions,
    cells_of,
    layouts_of,
    moonlight,
    survey,
)
from muonbook.ch15.worlds.verdicts import near_one, of_algorithm, rows, verdict
from muonbook.measure import reported, results
from muonbook.planner.algorithms import ALGORITHMS
from muonbook.planner.fabrics import FABRICS
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.planned_worlds import PlannedWorld

# Planned anew: every world of the smallest model, and one of each other; all of them take minutes.
SAMPLE = [*(("gpt2", ranks) for ranks in WORLDS), ("llama3_8b", 128), ("moonlight", 32), ("llama3_70b", 1024),
          ("gpt3_175b", 512)]  # fmt: skip


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return results.load("worlds")


@pytest.fixture(scope="module")
def quick() -> dict[str, Any]:
    return survey(quick=True)


def in_file(found: Any) -> Any:
    """Return what a results file gives back of it."""
    return json.loads(json.dumps(found))


# ---- Stored, and planned anew ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "ranks"), SAMPLE, ids=lambda value: str(value))
def test_stored_worlds_are_those_of_todays_planner(stored: dict[str, Any], model: str, ranks: int) -> None:
    assert in_file(cells_of(model, ranks, TOKENS)) == rows(stored["cells"], model=model, ranks=ranks)
    layouts = [] if ranks in SQUARES else in_file(layouts_of(model, ranks))
    assert layouts == rows(stored["layouts"], model=model, ranks=ranks)


def test_stored_verdicts_follow_from_the_stored_cells(stored: dict[str, Any]) -> None:
    assert in_file(verdict(stored["cells"], stored["layouts"])) == stored["verdict"]


def test_what_is_stored_of_claims_and_assumptions_is_todays(stored: dict[str, Any]) -> None:
    assert in_file(assumptions()) == stored["assumptions"]
    assert stored["algorithms"] == {name: each.title for name, each in ALGORITHMS.items()}
    assert in_file(moonlight((16,))) == rows(stored["moonlight"], ranks=16)


def test_every_world_was_surveyed_by_every_algorithm(stored: dict[str, Any]) -> None:
    every = {(model, ranks) for model in stored["models"] for ranks in WORLDS}
    for name in ALGORITHMS:
        cells = rows(stored["cells"], algorithm=name)
        assert len(cells) == stored["verdict"]["cells"] == len(every) * stored["verdict"]["assumptions"]
        assert {(cell["model"], cell["ranks"]) for cell in cells} == every


# ---- Against an independent count -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "rule", "over", "repeats"),
    [("bucketed", "megatron", 3.22, 187), ("flat", "flat", 1.13, 11), ("flat_cut", "flat", 1.07, 11)],
)
def test_the_70b_on_1024_ranks_takes_what_was_counted_elsewhere(
    stored: dict[str, Any], algorithm: str, rule: str, over: float, repeats: int
) -> None:
    """Nothing is recomputed in that count."""
    world = TimedWorld.of(MODELS["llama3_70b"], 128, 8, ALGORITHMS[algorithm], recompute=False)
    step = world.step(FABRICS[FAST], 1 << 22)
    assert step.muon / step.adamw == pytest.approx(over, abs=0.005)
    place = {"model": "llama3_70b", "ranks": 1024, "tp": 8, "rule": rule}
    (layout,) = rows(stored["layouts"], **place)
    assert layout["redundancy"] == pytest.approx(repeats, abs=0.5)


@pytest.mark.parametrize(
    ("algorithm", "percent"),
    [("bucketed", (0.8, 1.3, 2.3, 4.0)), ("flat", (0.6, 0.8, 1.2, 1.95)), ("flat_cut", (0.5, 0.5, 0.5, 0.5))],
)
def test_moonlight_adds_what_was_counted_elsewhere(
    stored: dict[str, Any], algorithm: str, percent: tuple[float, ...]
) -> None:
    """Of 128 ranks and flat, the other count said 2.0: with experts in buffers of their own."""
    found = rows(stored["moonlight"], algorithm=algorithm, tokens=MOONLIGHT_TOKENS[0])
    assert [100 * row["extra"] for row in found if row["ranks"] <= 128] == pytest.approx(percent, abs=0.05)


def test_the_bytes_of_gather_cut_are_those_counted_elsewhere() -> None:
    """12 blocks of width 1,536, 48 matrices: a transformer of which somebody else worked it out."""
    shapes = [(3, 1), (1, 1), (4, 1), (1, 4)] * 12
    specs = [ParamSpec(str(n), (1536 * a, 1536 * b), "float32") for n, (a, b) in enumerate(shapes)]
    found = []
    for dp in (2, 8, 32, 64, 256):
        world = PlannedWorld(None, dp, 1, plan(specs, dp, FLAT), frozenset(range(48)))
        zero1 = world.ledger(muon=False).total(group="dp").sent_bytes
        found.append((round(1 + world.gather_cut_bytes / zero1, 3), round(world.redundancy[0], 2)))
    assert found == [(1.000, 1.0), (1.004, 1.11), (1.005, 1.62), (1.006, 2.36), (1.006, 6.93)]


# ---- Worlds in which a claim was made -------------------------------------------------------------------------


def test_the_reports_own_world_sends_least_where_all_four_ranks_stand_in_a_row() -> None:
    apart, square, in_a_row = (max(sent.muon for sent in reported.steps(dp, 4 // dp)) for dp in (4, 2, 1))
    assert apart > square > in_a_row


def test_what_muon_adds_to_moonlight_halves_where_the_batch_doubles(stored: dict[str, Any]) -> None:
    small, large = (rows(stored["moonlight"], tokens=tokens) for tokens in MOONLIGHT_TOKENS)
    for one, two in zip(small, large, strict=True):
        assert [one[key] for key in ("algorithm", "ranks", "tp")] == [two[key] for key in ("algorithm", "ranks", "tp")]
        assert one["extra"] == pytest.approx(2 * two["extra"], rel=1e-3)
        assert one["optimizer"] > one["extra"] > one["extra_least"]


# ---- The survey and its verdicts ------------------------------------------------------------------------------


def test_the_survey_is_the_same_every_time_and_fits_a_results_file(quick: dict[str, Any]) -> None:
    again = survey(quick=True)
    assert in_file(quick) == in_file(again)
    assert quick["verdict"]["bucketed"]["with_a_choice"] > 0
    for row in quick["layouts"]:
        assert row["dp"] * row["tp"] == row["ranks"]
        assert row["gather_all_bytes"] <= row["gather_all_bytes_most"]
        assert row["gather_cut_over_zero1"] <= row["gather_all_over_zero1"]
        assert row["redundancy"] <= row["redundancy_most"] <= row["ranks"]
    for cell in quick["cells"]:
        if cell["tp"] is not None:
            assert str(cell["tp"]) in cell["tp_choices"].split()
            assert cell["over_adamw"] >= 1  # four digits: MuonW on one node adds less
            assert cell["square_cost"] is None or cell["square_cost"] >= 0


def cell(tp: int | None, **more: Any) -> dict[str, Any]:
    found = {
        "model": "a", "ranks": 16, "tokens": 1024, "tp": tp, "tp_choices": "1 2 4 8", "tp_for_communication": 8,
        "has_room": True, "square_cost": 0.5, "square_cost_communication": 0.25, "over_adamw": 1.2,
        "over_forward_backward": 0.02,
    }  # fmt: skip
    return found | more


def test_a_verdict_counts_cells_with_a_grid_a_choice_and_a_square() -> None:
    said = of_algorithm(
        [
            cell(1),
            cell(4, square_cost=0.0, has_room=False, over_adamw=1.4, over_forward_backward=0.04),
            cell(8, tp_for_communication=4, square_cost_communication=0.0, over_forward_backward=0.005),
            cell(1, tp_choices="1", tp_for_communication=1, square_cost=None, over_forward_backward=0.01),
            {"model": "b", "ranks": 16, "tokens": 1024, "tp": None, "why": "no room"},
        ]
    )
    assert (said["with_a_grid"], said["with_room"], said["with_a_choice"]) == (4, 3, 3)
    assert said["adds_at_most_3_percent"] == {"1,024 tokens": 0.75}
    assert said["adds_at_most_1_percent"] == {"1,024 tokens": 0.5}
    assert said["least_tp_wins_step"] == said["most_tp_wins_step"] == said["square_wins_step"] == 0.3333
    assert said["most_tp_wins_communication"] == 0.6667
    assert (said["square_possible"], said["square_worlds"], said["square_and_more_tp_possible"]) == (3, 1, 3)
    assert said["square_wins_communication_then"] == 0.3333
    assert (said["over_adamw_median"], said["over_adamw_most"]) == (1.2, 1.4)


def test_near_one_is_about_bytes_without_tp() -> None:
    row = {"tp": 1, "rule": "flat", "gather_cut_over_zero1": 1.01, "gather_all_over_zero1": 1.3, "redundancy": 2.0}
    said = near_one([row, row | {"gather_cut_over_zero1": 1.02}, row | {"tp": 2, "gather_cut_over_zero1": 5.0},
                     row | {"rule": "megatron"}])  # fmt: skip
    assert (said["flat_cut_least"], said["flat_cut_most"]) == (1.01, 1.02)
    assert said["bucketed_least"] == said["bucketed_most"] == 1.3
    assert said["redundancy_most"] == 2
