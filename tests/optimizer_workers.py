"""Training on made-up gradients: on a grid, and in one process on whole matrices, which every grid must equal."""

from __future__ import annotations

import copy
import io
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from distmuon.counter import CollectiveCounter
from distmuon.distributed_muon import DistributedMuon
from distmuon.gradients import NonFiniteGradient
from distmuon.grid import Grid
from distmuon.launch import World
from distmuon.muon import Muon
from distmuon.strategies.gather_all import GatherAll
from distmuon.tensor_parallel import mark
from distmuon.zero1_optimizer import Zero1AdamW

# ---- Cases ------------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    """One parameter. shape: TP-local. dim: cut over TP, or None. group: index into the case's groups."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    group: int = 0
    dtype: torch.dtype = torch.float32


MUON = dict(algorithm="muon", lr=0.02, momentum=0.95, weight_decay=0.1)
OTHER_MUON = dict(
    algorithm="muon",
    lr=0.3,
    momentum=0.8,
    nesterov=False,
    momentum_kind="average",
    weight_decay=0.01,
    scale="original",
    ns_steps=3,
    ns_coefficients="polar_express",
)
ADAMW = dict(algorithm="adamw", lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
OTHER_ADAMW = dict(algorithm="adamw", lr=0.1)
FADES = (0.5, 0.9, 0.7)  # by which each group's learning rate is multiplied after every step


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
RAGGED = Case(
    (
        *(
            Weight(f"{a}x{b} {dim}", (a, b), dim, group=int(a > 300))
            for a, b in [(1, 1), (3, 5), (100, 100), (124, 324), (456, 124), (676, 876)]
            for dim in (0, 1, None)
        ),
        Weight("table", (37, 5), None, 2),
        Weight("bias", (131,), 0, 2),
    ),
    steps=2,
    bucket_size=100_000,
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


def made_up(words: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return Gaussian numbers that depend on `words` alone, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(zlib.crc32(words.encode()))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def whole_shape(weight: Weight, tp: int) -> list[int]:
    return [n * tp if dim == weight.dim else n for dim, n in enumerate(weight.shape)]


def whole_start(weight: Weight, tp: int) -> Tensor:
    return made_up(f"start {weight.name}", whole_shape(weight, tp), weight.dtype)


def whole_gradient(case: Case, weight: Weight, tp: int, step: int, dp_rank: int) -> Tensor | None:
    """Return the whole gradient that DP rank `dp_rank` feeds in this step."""
    if (weight.name, step, dp_rank) in case.absent:
        return None
    return made_up(f"{weight.name} {step} {dp_rank}", whole_shape(weight, tp), weight.dtype)


def cut(whole: Tensor, dim: int | None, tp: int, tp_rank: int) -> Tensor:
    """Return one TP rank's slice of a whole tensor, in storage of its own."""
    return (whole if dim is None else whole.chunk(tp, dim)[tp_rank]).clone(memory_format=torch.contiguous_format)


# ---- The same training, whole and sharded -----------------------------------------------------------------


class Outcome(NamedTuple):
    """values: parameters after the last step. norms: total gradient norm of each step, if it is clipped."""

    values: dict[str, Tensor]
    norms: list[float]


def train_alone(world: World, case: Case, dp: int, tp: int) -> Outcome:
    """Train whole parameters in one process on the gradients of D ranks, with one ordinary optimizer for each.

    Gradients are added in rank order, in float32 or wider, and divided by D. A rank that has none counts as zero.
    """
    masters: dict[str, nn.Parameter] = {}
    optimizers: list[torch.optim.Optimizer] = []
    schedulers = []
    for w in case.weights:
        wide = torch.promote_types(w.dtype, torch.float32)
        masters[w.name] = nn.Parameter(whole_start(w, tp).to(wide))
        options = {name: value for name, value in case.groups[w.group].items() if name != "algorithm"}
        if case.groups[w.group]["algorithm"] == "muon":
            travels = torch.float64 if w.dtype == torch.float64 else torch.bfloat16
            optimizers.append(Muon([masters[w.name]], input_dtype=travels, batched=False, **options))
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


def build(case: Case, grid: Grid, **options: Any) -> tuple[dict[str, nn.Parameter], Zero1AdamW]:
    """Return this rank's slices of the starting parameters, by name, and the sharded optimizer over them."""
    parameters = {
        w.name: mark(nn.Parameter(cut(whole_start(w, grid.tp.size), w.dim, grid.tp.size, grid.tp.rank)), w.dim)
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
    return parameters, DistributedMuon(groups, grid, **options)


def give(case: Case, grid: Grid, parameters: Mapping[str, nn.Parameter], step: int) -> None:
    """Set this rank's gradients of one step."""
    for w in case.weights:
        gradient = whole_gradient(case, w, grid.tp.size, step, grid.dp.rank)
        parameters[w.name].grad = None if gradient is None else cut(gradient, w.dim, grid.tp.size, grid.tp.rank)


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
        norms.append(optimizer.summary.norm)
    return Outcome(values(parameters), norms)


def poison_padding(optimizer: Zero1AdamW) -> None:
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


# ---- What every rank of a grid finds out ------------------------------------------------------------------


BAD_NUMBERS = (
    ("raise", "rows", torch.nan),
    ("skip", "whole", torch.nan),
    ("raise", "one", torch.inf),
    ("skip", "columns", -torch.inf),
    ("raise", "scalar", torch.nan),
    ("skip", "split bias", torch.inf),
)


def muon_facts(world: World) -> dict[str, Any]:
    grid = Grid.of(world)
    mixed = SMALL.of_dtype(torch.bfloat16, torch.float32)
    small64 = SMALL.of_dtype(torch.float64)
    outcomes = {
        "ragged": train_sharded(RAGGED, grid),
        "small": train_sharded(SMALL, grid),
        "bf16 and fp32": train_sharded(mixed, grid),
        "float64": train_sharded(small64, grid),
        "one element": train_sharded(TINY, grid),
        "absent": train_sharded(ABSENT, grid),
        "clipped": train_sharded(replace(small64, max_norm=1.5), grid),
        "clipped fp32": train_sharded(replace(SMALL, max_norm=1.5), grid),
        "not clipped": train_sharded(replace(small64, max_norm=1e6), grid),
        "batched": train_sharded(small64, grid, batched=True),
        "poisoned small": train_sharded(SMALL, grid, poisoned=True),
        "poisoned bf16 and fp32": train_sharded(mixed, grid, poisoned=True, max_norm=1e6),
    }
    for size in (1, 30, 10_000):
        outcomes[f"buckets of {size}"] = train_sharded(SMALL, grid, bucket_size=size)
    return {
        "outcomes": outcomes,
        "map": shape_of_map(build(mixed, grid)[1]),
        "pieces of one element": len(list(pieces(build(TINY, grid)[1]))),
        "without gradient": without_gradient(grid),
        "not finite": {(how, name): meet_non_finite(grid, how, name, value) for how, name, value in BAD_NUMBERS},
        "clean": meet_non_finite(grid, "raise", "rows", None),
        "micro-batches": micro_batches(grid),
        "resumed": {
            "fp32": resume(SMALL, grid),
            "bf16": resume(SMALL.of_dtype(torch.bfloat16), grid),
            "fp64": resume(small64, grid),
        },
        "saving alone": save_alone(grid, world),
        "foreign rank": load_foreign(grid, world),
    }


def pieces(optimizer: Zero1AdamW) -> list[Any]:
    return [piece for pieces in optimizer.buffers.pieces.values() for piece in pieces]


def shape_of_map(optimizer: Zero1AdamW) -> dict[str, int]:
    layout = optimizer.buffers.layout
    return {
        "buffers": len(layout.buffers),
        "buckets": len(layout.buckets),
        "padding": sum(bucket.padded - bucket.numel for bucket in layout.buckets),
        "straddling": sum(len(layout.owners(b, i)) > 1 for b in layout.buckets for i in b.params),
    }


def without_gradient(grid: Grid) -> dict[str, Any]:
    """Return which parameters moved, and which have state, after a step in which only "rows" had a gradient."""
    parameters, optimizer = build(SMALL, grid)
    before = values(parameters)
    for w in SMALL.weights[:1]:
        parameters[w.name].grad = torch.ones(w.shape)
    optimizer.step()
    assert optimizer.adamw is not None
    return {
        "moved": [name for name, p in parameters.items() if not torch.equal(p, before[name])],
        "momentum": [name for name, p in parameters.items() if optimizer.state.get(p)],
        "adamw": len(optimizer.adamw.state_dict()["state"]),
    }


def meet_non_finite(grid: Grid, how: str, name: str, value: float | None) -> dict[str, Any]:
    """Step, meet one bad number on the last rank, step again. value: None leaves the bad step out."""
    parameters, optimizer = build(SMALL, grid, on_nonfinite=how)
    give(SMALL, grid, parameters, 0)
    optimizer.step()
    error, before = None, copy.deepcopy((values(parameters), optimizer.state_dict()))
    if value is not None:
        give(SMALL, grid, parameters, 1)
        gradient = parameters[name].grad
        assert gradient is not None
        if grid.world.rank == grid.world.size - 1:
            gradient.view(-1)[-1] = value
        try:
            optimizer.step()
        except NonFiniteGradient as refusal:
            error = str(refusal)
    untouched = same(before, (values(parameters), optimizer.state_dict()))
    give(SMALL, grid, parameters, 2)
    optimizer.step()
    return {
        "error": error,
        "untouched": untouched,
        "skipped": optimizer.skipped_steps,
        "after": (values(parameters), optimizer.state_dict()),
    }


def micro_batches(grid: Grid) -> dict[str, Tensor]:
    """Train a regression on this DP rank's share of 24 rows, one row per backward."""
    parameters = regression_start()
    optimizer = DistributedMuon(regression_groups(parameters), grid, bucket_size=30)
    each = 24 // grid.dp.size
    for step in range(3):
        for row in range(grid.dp.rank * each, (grid.dp.rank + 1) * each):
            (regression_loss(parameters, step, slice(row, row + 1)) / each).backward()
        optimizer.step()
    return values(parameters)


def one_batch() -> dict[str, Tensor]:
    """Train the same regression in one process, all 24 rows in one backward."""
    parameters = regression_start()
    optimizer = DistributedMuon(regression_groups(parameters), Grid.alone())
    for step in range(3):
        regression_loss(parameters, step, slice(None)).backward()
        optimizer.step()
    return values(parameters)


def regression_start() -> dict[str, nn.Parameter]:
    shapes = {"first": (7, 5), "second": (3, 7), "bias": (3,)}
    return {name: nn.Parameter(made_up(name, shape, torch.float64)) for name, shape in shapes.items()}


def regression_groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    *matrices, bias = parameters.items()
    return [{"params": matrices}, {"params": [bias], "algorithm": "adamw"}]


def regression_loss(parameters: dict[str, nn.Parameter], step: int, rows: slice) -> Tensor:
    inputs, targets = (made_up(f"{what} {step}", (24, n), torch.float64)[rows] for what, n in (("x", 5), ("y", 3)))
    outputs = torch.tanh(inputs @ parameters["first"].mT) @ parameters["second"].mT + parameters["bias"]
    return (outputs - targets).square().mean()


def resume(case: Case, grid: Grid) -> bool:
    """Return whether saving, loading into a fresh optimizer and going on equals going on, to the bit."""
    parameters, optimizer = build(case, grid)
    go_on(case, grid, parameters, optimizer, range(2))
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # to be restored too
    file = io.BytesIO()
    torch.save({"model": values(parameters), "optimizer": optimizer.state_dict()}, file)
    go_on(case, grid, parameters, optimizer, range(2, 4))

    others, other = build(case, grid)
    go_on(case, grid, others, other, range(5, 6))  # so that it has a state to lose
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for name, p in others.items():
        p.data.copy_(saved["model"][name])
    other.load_state_dict(saved["optimizer"])
    go_on(case, grid, others, other, range(2, 4))
    return same((values(parameters), optimizer.state_dict()), (values(others), other.state_dict()))


def go_on(
    case: Case, grid: Grid, parameters: dict[str, nn.Parameter], optimizer: Zero1AdamW, steps: Sequence[int]
) -> None:
    for step in steps:
        give(case, grid, parameters, step)
        optimizer.step()


def save_alone(grid: Grid, world: World) -> dict[str, Any]:
    """Let the last rank save while the others go on without it."""
    parameters, optimizer = build(SMALL, grid)
    go_on(SMALL, grid, parameters, optimizer, range(1))
    state = None
    with CollectiveCounter() as counter:
        if world.rank == world.size - 1:
            state = optimizer.state_dict()
    return {"collectives": counter.ledger.total().calls, "state": copy.deepcopy(state)}


def load_foreign(grid: Grid, world: World) -> str | None:
    """Let rank 0 load the state of rank 1; return what it says."""
    parameters, optimizer = build(SMALL, grid)
    go_on(SMALL, grid, parameters, optimizer, range(1))
    states = world.gather(optimizer.state_dict())
    if states is None:
        return None
    before = copy.deepcopy((values(parameters), optimizer.state_dict()))
    try:
        optimizer.load_state_dict(states[1])
    except ValueError as refusal:
        assert same(before, (values(parameters), optimizer.state_dict()))
        return str(refusal)
    return "it was loaded"


def same(a: Any, b: Any) -> bool:
    """Return whether two nested structures are equal, tensors to the bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b


# ---- ZeRO-1 -----------------------------------------------------------------------------------------------


def zero1_facts(world: World) -> dict[str, Any]:
    grid = Grid.of(world)
    cases = {"fp32": ADAMW_ONLY, "one scalar": SINGLE_SCALAR}
    cases |= {name: ADAMW_ONLY.of_dtype(dtype) for name, dtype in (("fp64", torch.float64), ("bf16", torch.bfloat16))}
    return {
        "outcomes": {name: train_sharded(case, grid) for name, case in cases.items()},
        "reduced": reduce_each_bucket(grid),
        "homes": {name: keeps_its_homes(case, grid) for name, case in cases.items()},
        "empty": train_sharded(replace(ADAMW_ONLY, weights=(Weight("empty", (0, 3)), *ADAMW_ONLY.weights)), grid),
    }


def reduce_each_bucket(grid: Grid) -> dict[str, tuple[slice, Tensor]]:
    """Return, per parameter that this rank owns a piece of, where the piece lies and its reduced gradient."""
    parameters, optimizer = build(ADAMW_ONLY, grid)
    give(ADAMW_ONLY, grid, parameters, 0)
    optimizer.accumulator.collect_all()
    for bucket in optimizer.buckets:
        optimizer.reduce_scatter(bucket)
    return {
        optimizer.buffers.names[piece.index]: (piece.meta.range_in_param.as_slice, piece.gradient.clone())
        for piece in pieces(optimizer)
    }


def keeps_its_homes(case: Case, grid: Grid) -> bool:
    """Return whether, after two steps, every parameter is a contiguous view of the flat storage, at its place."""
    parameters, optimizer = build(case, grid)
    go_on(case, grid, parameters, optimizer, range(2))
    return all(
        p.is_contiguous()
        and p.untyped_storage().data_ptr() == optimizer.buffers.flat_parameters[meta.buffer_idx].data_ptr()
        and p.storage_offset() == meta.global_range.start
        for p, meta in zip(optimizer.buffers.parameters, optimizer.buffers.metas, strict=True)
    )
