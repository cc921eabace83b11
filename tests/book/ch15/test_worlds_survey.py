"""The survey of planned worlds: what is stored is what today's code plans, and what was counted elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import worlds

from distmuon.sharding.layout import FLAT, ParamSpec
from muonbook.ch15.survey import (
    FAST,
    MOONLIGHT_TOKENS,
    SQUARES,
    TOKENS,
    WORLDS,
    cells_of,
    fits,
    laid_out,
    layouts_of,
    moonlight,
    of_baseline,
    rows,
    square_cost,
    step_of,
    verdict,
)
from muonbook.measure import reported, results
from muonbook.planner.fabrics import FABRICS, Device
from muonbook.planner.owned_worlds import plan_part
from muonbook.planner.planned_baselines import PLANNED_BASELINES
from muonbook.planner.world_plan import KEPT, MOMENTS, StagePlan

# Planned anew: some worlds of the smallest model, and one of others; all of them take minutes.
SAMPLE = [("gpt2", 16), ("gpt2", 512), ("gpt2", 4096), ("llama3_8b", 128), ("moonlight", 32), ("llama3_70b", 1024)]


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return results.load("worlds")


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


def test_what_is_stored_of_a_claim_is_todays(stored: dict[str, Any]) -> None:
    assert stored["baselines"] == {name: each.title for name, each in PLANNED_BASELINES.items()}
    assert in_file(moonlight((16,))) == rows(stored["moonlight"], ranks=16)


def test_every_world_was_surveyed_by_every_baseline(stored: dict[str, Any]) -> None:
    every = {(model, ranks) for model in stored["models"] for ranks in WORLDS}
    for name in PLANNED_BASELINES:
        cells = rows(stored["cells"], baseline=name)
        assert len(cells) == len(every) * stored["verdict"]["assumptions"]
        assert {(cell["model"], cell["ranks"]) for cell in cells} == every


def test_worlds_are_planned_as_make_bench_asks_for_it(tmp_path: Path) -> None:
    out = tmp_path / "new" / "worlds.json"
    tools = str(worlds.ROOT / "scripts" / "tools")
    ending = worlds.finish(tools, "measure", "worlds", "--quick", "--json", str(out))
    assert (ending.code, ending.err) == (0, "")
    quick = json.loads(out.read_text())
    assert quick["verdict"]["muon"]["with_a_choice"] > 0
    for cell in (cell for cell in quick["cells"] if cell["tp"] is not None):
        assert str(cell["tp"]) in cell["tp_choices"].split()
        assert cell["over_adamw"] >= 1  # four digits: MuonW on one node adds less
        assert cell["square_cost"] is None or cell["square_cost"] >= 0


# ---- Against an independent count -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("baseline", "over", "repeats"), [("muon", 3.22, 187), ("muon_flat", 1.13, 11), ("muon_cut", 1.07, 11)]
)
def test_the_70b_on_1024_ranks_takes_what_was_counted_elsewhere(baseline: str, over: float, repeats: int) -> None:
    """Nothing is recomputed in that count."""
    step = step_of("llama3_70b", 128, 8, PLANNED_BASELINES[baseline], FABRICS[FAST], recompute=False).of(4)
    assert step.muon / step.adamw == pytest.approx(over, abs=0.005)
    world = laid_out("llama3_70b", 128, 8, PLANNED_BASELINES[baseline], recompute=False).parts[""].world  # type: ignore[union-attr]
    assert world.redundancy == pytest.approx(repeats, abs=0.5)


@pytest.mark.parametrize(
    ("model", "tp", "over", "cut"), [("llama3_8b", 1, 1.003, 1.005), ("moonlight", 2, 1.007, 1.013)]
)
def test_owners_without_tp_take_no_longer_than_what_is_cut(model: str, tp: int, over: float, cut: float) -> None:
    """On 64 GPUs and 4 million tokens: counted elsewhere, without padding, around a ring."""
    steps = [
        step_of(model, 64 // tp, tp, PLANNED_BASELINES[name], FABRICS[FAST]).of(8 * tp)
        for name in ("muon_owner", "muon_cut")
    ]
    assert [step.muon / step.adamw for step in steps] == pytest.approx([over, cut], abs=0.001)


@pytest.mark.parametrize(("baseline", "percent"), [("muon", (0.8, 1.3, 2.3, 4.0)), ("muon_cut", (0.5, 0.5, 0.5, 0.5))])
def test_moonlight_adds_what_was_counted_elsewhere(
    stored: dict[str, Any], baseline: str, percent: tuple[float, ...]
) -> None:
    found = rows(stored["moonlight"], baseline=baseline, tokens=MOONLIGHT_TOKENS[0])
    assert [100 * row["extra"] for row in found if row["ranks"] <= 128] == pytest.approx(percent, abs=0.05)


def test_the_bytes_of_gather_cut_are_those_counted_elsewhere() -> None:
    """12 blocks of width 1,536, 48 matrices: a transformer of which somebody else worked it out."""
    shapes = [(3, 1), (1, 1), (4, 1), (1, 4)] * 12
    specs = [ParamSpec(str(n), (1536 * a, 1536 * b), "float32") for n, (a, b) in enumerate(shapes)]
    found = []
    for dp in (2, 8, 32, 64, 256):
        world = plan_part(specs, range(48), dp, 1, FLAT, "gather_cut")
        zero1 = world.ledger(muon=False).total(group="dp").sent_bytes
        sent = sum(float(each.mean()) for each in world.momentum_sent())
        found.append((round(1 + sent / zero1, 3), round(world.redundancy, 2)))
    assert found == [(1.000, 1.0), (1.004, 1.11), (1.005, 1.62), (1.006, 2.36), (1.006, 6.93)]


# ---- Worlds in which a claim was made -------------------------------------------------------------------------


def test_the_reports_own_world_sends_least_where_all_four_ranks_stand_in_a_row() -> None:
    apart, square, in_a_row = (max(sent.muon for sent in reported.steps(dp, 4 // dp)) for dp in (4, 2, 1))
    assert apart > square > in_a_row


def test_what_muon_adds_to_moonlight_halves_where_the_batch_doubles(stored: dict[str, Any]) -> None:
    small, large = (rows(stored["moonlight"], tokens=tokens) for tokens in MOONLIGHT_TOKENS)
    for one, two in zip(small, large, strict=True):
        assert [one[key] for key in ("baseline", "ranks", "tp")] == [two[key] for key in ("baseline", "ranks", "tp")]
        assert one["extra"] == pytest.approx(2 * two["extra"], rel=1e-3)
        assert one["optimizer"] > one["extra"]


# ---- A step, and verdicts -------------------------------------------------------------------------------------


def test_a_batch_twice_as_large_takes_twice_the_passes_and_the_same_update() -> None:
    small = step_of("gpt2", 16, 2, PLANNED_BASELINES["muonw"], FABRICS["nvlink_ethernet"])
    large = small.of(2)
    assert 2 * (small.passes + small.gathers) == large.passes + large.gathers
    assert small.gathers > 0
    assert small.update == large.update


@pytest.mark.parametrize("name", PLANNED_BASELINES)
def test_muon_of_no_matrices_would_be_adamw(name: str) -> None:
    plain = step_of("gpt2", 16, 2, PLANNED_BASELINES[name], FABRICS["one_wire"]).plain_update
    assert plain.get("momentum", 0) == plain.get("Newton–Schulz", 0) == plain.get("blocks over TP", 0) == 0


def test_a_model_without_a_place_does_not_fit() -> None:
    given = ("llama3_70b", PLANNED_BASELINES["muon"])
    assert [fits(laid_out(given[0], dp, tp, given[1])) for dp, tp in ((16, 8), (64, 2))] == [True, False]


def test_what_fits_has_room_for_states_and_for_the_passes_of_a_sequence() -> None:
    planned = laid_out("gpt2", 16, 2, PLANNED_BASELINES["muonw"])
    needed = float(np.sum([planned.memory[kind] for kind in (*KEPT, *MOMENTS["passes"])], axis=0).max())
    for room in (needed, needed - 1):
        setting = replace(planned.setting, device=Device("", room, 1.0))
        assert fits(StagePlan(setting, planned.weights, planned.parts)) == (room == needed)


def test_square_costs_nothing_where_it_is_best_and_is_none_where_heads_forbid_it() -> None:
    assert square_cost({1: 3.0, 2: 2.0, 4: 1.0}, 16) == 0.0
    assert square_cost({1: 1.0, 2: 2.0, 4: 3.0}, 16) == 2.0
    assert square_cost({1: 1.0}, 16) is None


def cell(tp: int | None, **more: Any) -> dict[str, Any]:
    found = {
        "model": "a", "ranks": 16, "tokens": 1024, "tp": tp, "tp_choices": "1 2 4 8", "tp_for_communication": 8,
        "square_cost": 0.5, "square_cost_communication": 0.25, "over_adamw": 1.2, "over_forward_backward": 0.02,
    }  # fmt: skip
    return found | more


def test_a_verdict_counts_cells_with_a_choice_and_a_square() -> None:
    said = of_baseline(
        [
            cell(1),
            cell(4, square_cost=0.0, over_forward_backward=0.04),
            cell(8, tp_for_communication=4, square_cost_communication=0.0),
            cell(1, tp_choices="1", tp_for_communication=1, square_cost=None, over_forward_backward=0.03),
            {"model": "b", "ranks": 16, "tokens": 1024, "tp": None, "why": "no room"},
        ]
    )
    assert said["with_a_choice"] == 3
    assert said["adds_at_most_3_percent"] == {"1,024 tokens": 0.75}
    assert said["least_tp_wins_step"] == said["square_wins_step"] == said["square_wins_communication"] == 0.3333
    assert said["most_tp_wins_communication"] == 0.6667
    assert (said["square_possible"], said["square_worlds"], said["square_cost_median"]) == (3, 1, 0.5)
    assert said["square_wins_communication_then"] == 0.3333
