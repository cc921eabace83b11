"""Transient memory of a step: under its formula, near it, and no larger for a deeper model."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from distmuon import launch
from distmuon.models.networks import MLP
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.fast_paths import fast_dtype
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding.buffers import dtype_name
from distmuon.sharding.grid import Grid
from distmuon.verify.memory_tracker import StorageTracker
from distmuon.verify.prediction import predict_transient

GRIDS = [(1, 1), (4, 1), (2, 2), (1, 4)]
DEPTHS = (4, 8)
WIDTH, BUCKET = 128, 10_000  # a bucket holds one to three matrices


def measured_and_predicted(world, depth, dtype):
    """Return (peak bytes tracked in the second step, the formula) on this rank."""
    grid = Grid.of(world)
    model = MLP([64, *[WIDTH] * (2 * depth), 10], grid.tp).to(getattr(torch, dtype))
    optimizer = DistributedMuon(split_parameters(model), grid, bucket_size=BUCKET)
    for _ in range(2):  # the first step also creates the momentum and AdamW's state, which stay
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        with StorageTracker() as tracker:
            optimizer.step()
    gather_dtype = torch.float64 if dtype == "float64" else torch.bfloat16
    bound = predict_transient(
        optimizer.buffers.layout,
        world.tp,
        grid.dp.rank,
        optimizer.muon,
        compute_dtype=dtype_name(fast_dtype(grid.device, gather_dtype)),
    )
    return tracker.peak, bound


def all_depths(world):
    return {
        (depth, dtype): measured_and_predicted(world, depth, dtype)
        for depth in DEPTHS
        for dtype in ("float32", "bfloat16", "float64")
    }


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_peak_is_under_the_formula_and_does_not_grow_with_the_model(dp, tp):
    ranks = launch.run(all_depths, dp=dp, tp=tp)
    for results in ranks:
        for (depth, dtype), (peak, bound) in results.items():
            assert peak <= bound, (depth, dtype)
            assert peak >= 0.4 * bound, (depth, dtype)  # a bound far above the truth would prove nothing
    worst = {key: max(results[key][0] for results in ranks) for key in ranks[0]}
    for dtype in ("float32", "bfloat16", "float64"):
        assert worst[DEPTHS[1], dtype] <= 1.15 * worst[DEPTHS[0], dtype], dtype  # twice the model, the same peak


def test_the_tracker_counts_storages_once_and_forgets_the_dead():
    with StorageTracker() as tracker:
        for _ in range(3):
            a = torch.zeros(1000)  # 4 kB; the one before dies when the name moves on
            a.view(10, 100)[2:4].add_(1)
    assert tracker.peak == 8000
    with StorageTracker() as tracker:
        a.mul_(2)
    assert tracker.peak == 0


def test_the_tracker_counts_one_device_alone_where_it_is_told_to():
    with StorageTracker(device=torch.device("cpu")) as tracker:
        torch.zeros(1000)
        torch.zeros(5000, device="meta")
    assert tracker.peak == 4000


def test_the_tracker_leaves_out_what_dtensor_makes_without_data():
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


def test_the_tracker_counts_tensors_without_data_where_work_is_weighed_on_them():
    with FakeTensorMode(), StorageTracker(fakes=True) as tracker:
        torch.zeros(1000)
    assert tracker.peak == 4000
