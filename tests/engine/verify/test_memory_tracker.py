"""Transient memory of a step: under its formula, near it, and no larger for a deeper model."""

from __future__ import annotations

from typing import Any

import optimizer_cases as cases
import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from distmuon import launch
from distmuon.launch import World
from distmuon.models.networks import MLP
from distmuon.optim import strategies
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.fast_paths import fast_dtype
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding.buffers import dtype_name
from distmuon.sharding.grid import Grid
from distmuon.verify.memory_tracker import StorageTracker
from distmuon.verify.prediction import predict_transient

MODELS = ((4, "float32"), (8, "float32"), (4, "bfloat16"), (4, "float64"))  # depth, dtype
WIDTH, BUCKET = 128, 10_000  # a bucket holds one to three matrices

Weighed = tuple[int, int]  # peak bytes tracked, the formula's


def of_mlp(
    grid: Grid, depth: int, dtype: str, steps: int = 2, strategy: str = "gather_all", **own: Any
) -> list[Weighed]:
    """Return what this rank holds in each step but the first, which also makes the state, which stays."""
    model = MLP([64, *[WIDTH] * (2 * depth), 10], grid.tp).to(getattr(torch, dtype))
    groups = split_parameters(model)
    optimizer = DistributedMuon(groups, grid, bucket_size=BUCKET, strategy=strategy, strategy_options=own)
    gather_dtype = torch.float64 if dtype == "float64" else torch.bfloat16
    compute_dtype = dtype_name(fast_dtype(grid.device, gather_dtype))
    found = []
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        found.append(weighed(optimizer, strategy, compute_dtype))
    return found[1:]


def of_several_matrices(grid: Grid, strategy: str) -> Weighed:
    """Return what the second step of parameters with several matrices each holds."""
    case = cases.several(grid.tp.size, k=8)
    parameters, optimizer = cases.build(case, grid, strategy=strategy, compute_dtype=torch.float32, batched=True)
    assert isinstance(optimizer, DistributedMuon)
    for step in range(2):
        cases.give(case, grid, parameters, step)
        found = weighed(optimizer, strategy)
    return found


def weighed(optimizer: DistributedMuon, strategy: str, compute_dtype: str = "float32") -> Weighed:
    """Take a step."""
    with StorageTracker() as tracker:
        optimizer.step()
    grid, layout, muon = optimizer.grid, optimizer.buffers.layout, list(optimizer.muon)
    where = (layout, grid.tp.size, grid.dp.rank, muon, strategy)
    return tracker.peak, predict_transient(*where, compute_dtype=compute_dtype)


def work(world: World) -> dict[str, Any]:
    grid = Grid.of(world)
    return {
        "mlp": {(depth, dtype): of_mlp(grid, depth, dtype)[0] for depth, dtype in MODELS},
        "periodic": of_mlp(grid, 4, "float32", 3, "periodic", whole_every=3),  # a step in blocks, and a whole one
        "several": {strategy: of_several_matrices(grid, strategy) for strategy in strategies.names()},
    }


@pytest.mark.parametrize(("dp", "tp"), [(1, 4), (2, 2)])
def test_the_peak_is_under_the_formula_and_does_not_grow_with_the_model(dp: int, tp: int) -> None:
    """And near it: a bound far above the truth would prove nothing."""
    ranks = launch.run(work, dp=dp, tp=tp)
    for found in ranks:
        assert all(0.4 * bound <= peak <= bound for peak, bound in found["mlp"].values()), found["mlp"]
        assert all(peak <= bound for peak, bound in [*found["periodic"], *found["several"].values()]), found
    assert max(peak / bound for found in ranks for peak, bound in found["periodic"]) >= 0.4
    assert max(peak / bound for found in ranks for peak, bound in found["several"].values()) >= 0.3
    shallow, deep = (max(found["mlp"][depth, "float32"][0] for found in ranks) for depth in (4, 8))
    assert deep <= 1.15 * shallow  # twice the model, the same peak


def test_the_tracker_counts_storages_once_and_forgets_the_dead() -> None:
    with StorageTracker() as tracker:
        for _ in range(3):
            a = torch.zeros(1000)  # 4 kB; the one before dies when the name moves on
            a.view(10, 100)[2:4].add_(1)
    assert tracker.peak == 8000
    with StorageTracker() as tracker:
        a.mul_(2)
    assert tracker.peak == 0


def test_the_tracker_counts_one_device_alone_where_it_is_told_to_and_fakes_where_work_is_weighed_on_them() -> None:
    with StorageTracker(device=torch.device("cpu")) as tracker:
        torch.zeros(1000)
        torch.zeros(5000, device="meta")
    assert tracker.peak == 4000
    with FakeTensorMode(), StorageTracker(fakes=True) as tracker:
        torch.zeros(1000)
    assert tracker.peak == 4000


def test_the_tracker_leaves_out_what_dtensor_makes_without_data() -> None:
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    try:
        whole = DTensor.from_local(torch.ones(10, 100), init_device_mesh("cpu", (2,)), [Shard(0)])
        for _ in range(2):  # the first time, DTensor learns the result's shape, 8 kB, without data
            with StorageTracker() as tracker:
                whole.mul(2)
            assert tracker.peak == 4000
    finally:
        dist.destroy_process_group()
