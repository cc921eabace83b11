"""From torch.optim.Muon on FSDP2 to MuonW in four steps: what one step of the optimizer sends and computes, counted.

Each way takes momenta, cut by rows as FSDP2 cuts them, to updates cut alike. Around it momentum, decay and the move of
the parameters, which touch one element at a time, are the same lines for all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from distmuon.launch import World
from distmuon.optim.coefficients import MUON
from distmuon.optim.muon import apply_, decay_, momentum_, orthogonalize, scale
from distmuon.optim.muonw import MuonW
from distmuon.optim.newton_schulz import flops
from distmuon.optim.options import MUON_DEFAULTS
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.matrices import MatrixLayout
from distmuon.sharding.ownership import balance
from distmuon.verify.certificate import difference
from distmuon.verify.counter import CollectiveCounter
from muonbook.ch17.existing_program import DigitReader, wrap
from muonbook.measure.trainers import SAME_EVERYWHERE

Way = Callable[[Sequence[DTensor], Group], list[Tensor]]  # momenta U[A{dp}, B], bf16 -> updates O[A/D, B]
OPTIONS: dict[str, Any] = MUON_DEFAULTS | SAME_EVERYWHERE | dict(batched=False, lr=0.02)


# ---- Four ways --------------------------------------------------------------------------------------------


def gather_each(momenta: Sequence[DTensor], dp: Group) -> list[Tensor]:
    """Every rank makes each matrix whole, one after the other, and keeps its rows of the update."""
    return [polar(u.full_tensor()).chunk(dp.size)[dp.rank] for u in momenta]


def gather_once(momenta: Sequence[DTensor], dp: Group) -> list[Tensor]:
    """The same with one message for all."""
    pieces = [u.to_local() for u in momenta]
    packed = torch.cat([piece.flatten() for piece in pieces])
    parcels = dp.all_gather(packed, "momentum").view(dp.size, -1)  # a row from each rank
    columns = parcels.split([piece.numel() for piece in pieces], dim=1)
    wholes = [of.reshape(u.shape) for of, u in zip(columns, momenta, strict=True)]
    return [polar(whole).chunk(dp.size)[dp.rank] for whole in wholes]


def one_owner(momenta: Sequence[DTensor], dp: Group) -> list[Tensor]:
    """Rows travel to the owner of their matrix; rows of its update travel back."""
    ranks, pieces = range(dp.size), [u.to_local() for u in momenta]
    owner = balance({i: float(flops(tuple(u.shape))) for i, u in enumerate(momenta)}, dp.size)
    owned_by = [[i for i in owner if owner[i] == rank] for rank in ranks]  # rank -> its matrices
    owned = owned_by[dp.rank]

    parcels = [torch.cat([pieces[i].flatten() for i in matrices]) for matrices in owned_by]
    sizes = [pieces[i].numel() for i in owned]
    received = torch.stack(swap(parcels, [sum(sizes)] * dp.size, dp))  # a row from each rank
    columns = zip(owned, received.split(sizes, dim=1), strict=True)
    updates = [polar(column.reshape(momenta[i].shape)) for i, column in columns]

    rows = [[update.chunk(dp.size)[rank].flatten() for update in updates] for rank in ranks]
    lengths = [parcel.numel() for parcel in parcels]  # what went to an owner comes back from it
    returned = torch.cat(swap([torch.cat(parts) for parts in rows], lengths, dp))
    order = [i for matrices in owned_by for i in matrices]
    parts = returned.split([pieces[i].numel() for i in order])
    by_number = {i: part.view(pieces[i].shape) for i, part in zip(order, parts, strict=True)}
    return [by_number[i] for i in range(len(momenta))]


def swap(parcels: Sequence[Tensor], lengths: list[int], dp: Group) -> list[Tensor]:
    """Send every rank its parcel; return what came from each, of these lengths."""
    received = parcels[0].new_empty(sum(lengths))
    leaving = [parcel.numel() for parcel in parcels]
    dist.all_to_all_single(received, torch.cat(list(parcels)), lengths, leaving, group=dp.process_group)
    return list(received.split(lengths))


def polar(u: Tensor) -> Tensor:  # U[A, B] -> O[A, B]
    return orthogonalize([u], OPTIONS, [MatrixLayout()])[0].to(u.dtype)


class ByHand(torch.optim.Optimizer):
    """Muon on the DTensors of FSDP2, one mesh dimension, rows that D divides: the least that could work."""

    def __init__(self, params: Sequence[Tensor], way: Way, dp: Group) -> None:
        super().__init__(params, OPTIONS)
        self.way, self.dp = way, dp

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step, with `way` in its middle."""
        parameters: list[Any] = self.param_groups[0]["params"]
        fed = []
        for p in parameters:
            state = self.state[p]
            buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
            options = OPTIONS["momentum"], True, OPTIONS["momentum_kind"]
            (u,) = momentum_([buffer.to_local()], [p.grad.to_local()], *options)
            fed.append(DTensor.from_local(u.bfloat16(), p.device_mesh, p.placements, run_check=False))
        for p, update in zip(parameters, self.way(fed, self.dp), strict=True):
            decay_([p.to_local()], OPTIONS["lr"], OPTIONS["weight_decay"])
            apply_([p.to_local()], [update], OPTIONS["lr"], scale(tuple(p.shape), OPTIONS["scale"]))


# ---- Counted ----------------------------------------------------------------------------------------------

TORCH, OURS = "torch.optim.Muon", "4 MuonW"
WAYS: dict[str, Way] = {
    "1 gather each matrix": gather_each,
    "2 gather all at once": gather_once,
    "3 to one owner and back": one_owner,
}


class LocalProducts(TorchDispatchMode):
    """Counts operations in matrix products of what this rank holds: torch's FlopCounterMode sees DTensors as whole.

    The first time it meets a call, DTensor runs it on FakeTensors too, to learn the shape of a result. These compute
    nothing, and are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: what it calls comes back here
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None and not isinstance(result, FakeTensor):
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


class StepCount(NamedTuple):
    """One step on one rank. away: how far new parameters are from one process's, over how far those moved."""

    calls: int
    sent: int  # bytes
    flops: int
    away: float


def count(world: World, hybrid: bool) -> list[str] | None:
    """Take a step in every way that works on this mesh; on rank 0, return what it took, as a table.

    hybrid: half of the ranks hold replicas of what the other half has (HSDP). By hand, one mesh dimension is all.
    """
    by_hand = WAYS if world.tp == 1 and not hybrid else ()
    ranks = world.gather({name: _count(world, hybrid, name) for name in (TORCH, *by_hand, OURS)})
    return None if ranks is None else lines(ranks)


def on_mesh(world: World, hybrid: bool, width: int = 64, layers: int = 4) -> tuple[DigitReader, Group]:
    """Return the program's model, the same weights on any mesh, and the DP group. Collective."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # torch warns of its many collectives
    torch.manual_seed(0)
    model, grid = DigitReader(width, layers).to(world.device), Grid.of(world)
    if grid.mesh is None:
        return model, grid.dp
    names = ("replicate", "shard")
    wrap(model, init_device_mesh(world.device, (2, world.size // 2), mesh_dim_names=names) if hybrid else grid.mesh)
    return model, grid.dp


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the hidden matrices, which all ways can take."""
    return [p for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2]


def make(name: str, parameters: Sequence[Tensor], dp: Group) -> torch.optim.Optimizer:
    """Return the optimizer of this row of the table."""
    if name == TORCH:
        same: dict[str, Any] = dict(lr=OPTIONS["lr"], weight_decay=OPTIONS["weight_decay"], ns_coefficients=MUON)
        return torch.optim.Muon(parameters, adjust_lr_fn="match_rms_adamw", **same)
    return MuonW(parameters, **OPTIONS) if name == OURS else ByHand(parameters, WAYS[name], dp)


def give_gradients(parameters: Sequence[Tensor]) -> None:
    """Give every parameter a gradient, the same whole one on any mesh."""
    generator = torch.Generator().manual_seed(1)
    for p in parameters:
        gradient = torch.randn(p.shape, generator=generator).to(p.device)
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if isinstance(p, DTensor) else gradient


def whole(p: Tensor) -> Tensor:
    """Return a copy of the whole parameter."""
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


def _count(world: World, hybrid: bool, name: str) -> StepCount:
    model, dp = on_mesh(world, hybrid)
    parameters = matrices_of(model)
    alone = [nn.Parameter(whole(p)) for p in parameters]
    before = _by_place(alone)
    for those in (parameters, alone):
        give_gradients(those)
    make(TORCH if name == TORCH else OURS, alone, Group("dp")).step()  # the reference: one process
    optimizer = make(name, parameters, dp)
    with CollectiveCounter() as counter, LocalProducts() as products:
        optimizer.step()
    away = difference(_by_place(parameters), _by_place(alone), before)
    total = counter.ledger.total()
    return StepCount(int(total.calls), int(total.sent_bytes), products.flops, away)


def _by_place(parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(place): whole(p) for place, p in enumerate(parameters)}


def lines(ranks: Sequence[dict[str, StepCount]]) -> list[str]:
    """Return the table: means over ranks, bytes over those of the matrices in bf16."""
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in matrices_of(DigitReader())]
    size, once = 2 * sum(a * b for a, b in shapes), float(sum(flops(shape) for shape in shapes))
    table = [f"{'':24s}{'collectives':>12s}{'sent by a rank':>18s}{'Newton–Schulz':>17s}{'compared with':>15s}"]
    table += [f"{'':24s}{'in a step':>12s}{'/ all matrices':>18s}{'of each matrix':>17s}{'one process':>15s}"]
    for name in ranks[0]:
        counts = [rank[name] for rank in ranks]
        sent = sum(count.sent for count in counts) / len(counts) / size
        times, away = sum(count.flops for count in counts) / once, max(count.away for count in counts)
        told = f"about 1e{round(math.log10(away))}" if away else "bit for bit"
        table.append(f"{name:24s}{counts[0].calls:12d}{sent:18.2f}{times:11.2f} times{told:>15s}")
    return table
