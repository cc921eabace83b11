"""Schedules: the same bits and bytes in another order, little more memory, and nothing left under way after trouble.

Below them waves, in which a rank takes what it owns of a bucket.
"""

from types import SimpleNamespace
from typing import Any

import overlap_workers as work
import pytest
import torch
from helpers_math import message
from once import once
from optimizer_cases import MUON as MUON_GROUP
from optimizer_cases import SMALL, Case, Weight, build, give, go_on

from distmuon import launch
from distmuon.models.recipe import OVERLAP_NAMES
from distmuon.optim import strategies
from distmuon.optim.overlap import OVERLAPS, PipelinedMuon
from distmuon.optim.strategies import PUBLISHED
from distmuon.optim.strategies.costs import PlannedRank
from distmuon.optim.strategies.gather_cut import GatherCut
from distmuon.optim.strategies.strategy import StrategyContext
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import FLAT, ParamSpec, plan
from distmuon.sharding.ledger import Ledger
from distmuon.verify.memory_tracker import StorageTracker
from distmuon.verify.prediction import predict_transient

each_pair = pytest.mark.parametrize("pair", work.PAIRS, ids=" ".join)
on_two_grids = pytest.mark.parametrize(("dp", "tp"), [(3, 1), (2, 2)])
OTHERS = ("naive", "pipelined")


@once
def facts(dp: int, tp: int) -> list[dict[str, Any]]:
    return launch.run(work.schedule_facts, dp=dp, tp=tp)


@once
def late(dp: int, tp: int) -> list[dict[str, Any]]:
    return launch.run(work.late_facts, dp=dp, tp=tp)


@on_two_grids
@each_pair
def test_every_schedule_ends_to_the_bit_where_the_synchronous_one_does(dp: int, tp: int, pair: tuple[str, str]) -> None:
    for rank in facts(dp, tp):
        outcomes = rank["outcomes"][pair]
        for what in ("values", "momentum"):
            expected = outcomes["synchronous"][what]
            for schedule in OTHERS:
                found = outcomes[schedule][what]
                assert found.keys() == expected.keys()
                for name, value in expected.items():
                    same = found[name] is None if value is None else torch.equal(found[name], value)
                    assert same, (schedule, what, name)


@on_two_grids
@each_pair
def test_every_schedule_makes_the_same_collectives(dp: int, tp: int, pair: tuple[str, str]) -> None:
    for rank in facts(dp, tp):
        synchronous = rank["outcomes"][pair]["synchronous"]
        assert synchronous["ledger"]
        for schedule in OTHERS:
            found = rank["outcomes"][pair][schedule]
            assert found["ledger"] == synchronous["ledger"]
            assert found["dispatched"] == synchronous["dispatched"]
            assert found["left"] == 0


@on_two_grids
def test_these_cases_hold_what_is_hard(dp: int, tp: int) -> None:
    found = facts(dp, tp)
    assert found[0]["straddling"] >= 3
    owners = [
        rank["outcomes"]["gather_all", "one element"]["pipelined"]["momentum"]["only"] is not None for rank in found
    ]
    assert owners == [True] * tp + [False] * (dp - 1) * tp  # some own nothing, and gather all the same
    never = [rank["outcomes"]["gather_all", "absent"]["pipelined"]["momentum"]["other rows"] for rank in found]
    assert never == [None] * len(found)


@on_two_grids
def test_a_wave_ahead_takes_the_memory_of_few_gathers_more_and_not_of_all(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        synchronous, naive, pipelined = (rank["memory"][name] for name in ("synchronous", "naive", "pipelined"))
        assert synchronous <= pipelined < naive
        assert pipelined - synchronous < 0.5 * (naive - synchronous)


@on_two_grids
def test_on_a_wire_that_is_as_late_as_it_may_be_nothing_is_read_early(dp: int, tp: int) -> None:
    for rank in late(dp, tp):
        assert rank["equal"] == dict.fromkeys(work.VARIANTS, True)


@on_two_grids
@pytest.mark.parametrize(("mutant", "variant"), [(m.__name__, v) for m, found in work.MUTANTS.items() for v in found])
def test_such_a_wire_finds_who_reads_early(dp: int, tp: int, mutant: str, variant: str) -> None:
    found = [rank["mutants"][mutant, variant] for rank in late(dp, tp)]
    nothing_to_read = tp == 1 and variant in ("owner", "updates") and mutant != "ReadsUpdatesEarly"
    assert found == [nothing_to_read] * (dp * tp)


def test_schedules_have_the_names_that_recipes_know() -> None:
    assert tuple(OVERLAPS) == OVERLAP_NAMES


@on_two_grids
@pytest.mark.parametrize("schedule", OTHERS)
def test_nothing_stays_under_way_after_an_error(dp: int, tp: int, schedule: str) -> None:
    for rank in facts(dp, tp):
        found = rank["trouble"][schedule]
        assert found["words"] == "the second bucket group"
        assert found["under way"] > 0 or schedule == "naive"  # naive has waited for everything by then
        assert found["completed"]
        assert found["left"] == 0
        assert found["mode"] is None
        assert found["goes on"]


def test_an_error_on_one_rank_ends_the_world_with_that_error() -> None:
    with pytest.raises(launch.WorldError, match="on the last rank"):
        launch.run(work.last_rank_fails, dp=2)


@pytest.mark.parametrize("schedule", OTHERS)
def test_on_a_grid_of_one_there_is_nothing_to_wait_for(schedule: str) -> None:
    grid = Grid.alone()
    found = work.train_all(SMALL, grid)
    assert grid.ledger == Ledger()
    for name, value in found["synchronous"]["values"].items():
        assert torch.equal(found[schedule]["values"][name], value)
    with Group("dp").async_collectives() as pending:
        pass
    assert len(pending) == 0


def test_a_strategy_that_reads_what_it_gathers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distmuon.optim.strategies.gather_all.GatherAll.STARTS_UNREAD", False)
    with pytest.raises(ValueError, match="GatherAll reads what it gathers at once") as error:
        build(SMALL, Grid.alone(), PipelinedMuon)
    message(error)


# ---- Waves ------------------------------------------------------------------------------------------------

FEW, MANY = (64, 64), (512, 512)  # the second is more than a CPU takes in a batch
SHAPES = [FEW, MANY, FEW, MANY, MANY, FEW, (512, 1024), FEW, FEW]
SPECS = [ParamSpec(f"w{n}", shape, "float32") for n, shape in enumerate(SHAPES)]


def test_a_rank_meets_the_others_first_and_then_takes_what_is_whole_here() -> None:
    layout, most = plan(SPECS, 3, FLAT), 0
    (bucket,) = layout.buckets
    grid: Any = SimpleNamespace(tp=SimpleNamespace(size=1), device=torch.device("cpu"))
    groups = {index: {"batched": True} for index in range(len(SPECS))}
    for dp_rank in range(3):
        strategy = GatherCut(StrategyContext(layout, layout.view(dp_rank), grid, groups, None))
        owned = [index for index in bucket.params if dp_rank in layout.owners(bucket, index)]
        first, *others = (list(wave) for wave in strategy.waves((bucket,), owned))
        assert sorted([*first, *(index for wave in others for index in wave)]) == sorted(owned)
        assert all(len(layout.owners(bucket, index)) > 1 for index in first)
        assert all(layout.owners(bucket, index) == range(dp_rank, dp_rank + 1) for wave in others for index in wave)
        for wave in others:
            shapes = [SHAPES[index] for index in wave]
            assert len(shapes) == 1 or set(shapes) == {FEW}
        most = max(most, 1 + len(others))
    assert most > 2


@pytest.mark.usefixtures("one_thread")
def test_published_updates_keep_no_whole_matrix_of_an_earlier_wave_alive() -> None:
    """They are kept until all are there, but as pieces; and the bound knows of them."""
    weights, peaks = tuple(Weight(f"w{n}", (512, 513)) for n in range(8)), {}
    case = Case(weights, (MUON_GROUP,), bucket_size=FLAT)
    for publish in PUBLISHED:
        parameters, optimizer = build(case, Grid.alone(), strategy="gather_cut", publish=publish)
        go_on(case, Grid.alone(), parameters, optimizer, [0])  # the first makes the state
        give(case, Grid.alone(), parameters, 1)
        with StorageTracker() as tracker:
            optimizer.step()
        muon = range(len(weights))
        assert tracker.peak <= predict_transient(optimizer.buffers.layout, 1, 0, muon, "gather_cut", publish=publish)
        peaks[publish] = tracker.peak
    pieces = 2 * 512 * 513 * len(weights)  # in bf16; packed and gathered besides
    assert peaks["updates"] <= peaks["parameters"] + 3 * pieces


def test_with_more_layers_on_as_many_ranks_no_more_is_whole_at_a_time() -> None:
    """What a rank's moves take is that of its largest wave; with gather_all it is that of the whole model."""
    taken: dict[str, list[int]] = {"gather_cut": [], "gather_all": []}
    for layers in (2, 8):
        specs = [ParamSpec(f"w{n}", (2048, 4096), "float32") for n in range(4 * layers)]
        for name, sizes in taken.items():
            sizes.append(
                strategies.costs_of(name).allocates(PlannedRank(plan(specs, 2, FLAT), frozenset(range(len(specs)))))
            )
    assert taken["gather_cut"][0] == taken["gather_cut"][1]
    assert taken["gather_all"][1] > 3 * taken["gather_all"][0]
