"""MuonW: on every mesh to the bit what one process does, in two collectives; and what it cannot take, it says."""

from __future__ import annotations

from pathlib import Path

import mesh_checks as work
import pytest
import torch
from checks import on_every_rank
from helpers_math import gaussian
from torch import nn
from torch.distributed.tensor import Shard

from distmuon import MuonW, launch
from distmuon.optim.exchange_plan import ShardedParam, owners
from distmuon.sharding.boxes import boxes, matrices_of
from distmuon.sharding.layout import Range

test_on_fsdp = on_every_rank("mesh_checks", "fsdp", dp=3)
test_on_columns = on_every_rank("mesh_checks", "columns", dp=2)
test_on_hybrid = on_every_rank("mesh_checks", "hybrid", dp=4)
test_on_tp = on_every_rank("mesh_checks", "tp", dp=6)
test_on_experts = on_every_rank("mesh_checks", "experts", dp=4)
test_on_replicas = on_every_rank("mesh_checks", "replicas", dp=3)
test_on_three_ranks = on_every_rank("muonw_checks", dp=3)


def test_a_short_gradient_is_left_as_it_is_and_a_negative_bound_refused() -> None:
    optimizer = MuonW([nn.Parameter(gaussian(3, 4))])
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = gaussian(3, 4, seed=1)
    before = p.grad.clone()
    assert optimizer.clip_grad_norm_(100.0) == pytest.approx(before.norm().item())
    assert torch.equal(p.grad, before)
    with pytest.raises(ValueError, match="max_norm is -1"):
        optimizer.clip_grad_norm_(-1.0)


def test_torchs_checkpoint_resumes_on_more_ranks_under_a_falling_learning_rate(tmp_path: Path) -> None:
    launch.run(work.saved_by_torch, (str(tmp_path / "saved"), 2), dp=2)
    assert launch.run(work.resumed_by_torch, (str(tmp_path / "saved"), 2, 5), dp=3) == [[]] * 3


# ---- Boxes and parcels ------------------------------------------------------------------------------------


def test_matrices_are_boxes_of_their_parameter() -> None:
    everything = Range(0, 6)
    assert matrices_of("whole", (6, 4)) == [((everything, Range(0, 4)), (6, 4))]
    assert matrices_of("flattened", (6, 2, 3)) == [((everything, Range(0, 2), Range(0, 3)), (6, 6))]
    assert [box[0] for box, _ in matrices_of("stacked", (3, 2, 5))] == [(0, 1), (1, 2), (2, 3)]
    assert [box[1] for box, _ in matrices_of(("columns", 2), (6, 4))] == [(0, 2), (2, 4)]
    fused = matrices_of(("fused", ((4, 2), 1, 1)), (6, 4))
    assert [(box[0], shape) for box, shape in fused] == [
        ((0, 2), (2, 4)), ((2, 4), (2, 4)), ((4, 5), (1, 4)), ((5, 6), (1, 4)),
    ]  # fmt: skip


def test_what_one_rank_holds_whole_it_owns_and_the_rest_is_dealt_out() -> None:
    experts = ShardedParam(boxes((4, 8, 8), (4,), (Shard(0),)), matrices_of("stacked", (4, 8, 8)))
    cut = ShardedParam(boxes((8, 8), (4,), (Shard(0),)), matrices_of("whole", (8, 8)))
    found, loads = owners([experts, cut, cut, cut, cut], 4)
    assert len(set(loads)) == 1
    assert [found[0, number] for number in range(4)] == [0, 1, 2, 3]
    assert sorted(found[index, 0] for index in (1, 2, 3, 4)) == [0, 1, 2, 3]


# ---- One device -------------------------------------------------------------------------------------------
