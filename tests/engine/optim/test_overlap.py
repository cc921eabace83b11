"""Schedules: the same bits and bytes in another order, little more memory, and nothing left under way after trouble.

Below them waves, in which a rank takes what it owns of a bucket.
"""

from types import SimpleNamespace
from typing import Any

import overlap_checks as work
import pytest
import torch
from checks import on_every_rank
from helpers_math import message
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
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import FLAT, ParamSpec, plan
from distmuon.sharding.ledger import Ledger
from distmuon.verify.memory_tracker import StorageTracker
from distmuon.verify.prediction import predict_transient

test_schedules_on_ranks = on_every_rank("overlap_checks", dp=2, tp=2)


def test_schedules_have_the_names_that_recipes_know() -> None:
    assert tuple(OVERLAPS) == OVERLAP_NAMES


def test_an_error_on_one_rank_ends_the_world_with_that_error() -> None:
    with pytest.raises(launch.WorldError, match="on the last rank"):
        launch.run(work.last_rank_fails, dp=2)


@pytest.mark.parametrize("schedule", ["naive", "pipelined"])
def test_on_a_grid_of_one_there_is_nothing_to_wait_for(schedule: str) -> None:
    grid = Grid.alone()
    expected, *_ = work.trained(SMALL, grid, OVERLAPS["synchronous"])
    found, *_ = work.trained(SMALL, grid, OVERLAPS[schedule])
    assert work.alike(found, expected)
    assert grid.ledger == Ledger()


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
