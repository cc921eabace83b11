"""Who orthogonalizes one matrix, as chapter 15 draws it: the ranks that the planner counts."""

import numpy as np
import pytest

from muonbook.ch15.experiments import repeats
from muonbook.ch15.figures import SHOWN
from muonbook.planner.choices import compared
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.planned_baselines import PLANNED_BASELINES
from muonbook.planner.planned_worlds import specs_of
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldSetting


def test_means_are_those_of_the_planner_s_table() -> None:
    setting = WorldSetting(shape=MODELS["llama3_70b"], degrees=Degrees(128, 8), tokens=1 << 22, recompute=True)
    planned = {each.baseline.title: each.repeats for each in compared(setting)}
    for each in repeats("llama3_70b", 128, 8, "blocks.40.up", SHOWN):
        assert each.mean == pytest.approx(planned[each.title], rel=1e-3)


def test_columns_are_consecutive_and_whole_except_the_owner_s_single_rank() -> None:
    found = dict(zip(SHOWN, repeats("llama3_70b", 128, 8, "blocks.40.up", SHOWN), strict=True))
    for name in ("muon", "muon_flat"):
        columns = found[name].busy.any(axis=0)
        assert np.array_equal(found[name].busy, np.broadcast_to(columns, (8, 128)))
        assert np.ptp(np.flatnonzero(columns)) + 1 == columns.sum()
    assert found["muon_owner"].ranks == 1 < found["muon_flat"].ranks < found["muon"].ranks


def test_on_a_small_grid_columns_are_the_owners_of_the_map() -> None:
    specs, indices = specs_of(MODELS["gpt2"], 2)
    layout = PLANNED_BASELINES["muon"].lay_out(specs, indices, 4, 2).world.layout  # type: ignore[union-attr]
    for index in sorted(indices)[:6]:
        (bucket,) = (bucket for bucket in layout.buckets if index in bucket.params)
        first, *_ = repeats("gpt2", 4, 2, specs[index].name, SHOWN)
        assert np.flatnonzero(first.busy.any(axis=0)).tolist() == list(layout.owners(bucket, index))
