"""Where PyTorch puts the matrices of a model on several ranks, and a gradient for each, the same in every process."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muon_conformance.reference import gaussian

EVEN = ((16, 8), (8, 20))
UNEVEN = ((7, 8), (13, 6), (10, 3))  # boundaries of shards in the middle of nowhere
SHORT = ((2, 7), (1, 6), (3, 5))  # fewer rows than ranks: some of them hold nothing


class Pair(nn.Module):
    """Two maps that TP can cut, one by columns and one by rows."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)


class MatrixNet(nn.Module):
    """Blocks of two matrices that divide by any number of ranks here, and others of the shapes given."""

    def __init__(self, shapes: Sequence[tuple[int, int]], blocks: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair(8, 16) for _ in range(blocks))
        self.others = nn.ModuleList(nn.Linear(b, a, bias=False) for a, b in shapes)
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(0.3 * synthetic(f"start {name}", p.shape))


def synthetic(name: str, shape: Sequence[int]) -> Tensor:
    """Return Gaussian numbers that depend on the name alone, in multiples of 1/64: sums of a few round nothing."""
    return (64 * gaussian(*shape, seed=zlib.crc32(name.encode()))).round() / 64


# ---- Wraps ------------------------------------------------------------------------------------------------

# What it does to the model's parameters; returns their mesh. Given the world, which has size and device, and the model.
Wrap = Callable[[Any, Any], DeviceMesh | None]


def _plain(world: Any, model: Any) -> None:
    return None


def fsdp(world: Any, model: Any) -> DeviceMesh:
    """FSDP2: rows over all ranks."""
    mesh = init_device_mesh(world.device, (world.size,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return mesh


def along_columns(world: Any, model: Any) -> DeviceMesh:
    """FSDP2 with columns over all ranks, where they divide."""
    mesh = init_device_mesh(world.device, (world.size,), mesh_dim_names=("dp",))

    def place(p: nn.Parameter) -> Shard:
        return Shard(1 if p.ndim >= 2 and p.shape[1] % world.size == 0 else 0)

    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    return mesh


def hybrid(world: Any, model: Any) -> DeviceMesh:
    """HSDP: rows over half of the ranks, a replica on the other half."""
    mesh = init_device_mesh(world.device, (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    return mesh


def with_tp(world: Any, model: Any) -> DeviceMesh:
    """FSDP2 over tensor parallelism of two ranks."""
    mesh = init_device_mesh(world.device, (world.size // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return mesh


class Placement(NamedTuple):
    """says: for the report. own: each rank has its own gradient, whose mean is everybody's."""

    says: str
    wrap: Wrap
    shapes: Sequence[tuple[int, int]] = EVEN
    own: bool = False
    resumed: bool = False  # half way through, another optimizer goes on from the first one's state


PLACEMENTS = {
    "replicated": Placement("plain tensors, the same gradients on all ranks, as under DDP", _plain, EVEN + UNEVEN),
    "own": Placement("plain tensors, a gradient of its own on each rank", _plain, EVEN + UNEVEN + SHORT, own=True),
    "fsdp": Placement("FSDP2, rows that divide by the ranks", fsdp),
    "fsdp_uneven": Placement("FSDP2, rows that do not divide", fsdp, UNEVEN),
    "fsdp_short": Placement("FSDP2, fewer rows than ranks", fsdp, SHORT),
    "columns": Placement("FSDP2, columns", along_columns),
    "hybrid": Placement("HSDP, two replicas", hybrid),
    "tp": Placement("FSDP2 over tensor parallelism", with_tp),
    "resumed": Placement("FSDP2, resumed from its state_dict", fsdp, resumed=True),
}


# ---- What a rank holds ------------------------------------------------------------------------------------


def held(
    whole: Tensor,  # [A, B]
    p: Tensor,
) -> Tensor:  # the part of it that this rank holds of the parameter
    """Cut a whole tensor as the parameter is cut."""
    if not isinstance(p, DTensor):
        return whole
    cuts = zip(p.placements, p.device_mesh.shape, p.device_mesh.get_coordinate() or (), strict=True)
    for place, ranks, here in sorted(
        cuts, key=lambda cut: hasattr(cut[0], "split_factor")
    ):  # strided: over a later cut
        if not place.is_replicate():
            dim: int = place.dim  # type: ignore[attr-defined]
            size = whole.shape[dim]
            most = -(-size // ranks)
            start = min(here * most, size)
            whole = whole.narrow(dim, start, min(most, size - start))
    return whole


def give(p: Tensor, whole: Tensor) -> None:
    """Make a whole gradient the parameter's, of which this rank holds its part."""
    if isinstance(p, DTensor):
        options: dict[str, Any] = dict(run_check=False, shape=p.shape, stride=p.stride())
        part = held(whole, p).contiguous().view(p.to_local().shape)  # which may call what is empty otherwise
        p.grad = DTensor.from_local(part, p.device_mesh, p.placements, **options)
    else:
        p.grad = whole.clone()


def gradient(name: str, p: Tensor, step: int) -> Tensor:
    """Return the whole gradient of a parameter at a step."""
    return synthetic(f"{name} {step}", tuple(p.shape))
