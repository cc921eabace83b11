"""Plans beside the clock, of steps that no constant was fitted to: in the planner's worlds, on chapter 15's grids."""

import pytest

from muonbook.ch15.regimes import ALGORITHMS
from muonbook.ch15.worlds import held_out
from muonbook.measure import results
from muonbook.measure.workload import TIMED, Workload
from muonbook.planner.measured import step_fit
from muonbook.planner.measured.timed_worlds import asked_on


def test_a_plan_is_held_against_steps_that_it_has_not_seen() -> None:
    """Points are ratios within one world; of a fitted world only the strategy that is held out everywhere."""
    stored = results.load("planner")
    pairs = held_out.planned_against_measured(stored)
    steps = [step for step in step_fit.timed(stored) if step.entrant != "adamw" and step.held_out]
    assert sum(len(measured) for measured, _ in pairs.values()) == len(steps)
    assert all(len(measured) == len(planned) for measured, planned in pairs.values())
    fitted = {step.world for step in step_fit.timed(stored) if step.entrant == "adamw" and not step.held_out}
    unseen = held_out.planned_against_measured(stored, unseen=True)
    there = [step for step in steps if step.world not in fitted]
    assert sum(len(measured) for measured, _ in unseen.values()) == len(there) < len(steps)
    for title, (measured, _) in unseen.items():
        assert set(measured) <= set(pairs[title][0])
    (adamw, cut) = (next(s for s in step_fit.timed(stored) if s.entrant == name) for name in ("adamw", "gather_cut"))
    assert adamw.world == cut.world
    measured, planned = pairs["cut, in buckets"]
    assert measured[0] == cut.seconds / adamw.seconds
    constants = stored["constants"]
    assert planned[0] == step_fit.seconds(constants, cut) / step_fit.seconds(constants, adamw)


def test_what_a_grid_asks_without_processes_is_what_its_ranks_said() -> None:
    world = next(w for w in results.load("planner")["worlds"] if (w["dp"], w["tp"], w["width"]) == (2, 2, 192))
    workload = Workload(width=192, layers=world["layers"], sequences=8)
    for name in ("adamw", "gather_all", "gather_cut", "owner"):
        mine, said = vars(asked_on(name, workload, 2, 2)), world["entrants"][name]["asked"]
        assert mine == {key: pytest.approx(value, rel=0.02) for key, value in said.items()}, name


def test_grids_are_planned_beside_their_own_clock() -> None:
    planner, skew = results.load("planner"), results.load("regimes")["skew"]
    pairs = held_out.planned_grids(planner, skew, TIMED, ALGORITHMS)
    assert list(pairs) == ["bucketed", "flat", "flat + cut", "owner"]
    row = skew[1]
    clock = row["muon_cut"]["seconds"]["quartiles"][0] / row["zero1"]["seconds"]["quartiles"][0]
    assert pairs["flat + cut"][0][1] == clock
    alone = [planned[3] for name, (_, planned) in pairs.items() if name != "owner"]
    assert max(alone) - min(alone) < 0.01  # with TP alone there is nothing to cut
