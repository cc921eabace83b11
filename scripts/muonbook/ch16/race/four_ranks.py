"""The race: ours, torch.optim.Muon and others take the same step in turns, and so do its bare matrix products.

Gradients are reduced already, and are where each entrant wants them: what is timed is the optimizer alone, from the
momentum to new parameters and, where they are published, to all of them on every rank. The matrices are those of four
transformer layers: query, key, value and output, up and down.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distmuon.launch import World
from distmuon.optim.coefficients import MUON
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.fast_paths import fast_dtype, has_matrix_unit
from distmuon.optim.newton_schulz import flops
from distmuon.optim.overlap import PipelinedMuon
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Bucket
from distmuon.sharding.ownership import balance
from distmuon.sharding.tensor_parallel import mark
from distmuon.verify.counter import CollectiveCounter
from muonbook.ch16.race.tables import COMPILED
from muonbook.measure import interleaved_timing, results
from muonbook.peers import make_importable

LR, DECAY, MOMENTUM, STEPS = 0.02, 0.1, 0.95, 5
Shape = tuple[int, int]


@dataclass(frozen=True)
class Matrices:
    """Whole matrices, along which dimension TP cuts each, and a gradient for each, the same on every rank."""

    shapes: list[Shape]
    tp_split_dims: list[int]
    gradients: list[Tensor]  # each [A, B], float32

    @classmethod
    def of_layers(cls, layers: int, width: int) -> Matrices:
        """Return those of `layers` transformer layers: four [w, w], one [4w, w], one [w, 4w] each."""
        shapes = [*[(width, width)] * 4, (4 * width, width), (width, 4 * width)] * layers
        generator = torch.Generator().manual_seed(0)
        return cls(shapes, [0, 0, 0, 1, 0, 1] * layers, [torch.randn(s, generator=generator) for s in shapes])

    def of_rank(self, grid: Grid) -> list[Tensor]:
        """Return the gradients' blocks of this TP rank."""
        cut = zip(self.gradients, self.tp_split_dims, strict=True)
        return [whole.chunk(grid.tp.size, dim)[grid.tp.rank] for whole, dim in cut]


@dataclass(frozen=True)
class Entrant:
    """One optimizer at its matrices, which begin as zeros. step: what is timed. feed: what comes before, untimed."""

    parameters: list[Any]  # of this rank: tensors, TP-local, or DTensors
    step: Callable[[], object]
    feed: Callable[[], object] = lambda: None


Make = Callable[[], Entrant]


# ---- The bare matrix products -----------------------------------------------------------------------------


class BareProducts:
    """The products of standard Newton–Schulz for this rank's part of the matrices, into memory that is there."""

    def __init__(self, shapes: Sequence[Shape], grid: Grid, dtype: torch.dtype) -> None:
        work = {index: float(flops(shape, STEPS)) for index, shape in enumerate(shapes)}
        owner = balance(work, grid.world.size)
        loads = [sum(work[i] for i in work if owner[i] == rank) for rank in range(grid.world.size)]
        self.heaviest_over_mean = max(loads) * len(loads) / sum(loads)
        self.mine = [self._memory(sorted(shapes[i]), dtype) for i in work if owner[i] == grid.world.rank]

    @staticmethod
    def _memory(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        a, b = shape
        x = torch.randn(a, b).div_((a * b) ** 0.5).to(dtype)  # of norm 1, as in Newton–Schulz
        return x, x.new_empty(a, a), x.new_empty(a, a), x.new_empty(a, b)

    def step(self) -> None:
        for x, gram, square, product in self.mine:
            for _ in range(STEPS):
                torch.mm(x, x.mT, out=gram)
                torch.mm(gram, gram, out=square)
                torch.mm(square, x, out=product)


# ---- Ours -------------------------------------------------------------------------------------------------


class UnpublishedMuon(DistributedMuon):
    """Distributed Muon whose owners keep their new parameters to themselves."""

    def all_gather(self, bucket: Bucket) -> None:
        """Send nothing."""


OURS: dict[str, dict[str, Any]] = {  # name -> options of `ours`
    "gather_all": {"strategy": "gather_all"},
    "gather_cut": {"strategy": "gather_cut"},
    "owner_standard_form": {"strategy": "owner", "ns_form": "standard"},
    "owner": {"strategy": "owner"},
    "owner_pipelined": {"strategy": "owner", "optimizer": PipelinedMuon},
    "owner_updates": {"strategy": "owner", "publish": "updates"},
    "owner_updates_pipelined": {"strategy": "owner", "publish": "updates", "optimizer": PipelinedMuon},
}


def ours(
    matrices: Matrices,
    grid: Grid,
    optimizer: type[DistributedMuon] = DistributedMuon,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Entrant:
    """Return one of our strategies, its gradients reduced to their owners once and for all."""
    blocks = matrices.of_rank(grid)
    cut = zip(blocks, matrices.tp_split_dims, strict=True)
    parameters = [mark(nn.Parameter(torch.zeros_like(block, dtype=dtype)), dim) for block, dim in cut]
    made = optimizer(parameters, grid, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, **options)
    for parameter, block in zip(parameters, blocks, strict=True):
        parameter.grad = block.clone()
    with torch.no_grad():
        made.reduce(None)
    return Entrant(parameters, torch.no_grad()(made.update))


# ---- torch's and others', which know DP alone -------------------------------------------------------------


def replicas(matrices: Matrices) -> list[nn.Parameter]:
    """Return whole parameters with their gradients, which they do not share with anybody."""
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in matrices.gradients]
    for parameter, gradient in zip(parameters, matrices.gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


def rows(matrices: Matrices, grid: Grid) -> list[nn.Parameter]:
    """Return parameters cut over DP by rows, as FSDP2 does it, with their gradients."""
    assert grid.mesh is not None
    mesh = grid.mesh["dp"]
    parameters = []
    for gradient in matrices.gradients:
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        parameters.append(parameter)
    return parameters


def torchs(parameters: list[nn.Parameter]) -> Entrant:
    """Return torch.optim.Muon on these."""
    options: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "ns_steps": STEPS, "ns_coefficients": MUON}
    made = torch.optim.Muon(parameters, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, **options)
    return Entrant(parameters, made.step)


def keller_jordan(matrices: Matrices) -> Entrant:
    """Return Keller Jordan's distributed Muon. It overwrites gradients, and so is fed anew."""
    parameters = replicas(matrices)
    made = importlib.import_module("muon").Muon(parameters, lr=LR, weight_decay=DECAY, momentum=MOMENTUM)

    def feed() -> None:
        for parameter, gradient in zip(parameters, matrices.gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)

    return Entrant(parameters, made.step, feed)


def dion(parameters: list[nn.Parameter], grid: Grid, compiled: bool) -> Entrant:
    """Return dion's Muon, on whole parameters or on rows, as fast on a CPU as we can make it.

    Its all-to-all of lists, which on gloo torch replaces by an all-gather of four times the bytes, is exchanged for an
    all-to-all. Not compiled, its functions for torch.compile run as they are written, and its Newton–Schulz is
    exchanged, by the option that it has for that, for one whose sums are fused into the products.
    """
    assert grid.mesh is not None
    vars(importlib.import_module("dion.megabatch_base"))["dist"] = _WithAllToAll()
    mesh = grid.mesh["dp"] if isinstance(parameters[0], DTensor) else grid.dp.process_group
    options: dict[str, Any] = {"nesterov": True, "adjust_lr": "rms_norm"}
    options |= {} if compiled else {"newton_schulz_func": fused_quintics}
    made = importlib.import_module("dion.muon").Muon(
        parameters, mesh, lr=LR, mu=MOMENTUM, weight_decay=DECAY, **options
    )

    def step() -> None:
        with torch.compiler.set_stance("default" if compiled else "force_eager"):
            made.step()

    return Entrant(parameters, step)


class _WithAllToAll:
    """torch.distributed, with an all-to-all of lists that is one on gloo, too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_to_all(self, coming: list[Tensor], going: list[Tensor], group: Any, async_op: bool) -> Any:
        packed = torch.stack(coming)
        work = dist.all_to_all_single(packed, torch.stack(going), group=group, async_op=async_op)
        for tensor, place in zip(coming, packed, strict=True):
            tensor.set_(place)  # type: ignore[call-overload]
        return work


def fused_quintics(
    matrices: Tensor,  # [n, A, B] or [A, B]
    epsilon: float | Tensor,
) -> Tensor:  # as `matrices`, bfloat16
    """Run Newton–Schulz as simply as it goes, two of three products with a sum: the fastest that we could hand dion."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x) / (x.norm(dim=(-2, -1), keepdim=True) + epsilon)
    a, b, c = MUON
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(STEPS):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def published(entrant: Entrant, grid: Grid) -> Entrant:
    """Return an entrant with rows that, after its step, also gathers all rows in bfloat16, as FSDP2 would forward."""

    def step() -> None:
        entrant.step()
        mine = torch.cat([parameter.to_local().detach().reshape(-1).bfloat16() for parameter in entrant.parameters])
        grid.dp.all_gather(mine, "parameters")

    return Entrant(entrant.parameters, step, entrant.feed)


# ---- The race ---------------------------------------------------------------------------------------------


def entrants(matrices: Matrices, grid: Grid, others: Sequence[str], compiler: bool = False) -> dict[str, Make]:
    """Return how to make everybody who can run on this grid: name -> () -> entrant.

    others: of `peers.PEERS`, those that are here. compiler: whether there is one, for which torch.compile writes C++.
    """
    found: dict[str, Make] = {name: partial(ours, matrices, grid, **options) for name, options in OURS.items()}
    owner = partial(ours, matrices, grid, strategy="owner")
    found["owner_bfloat16_model"] = partial(owner, dtype=torch.bfloat16)
    found["owner_unpublished_standard_form"] = partial(owner, UnpublishedMuon, ns_form="standard")
    found["owner_unpublished"] = partial(owner, UnpublishedMuon)
    if grid.tp.size > 1:
        return found
    found["torch_replicated"] = lambda: torchs(replicas(matrices))
    found["torch_dtensor"] = lambda: torchs(rows(matrices, grid))
    if "keller_jordan" in others:
        found["keller_jordan"] = partial(keller_jordan, matrices)
    if "dion" in others:
        for how in [False, True][: 1 + compiler]:
            kind = COMPILED * how
            found[f"dion_{kind}replicated"] = lambda how=how: dion(replicas(matrices), grid, how)  # type: ignore[misc]
            found[f"dion_{kind}rows"] = lambda how=how: dion(rows(matrices, grid), grid, how)  # type: ignore[misc]
            found[f"dion_{kind}rows_published"] = partial(_published_rows, matrices, grid, how)
    return found


def _published_rows(matrices: Matrices, grid: Grid, compiled: bool) -> Entrant:
    return published(dion(rows(matrices, grid), grid, compiled), grid)


def race(
    world: World,
    rounds: int,
    others: Sequence[str],
    folder: str | None,
    compiler: bool,
    layers: int,
    width: int,
    matrix_unit: bool = True,
) -> dict[str, Any] | None:
    """Let all take their steps in turns; on rank 0, return each one's time over the products', and what a rank sends.

    folder: of clones. others, compiler: see `entrants`. matrix_unit: False forbids oneDNN to use the
    CPU's.
    """
    if not matrix_unit:
        forbid_matrix_unit()
    make_importable(others, folder)
    grid, matrices = Grid.of(world), Matrices.of_layers(layers, width)
    dtype = fast_dtype(grid.device, torch.float32)
    makers, products = entrants(matrices, grid, others, compiler), BareProducts(matrices.shapes, grid, dtype)
    running = {name: makers[name]() for name in makers}
    eager = [name for name in running if COMPILED not in name]
    sent = {name: sent_bytes(running[name]) for name in eager}
    # torch.compile refuses to be watched; what is sent is the same
    sent |= {name: sent[name.replace(COMPILED, "")] for name in running if COMPILED in name}
    steps = {"products": products.step} | {name: entrant.step for name, entrant in running.items()}

    def before(name: str) -> None:
        if name in running:
            running[name].feed()
        meet(grid)

    seconds = interleaved_timing.take_turns(
        {name: to_the_last(step, grid) for name, step in steps.items()}, rounds, before=before
    )
    everywhere = world.gather(sent)
    if everywhere is None:
        return None
    found = {}
    for name in running:
        ratio = results.spread(interleaved_timing.ratios(seconds[name], seconds["products"]))
        ratio["of_minima"] = min(seconds[name]) / min(seconds["products"])
        found[name] = {"ratio": ratio, "sent_bytes": sum(one[name] for one in everywhere) / len(everywhere)}
    return {
        "matrices": {f"{a}x{b}": matrices.shapes.count((a, b)) for a, b in dict.fromkeys(matrices.shapes)},
        "dtype": str(dtype).removeprefix("torch."),
        "fast_bfloat16": dtype == torch.bfloat16,
        "matrix_unit": has_matrix_unit(),
        "heaviest_over_mean": products.heaviest_over_mean,
        "floor_milliseconds": 1e3 * interleaved_timing.medians(seconds)["products"],
        "entrants": found,
    }


def forbid_matrix_unit() -> None:
    """Let oneDNN do without the CPU's matrix unit. It asks at this process's first product."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"


def sent_bytes(entrant: Entrant) -> int:
    """Take a step; return the bytes that this rank sends in it, as torch's dispatcher counts them."""
    entrant.feed()
    with CollectiveCounter() as counter:
        entrant.step()
    return counter.ledger.total().sent_bytes


def to_the_last(step: Callable[[], object], grid: Grid) -> Callable[[], None]:
    """Return the step, ended when the last rank has ended it."""

    def act() -> None:
        step()
        meet(grid)

    return act


def meet(grid: Grid) -> None:
    """Wait for all ranks."""
    if grid.world.size > 1:
        dist.barrier()
