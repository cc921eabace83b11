"""One training, two ways: in one process on whole matrices, and on a grid, which must equal it to the bit."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import Muon
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.strategies.gather_all import GatherAll
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import mark
from distmuon.verify.blocks import BlockMuon

# ---- Cases ------------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    """One parameter. shape: TP-local. dim: cut over TP, or None. group: index into the case's groups.

    rows: of the parts that TP cuts each by itself along dimension 0; () where it cuts the parameter.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    group: int = 0
    dtype: torch.dtype = torch.float32
    rows: tuple[int, ...] = ()


MUON = dict(algorithm="muon", lr=0.02, momentum=0.95, weight_decay=0.1)
OTHER_MUON = dict(
    algorithm="muon",
    lr=0.3,
    momentum=0.8,
    nesterov=False,
    momentum_kind="average",
    weight_decay=0.01,
    cautious_decay=True,
    scale="original",
    ns_steps=3,
    ns_coefficients="polar_express",
    input_norm="rows",
    output_norm="rows_columns",
)
ROWS: dict[str, Any] = {"normuon_beta2": 0.95}
OTHER_ROWS: dict[str, Any] = {"normuon_beta2": 0.7}
ADAMW = dict(algorithm="adamw", lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
OTHER_ADAMW = dict(algorithm="adamw", lr=0.1)
FADES = (0.5, 0.9, 0.7, 0.8, 0.6, 1.1, 1.2, 0.4)  # by which each group's learning rate is multiplied after every step


@dataclass(frozen=True)
class Case:
    """What is trained, and how. absent: (name, step, dp_rank) for which there is no gradient."""

    weights: tuple[Weight, ...]
    groups: tuple[dict[str, Any], ...] = (MUON, OTHER_MUON, ADAMW)
    steps: int = 4
    bucket_size: int = 60
    max_norm: float | None = None
    absent: frozenset[tuple[str, int, int]] = field(default_factory=frozenset)

    def of_dtype(self, *dtypes: torch.dtype) -> Case:
        """Return the case with these dtypes, in turn, for its weights."""
        return replace(
            self, weights=tuple(w._replace(dtype=dtypes[i % len(dtypes)]) for i, w in enumerate(self.weights))
        )


SMALL = Case(
    (
        Weight("rows", (3, 5), 0),
        Weight("columns", (8, 6), 1),
        Weight("whole", (5, 4)),
        Weight("one", (1, 1), None, 1),
        Weight("table", (6, 3), None, 2),
        Weight("other columns", (4, 9), 1, 1),
        Weight("bias", (7,), None, 2),
        Weight("split bias", (3,), 0, 2),
        Weight("scalar", (), None, 2),
        Weight("other rows", (7, 7), 0, 1),
    )
)
MATRICES = replace(SMALL, weights=tuple(w for w in SMALL.weights if w.group < 2), groups=(MUON | ROWS, OTHER_MUON))
RAGGED = Case(
    (
        *(
            Weight(f"{a}x{b} {dim}", (a, b), dim, group=int(a > 75))
            for a, b in [(1, 1), (3, 5), (25, 25), (31, 81), (114, 31), (169, 219)]
            for dim in (0, 1, None)
        ),
        Weight("table", (37, 5), None, 2),
        Weight("bias", (131,), 0, 2),
    ),
    (
        MUON,
        OTHER_MUON | OTHER_ROWS | dict(ns_form="gram", input_norm="both", output_norm="columns", scale="unit_rms"),
        ADAMW,
    ),
    steps=2,
    bucket_size=6_250,
)
TINY = Case((Weight("only", (1, 1), 0),), (MUON,))
ADAMW_ONLY = Case(
    tuple(w._replace(group=w.group % 2) for w in SMALL.weights), (ADAMW, OTHER_ADAMW), steps=5, bucket_size=40
)
SINGLE_SCALAR = Case((Weight("only", ()),), (ADAMW,))  # D - 1 ranks have an AdamW without parameters
ABSENT = replace(
    SMALL,
    absent=frozenset(
        [(name, 0, r) for name in ("whole", "bias") for r in range(8)]  # nobody's, before any state exists
        + [(name, 2, r) for name in ("rows", "other columns", "table") for r in range(8)]  # nobody's, in mid-training
        + [(name, 1, 0) for name in ("rows", "columns", "split bias")]  # DP rank 0 alone has none
        + [("other rows", s, r) for s in range(8) for r in range(8)]  # never anybody's
    ),
)
ABSENT_ROWS = replace(ABSENT, groups=(MUON | ROWS, OTHER_MUON | OTHER_ROWS, ADAMW))


def several(tp: int, k: int = 1, rows: bool = False) -> Case:
    """Return a case of parameters with several matrices each, cut over T ranks in every way; T divides 8.

    k: by which their sides are multiplied. rows: with NorMuon, which strategies in blocks refuse.
    """
    often, other = (ROWS, OTHER_ROWS) if rows else ({}, {})
    qkv, heads = (16 * k, 8 * k, 8 * k), ((16 * k, 8), (8 * k, 8), (8 * k, 8))
    weights = (  # of whole shapes
        Weight("experts", (8, 6 * k, 5 * k), 0, 0),
        Weight("cut experts", (3, 8 * k, 5 * k), 1, 0),
        Weight("whole experts", (3, 4 * k, 7 * k), None, 0),
        Weight("kernel", (8 * k, 3 * k, 2, 2), 0, 1),
        Weight("kernel of cut inputs", (6 * k, 8 * k, 3), 1, 1),
        Weight("whole kernel", (5 * k, 2 * k, 3), None, 1),
        Weight("qkv", (32 * k, 6 * k), 0, 2, rows=qkv),
        Weight("qkv of cut inputs", (32 * k, 8 * k), 1, 2),
        Weight("whole qkv", (32 * k, 20 * k), None, 2),
        Weight("query", (16 * k, 7 * k), 0, 3),
        Weight("query of cut inputs", (24 * k, 8 * k), 1, 3),
        Weight("whole query", (24 * k, 7 * k), None, 3),
        Weight("output", (6 * k, 16 * k), 1, 4),
        Weight("output of cut rows", (8 * k, 16 * k), 0, 4),
        Weight("heads of qkv", (32 * k, 6 * k), 0, 5, rows=qkv),
        Weight("plain", (8 * k, 6 * k), 0, 6),
        Weight("bias", (8 * k,), 0, 7),
    )
    options: tuple[dict[str, Any], ...] = (
        MUON | often | {"matrices": "stacked"},
        OTHER_MUON | often | {"matrices": "flattened"},
        MUON | often | {"matrices": ("fused", qkv)},
        OTHER_MUON | other | {"matrices": ("rows", 8)},
        MUON | other | {"matrices": ("columns", 8)},
        MUON
        | often
        | {"matrices": ("fused", heads), "scale": "unit_rms", "ns_coefficients": "cubic5", "input_norm": "columns"},
        MUON,
        ADAMW,
    )
    local = [w._replace(shape=tuple(n // tp if at == w.dim else n for at, n in enumerate(w.shape))) for w in weights]
    return Case(tuple(local), options, steps=3, bucket_size=300 * k * k)


def synthetic(words: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return Gaussian numbers that depend on `words` alone, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(zlib.crc32(words.encode()))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def whole_shape(weight: Weight, tp: int) -> list[int]:
    return [n * tp if dim == weight.dim else n for dim, n in enumerate(weight.shape)]


def whole_start(weight: Weight, tp: int) -> Tensor:
    return synthetic(f"start {weight.name}", whole_shape(weight, tp), weight.dtype)


def whole_gradient(case: Case, weight: Weight, tp: int, step: int, dp_rank: int) -> Tensor | None:
    """Return the whole gradient that DP rank `dp_rank` feeds in this step."""
    if (weight.name, step, dp_rank) in case.absent:
        return None
    return synthetic(f"{weight.name} {step} {dp_rank}", whole_shape(weight, tp), weight.dtype)


def cut(whole: Tensor, dim: int | None, tp: int, tp_rank: int, rows: Sequence[int] = ()) -> Tensor:
    """Return one TP rank's slice of a whole tensor, in storage of its own. rows: as a weight's."""
    if rows:
        return torch.cat([cut(part, dim, tp, tp_rank) for part in whole.split(list(rows))])
    return (whole if dim is None else whole.chunk(tp, dim)[tp_rank]).clone(memory_format=torch.contiguous_format)


# ---- The same training, whole and sharded -----------------------------------------------------------------


class Outcome(NamedTuple):
    """values: parameters after the last step. norms: total gradient norm of each step, if it is clipped."""

    values: dict[str, Tensor]
    norms: list[float]


def train_alone(world: World, case: Case, dp: int, tp: int, **in_blocks: Any) -> Outcome:
    """Train whole parameters in one process on the gradients of D ranks, with one ordinary optimizer for each.

    in_blocks: options of `BlockMuon`, which then takes Muon's place.
    Gradients are added in rank order, in float32 or wider, and divided by D. A rank that has none counts as zero.
    """
    masters: dict[str, nn.Parameter] = {}
    optimizers: list[torch.optim.Optimizer] = []
    schedulers = []
    for w in case.weights:
        wide = torch.promote_types(w.dtype, torch.float32)
        masters[w.name] = mark(nn.Parameter(whole_start(w, tp).to(wide)), w.dim)
        options: dict[str, Any] = {n: value for n, value in case.groups[w.group].items() if n != "algorithm"}
        if case.groups[w.group]["algorithm"] == "muon":
            travels = torch.float64 if w.dtype == torch.float64 else torch.bfloat16
            make = BlockMuon if in_blocks else Muon
            defaults: dict[str, Any] = {"input_dtype": travels, "batched": False}
            optimizers.append(make([masters[w.name]], **defaults | in_blocks | options))
        else:
            optimizers.append(torch.optim.AdamW([masters[w.name]], **{"weight_decay": 0.1} | options))
        schedulers.append(LambdaLR(optimizers[-1], fades(1, w.group)))
    norms = []
    for step in range(case.steps):
        for w in case.weights:
            copies = [whole_gradient(case, w, tp, step, rank) for rank in range(dp)]
            master = masters[w.name]
            master.grad = None
            if any(gradient is not None for gradient in copies):
                total = torch.zeros_like(master)
                for gradient in copies:
                    total += torch.zeros_like(master) if gradient is None else gradient.to(master.dtype)
                master.grad = total / dp
        if case.max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(masters.values(), case.max_norm)))
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    return Outcome({w.name: masters[w.name].detach().to(w.dtype) for w in case.weights}, norms)


def fades(groups: int, first: int = 0) -> list[Any]:
    return [lambda step, fade=FADES[first + i]: fade**step for i in range(groups)]


def build(
    case: Case, grid: Grid, make: type[DistributedMuon] = DistributedMuon, **options: Any
) -> tuple[dict[str, nn.Parameter], ShardedOptimizer]:
    """Return this rank's slices of the starting parameters, by name, and the sharded optimizer over them."""
    parameters = {
        w.name: mark(nn.Parameter(cut(whole_start(w, grid.tp.size), w.dim, grid.tp.size, grid.tp.rank, w.rows)), w.dim)
        for w in case.weights
    }
    groups = [
        group | {"params": [(w.name, parameters[w.name]) for w in case.weights if w.group == i]}
        for i, group in enumerate(case.groups)
    ]
    options = {"bucket_size": case.bucket_size, "max_norm": case.max_norm, **options}
    if all(group["algorithm"] == "adamw" for group in groups):
        return parameters, Zero1AdamW(groups, grid, **options)
    options.setdefault("batched", False)
    return parameters, make(groups, grid, **options)


def give(case: Case, grid: Grid, parameters: Mapping[str, nn.Parameter], step: int) -> None:
    """Set this rank's gradients of one step."""
    for w in case.weights:
        gradient = whole_gradient(case, w, grid.tp.size, step, grid.dp.rank)
        parameters[w.name].grad = None if gradient is None else cut(gradient, w.dim, grid.tp.size, grid.tp.rank, w.rows)


def go_on(
    case: Case, grid: Grid, parameters: Mapping[str, nn.Parameter], optimizer: ShardedOptimizer, steps: Sequence[int]
) -> None:
    """Take these steps."""
    for step in steps:
        give(case, grid, parameters, step)
        optimizer.step()


def saved(parameters: Mapping[str, nn.Parameter], optimizer: ShardedOptimizer) -> io.BytesIO:
    """Return a file with the values and the optimizer's state."""
    file = io.BytesIO()
    torch.save({"model": values(parameters), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return file


def restore(file: io.BytesIO, parameters: Mapping[str, nn.Parameter], optimizer: ShardedOptimizer) -> None:
    """Load such a file, as torch does by default: without what could run code."""
    found = torch.load(file, weights_only=True)
    for name, p in parameters.items():
        p.data.copy_(found["model"][name])
    optimizer.load_state_dict(found["optimizer"])


def values(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


def train_sharded(case: Case, grid: Grid, poisoned: bool = False, **options: Any) -> Outcome:
    """Train this rank's slices. poisoned: with NaN wherever no parameter is, anew before every step."""
    parameters, optimizer = build(case, grid, **options)
    scheduler = LambdaLR(optimizer, fades(len(case.groups)))
    norms = []
    if poisoned and isinstance(optimizer, DistributedMuon):
        poison_gather(optimizer)
    for step in range(case.steps):
        give(case, grid, parameters, step)
        if poisoned:
            poison_padding(optimizer)
        optimizer.step()
        scheduler.step()
        norms.append(optimizer.statistics.norm)
    return Outcome(values(parameters), norms)


def poison_padding(optimizer: ShardedOptimizer) -> None:
    """Fill the padding of parameters, gradients and master weights with NaN."""
    buffers = optimizer.buffers
    for bucket in buffers.buckets:
        end = bucket.offset + bucket.numel
        buffers.flat_parameters[bucket.buffer_idx][end : bucket.range.end] = torch.nan
        buffers.flat_gradients[bucket.buffer_idx][end : bucket.range.end] = torch.nan
        buffers.masters[bucket][max(0, end - bucket.shard(buffers.grid.dp.rank).start) :] = torch.nan


def poison_gather(optimizer: DistributedMuon) -> None:
    """Let everything that is no momentum travel as NaN: padding, and the places of AdamW's parameters."""
    assert isinstance(optimizer.strategy, GatherAll)
    honest = optimizer.strategy.pack

    def pack(bucket: Any, momentum: Mapping[int, Tensor]) -> Tensor:
        packed = torch.full_like(honest(bucket, momentum), torch.nan)
        origin = bucket.shard(optimizer.grid.dp.rank).start
        for index, piece in momentum.items():
            packed[optimizer.buffers.metas[index].local_range.relative_to(origin).as_slice] = piece
        return packed

    optimizer.strategy.pack = pack  # type: ignore[method-assign]
