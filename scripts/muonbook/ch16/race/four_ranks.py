"""What ranks do in the race: ours, torch.optim.Muon and others take the same step in turns, and so do its bare matrix
products; and whole training steps of ours, with one owner per matrix or not, over ZeRO-1 AdamW's.

Gradients are reduced already, and are where each baseline wants them: what is timed is the optimizer alone, from the
momentum to new parameters and, where they are published, to all of them on every rank. The matrices are those of four
transformer layers: query, key, value and output, up and down.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmuon.launch import World
from distmuon.optim.coefficients import MUON
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.fast_paths import fast_dtype, has_matrix_unit
from distmuon.optim.newton_schulz import flops
from distmuon.optim.param_groups import groups_for
from distmuon.sharding.grid import Grid
from distmuon.sharding.ownership import balance
from distmuon.sharding.tensor_parallel import mark
from muonbook.measure import interleaved_timing, results
from muonbook.measure.trainers import Trainer, make_muon, make_zero1, sliced_model
from muonbook.measure.workload import TIMED, Workload, batches, pixels
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
class RunningBaseline:
    """One optimizer at its matrices, which begin as zeros. step: what is timed. feed: what comes before, untimed."""

    parameters: list[Any]  # of this rank: tensors, TP-local, or DTensors
    step: Callable[[], object]
    feed: Callable[[], object] = lambda: None


Make = Callable[[], RunningBaseline]


# ---- The bare matrix products -----------------------------------------------------------------------------


class BareProducts:
    """The products of standard Newton–Schulz for this rank's part of the matrices, into memory that is there."""

    def __init__(self, shapes: Sequence[Shape], grid: Grid, dtype: torch.dtype) -> None:
        work = {index: float(flops(shape, STEPS)) for index, shape in enumerate(shapes)}
        owner = balance(work, grid.world.size)
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


OURS = ("gather_all", "gather_cut", "owner")


def ours(matrices: Matrices, grid: Grid, strategy: str) -> RunningBaseline:
    """Return one of our strategies, its gradients reduced to their owners once and for all."""
    blocks = matrices.of_rank(grid)
    cut = zip(blocks, matrices.tp_split_dims, strict=True)
    parameters = [mark(nn.Parameter(torch.zeros_like(block)), dim) for block, dim in cut]
    made = DistributedMuon(parameters, grid, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, strategy=strategy)
    for parameter, block in zip(parameters, blocks, strict=True):
        parameter.grad = block.clone()
    with torch.no_grad():
        made.reduce(None)
    return RunningBaseline(parameters, torch.no_grad()(made.update))


# ---- torch's and others', which know DP alone -------------------------------------------------------------


def replicas(matrices: Matrices) -> list[nn.Parameter]:
    """Return whole parameters with their gradients, which they do not share with anybody."""
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in matrices.gradients]
    for parameter, gradient in zip(parameters, matrices.gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


def torchs(matrices: Matrices) -> RunningBaseline:
    """Return torch.optim.Muon, every rank at all matrices."""
    parameters = replicas(matrices)
    options: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "ns_steps": STEPS, "ns_coefficients": MUON}
    made = torch.optim.Muon(parameters, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, **options)
    return RunningBaseline(parameters, made.step)


def keller_jordan(matrices: Matrices) -> RunningBaseline:
    """Return Keller Jordan's distributed Muon. It overwrites gradients, and so is fed anew."""
    parameters = replicas(matrices)
    made = importlib.import_module("muon").Muon(parameters, lr=LR, weight_decay=DECAY, momentum=MOMENTUM)

    def feed() -> None:
        for parameter, gradient in zip(parameters, matrices.gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)

    return RunningBaseline(parameters, made.step, feed)


def dion(matrices: Matrices, grid: Grid) -> RunningBaseline:
    """Return dion's Muon, which torch.compile compiles, as fast on a CPU as we can make it.

    Its all-to-all of lists, which on gloo torch replaces by an all-gather of four times the bytes, is exchanged for an
    all-to-all.
    """
    parameters = replicas(matrices)
    vars(importlib.import_module("dion.megabatch_base"))["dist"] = _WithAllToAll()
    options: dict[str, Any] = {"nesterov": True, "adjust_lr": "rms_norm"}
    made = importlib.import_module("dion.muon").Muon(
        parameters, grid.dp.process_group, lr=LR, mu=MOMENTUM, weight_decay=DECAY, **options
    )
    return RunningBaseline(parameters, made.step)


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


# ---- The race ---------------------------------------------------------------------------------------------


def baselines(matrices: Matrices, grid: Grid, others: Sequence[str]) -> dict[str, Make]:
    """Return how to make everybody who can run on this grid: name -> () -> baseline.

    others: of `peers.PEERS`, those that are here.
    """
    found: dict[str, Make] = {name: partial(ours, matrices, grid, name) for name in OURS}
    if grid.tp.size > 1:
        return found
    found["torch_replicated"] = partial(torchs, matrices)
    if "keller_jordan" in others:
        found["keller_jordan"] = partial(keller_jordan, matrices)
    if "dion" in others:
        found["dion_compiled_replicated"] = partial(dion, matrices, grid)
    return found


def race(
    world: World, rounds: int, others: Sequence[str], folder: str | None, layers: int, width: int
) -> dict[str, Any] | None:
    """Let all take their steps in turns; on rank 0, return each one's time over the products'.

    folder: of clones. others: see `baselines`.
    """
    make_importable(others, folder)
    grid, matrices = Grid.of(world), Matrices.of_layers(layers, width)
    dtype = fast_dtype(grid.device, torch.float32)
    running = {name: make() for name, make in baselines(matrices, grid, others).items()}
    products = BareProducts(matrices.shapes, grid, dtype)
    steps = {"products": products.step} | {name: baseline.step for name, baseline in running.items()}

    def before(name: str) -> None:
        if name in running:
            running[name].feed()
        meet(grid)

    seconds = interleaved_timing.take_turns(
        {name: to_the_last(step, grid) for name, step in steps.items()}, rounds, before=before
    )
    if world.rank:
        return None
    floor = seconds["products"]
    return {
        "matrices": {f"{a}x{b}": matrices.shapes.count((a, b)) for a, b in dict.fromkeys(matrices.shapes)},
        "dtype": str(dtype).removeprefix("torch."),
        "fast_bfloat16": dtype == torch.bfloat16,
        "matrix_unit": has_matrix_unit(),
        "floor_milliseconds": 1e3 * interleaved_timing.medians(seconds)["products"],
        "baselines": {
            name: {"ratio": results.spread(interleaved_timing.ratios(seconds[name], floor))} for name in running
        },
    }


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


# ---- Whole training steps -------------------------------------------------------------------------------------


def make_owner(workload: Workload, grid: Grid, publish: str = "parameters") -> Trainer:
    """Return the trainer that differs from the baseline "muon" in its strategy alone, and in what is sent back."""
    model = sliced_model(workload, grid)
    options = workload.hyperparameters | {"bucket_size": workload.bucket_size}
    optimizer = DistributedMuon(groups_for(model, "muon"), grid, strategy="owner", publish=publish, **options)
    return Trainer(model, [optimizer])


MAKE: dict[str, Callable[[Workload, Grid], Trainer]] = {
    "zero1": make_zero1,
    "gather_all": make_muon,
    "owner": make_owner,
    "owner_updates": partial(make_owner, publish="updates"),
}


def compare_training_steps(
    world: World, sequences: Sequence[int], rounds: int, workload: Workload = TIMED
) -> list[dict[str, Any]] | None:
    """Let all train in turns, with so many sequences per DP rank; on rank 0, return a row for each number of them: the
    spread of the slowest rank's time over ZeRO-1's."""
    grid, found = Grid.of(world), []
    corpus = pixels(grid, workload.context)
    trainers = {name: make(workload, grid) for name, make in MAKE.items()}
    for each in sequences:
        sized = workload.shared_by(world.dp, each)
        batch = next(batches(sized, corpus, world.dp, grid.dp.rank))
        acts = {name: partial(trainer.step, batch) for name, trainer in trainers.items()}
        everywhere = world.gather(interleaved_timing.take_turns(acts, rounds, before=lambda _: dist.barrier()))
        if everywhere is None:
            continue
        slowest = {
            name: [max(times) for times in zip(*(rank[name] for rank in everywhere), strict=True)] for name in MAKE
        }
        ratios = {name: interleaved_timing.ratios(slowest[name], slowest["zero1"]) for name in MAKE if name != "zero1"}
        found.append(
            {"tokens": sized.tokens} | {name: {"ratio": results.spread(each)} for name, each in ratios.items()}
        )
    return found if world.rank == 0 else None
