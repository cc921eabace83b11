"""What ranks with GPUs do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import mark


def trained(where: Any) -> tuple[list[Tensor], Grid]:
    """Train two matrices, which are 1 at first, on made-up gradients; return them, and the optimizer's grid."""
    device = torch.device("cuda")
    parameters = [mark(nn.Parameter(torch.ones(shape, device=device)), None) for shape in ((12, 20), (7, 5))]
    optimizer = DistributedMuon(parameters, where, lr=0.1, bucket_size=100)
    for step in range(3):
        for parameter in parameters:
            numbers = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            parameter.grad = numbers.to(device) * (1 + optimizer.grid.dp.rank)
        optimizer.step()
    return [parameter.detach() for parameter in parameters], optimizer.grid


def train_twice(world: World) -> dict[str, Any]:
    """Train on our own world's grid, and on a mesh of GPUs made by torch."""
    mesh = init_device_mesh("cuda", (world.dp,), mesh_dim_names=("dp",))
    ours, _ = trained(Grid.of(world))
    theirs, grid = trained(mesh)
    return {
        "equal": all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)),
        "moved": all(bool((one != 1).all()) for one in ours),
        "at home": {grid.device, *(one.device for one in theirs)}
        == {torch.device("cuda", torch.cuda.current_device())},
        "native": grid.dp.native_reduce_scatter,
        "precision": torch.get_float32_matmul_precision(),
    }


def gather_a_dtensor(world: World) -> list[float]:
    """Gather a DTensor of GPUs, as torch's own optimizers do for each matrix."""
    mesh = init_device_mesh("cuda", (world.dp,), mesh_dim_names=("dp",))
    return distribute_tensor(torch.ones(4, 2, device="cuda"), mesh, [Shard(0)]).full_tensor().flatten().tolist()


def add_in_rank_order(world: World) -> list[float]:
    """Sum numbers over four ranks whose sum depends on the order."""
    grid = Grid.of(world).in_rank_order()
    number = torch.tensor([1e8, 1.0, -1e8, 1.0][grid.dp.rank], device=grid.device)
    out = torch.empty(2, device=grid.device)
    return grid.dp.reduce_scatter(number.repeat(2 * grid.dp.size), out, "x").tolist()
