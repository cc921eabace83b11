"""What every rank of a grid finds out about the sharded optimizers: one world, many facts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from optimizer_cases import (
    ABSENT_ROWS,
    ADAMW_ONLY,
    MATRICES,
    RAGGED,
    SINGLE_SCALAR,
    SMALL,
    TINY,
    Case,
    Weight,
    build,
    give,
    go_on,
    restore,
    saved,
    synthetic,
    train_sharded,
    values,
)
from torch import Tensor, nn

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.sharding.gradients import NonFiniteGradient
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import FLAT
from distmuon.sharding.tensor_parallel import mark
from distmuon.verify.counter import CollectiveCounter

# ---- Distributed Muon -------------------------------------------------------------------------------------


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
        "matrices": train_sharded(MATRICES, grid),
        "absent": train_sharded(ABSENT_ROWS, grid),
        "clipped": train_sharded(replace(small64, max_norm=1.5), grid),
        "clipped fp32": train_sharded(replace(SMALL, max_norm=1.5), grid),
        "not clipped": train_sharded(replace(small64, max_norm=1e6), grid),
        "batched": train_sharded(small64, grid, batched=True),
        "poisoned small": train_sharded(SMALL, grid, poisoned=True),
        "poisoned bf16 and fp32": train_sharded(mixed, grid, poisoned=True, max_norm=1e6),
    }
    for size in (1, 30, 10_000):
        outcomes[f"buckets of {size}"] = train_sharded(SMALL, grid, bucket_size=size)
        outcomes[f"owner, buckets of {size}"] = train_sharded(SMALL, grid, bucket_size=size, strategy="owner")
    for name, case in {"small": SMALL, "float64": small64, "absent": ABSENT_ROWS}.items():
        outcomes[f"updates {name}"] = train_sharded(case, grid, strategy="owner", publish="updates")
    waves: dict[str, Any] = {"strategy": "gather_cut", "bucket_size": FLAT}
    outcomes["updates in waves of matrices"] = train_sharded(MATRICES, grid, publish="updates", **waves)
    outcomes["gather_cut ragged, one bucket"] = train_sharded(RAGGED, grid, **waves)
    outcomes["blockwise small"] = train_sharded(SMALL, grid, strategy="blockwise")
    for strategy in ("gather_cut", "owner"):
        outcomes[f"{strategy} ragged"] = train_sharded(RAGGED, grid, strategy=strategy)
        outcomes[f"{strategy} small"] = train_sharded(SMALL, grid, strategy=strategy)
        outcomes[f"{strategy} bf16 and fp32"] = train_sharded(mixed, grid, strategy=strategy)
        outcomes[f"{strategy} float64"] = train_sharded(small64, grid, strategy=strategy)
        outcomes[f"{strategy} one element"] = train_sharded(TINY, grid, strategy=strategy)
        outcomes[f"{strategy} matrices"] = train_sharded(MATRICES, grid, strategy=strategy)
        outcomes[f"{strategy} absent"] = train_sharded(ABSENT_ROWS, grid, strategy=strategy)
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
            "owner": resume(mixed, grid, strategy="owner"),
            "rows": resume(ABSENT_ROWS, grid),
            "rows, owner": resume(replace(ABSENT_ROWS, weights=mixed.weights), grid, strategy="owner"),
        },
        "saving alone": save_alone(grid, world),
        "foreign rank": load_foreign(grid, world),
    }


def pieces(optimizer: ShardedOptimizer) -> list[Any]:
    return [piece for pieces in optimizer.buffers.pieces.values() for piece in pieces]


def shape_of_map(optimizer: ShardedOptimizer) -> dict[str, int]:
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
    return {
        "moved": [name for name, p in parameters.items() if not torch.equal(p, before[name])],
        "momentum": [name for name, p in parameters.items() if optimizer.state.get(p)],
        "adamw": sum("exp_avg" in optimizer.state[p] for p in parameters.values() if p in optimizer.state),
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
    optimizer = DistributedMuon(regression_groups(parameters), grid, lr=0.02, bucket_size=30)
    each = 24 // grid.dp.size
    for step in range(3):
        for row in range(grid.dp.rank * each, (grid.dp.rank + 1) * each):
            (regression_loss(parameters, step, slice(row, row + 1)) / each).backward()
        optimizer.step()
    return values(parameters)


def one_batch() -> dict[str, Tensor]:
    """Train the same regression in one process, all 24 rows in one backward."""
    parameters = regression_start()
    optimizer = DistributedMuon(regression_groups(parameters), Grid.alone(), lr=0.02)
    for step in range(3):
        regression_loss(parameters, step, slice(None)).backward()
        optimizer.step()
    return values(parameters)


def regression_start() -> dict[str, nn.Parameter]:
    shapes = {"first": (7, 5), "second": (3, 7), "bias": (3,)}
    return {name: mark(nn.Parameter(synthetic(name, shape, torch.float64)), None) for name, shape in shapes.items()}


def regression_groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    *matrices, bias = parameters.items()
    return [{"params": matrices}, {"params": [bias], "algorithm": "adamw"}]


def regression_loss(parameters: dict[str, nn.Parameter], step: int, rows: slice) -> Tensor:
    inputs, targets = (synthetic(f"{what} {step}", (24, n), torch.float64)[rows] for what, n in (("x", 5), ("y", 3)))
    outputs = torch.tanh(inputs @ parameters["first"].mT) @ parameters["second"].mT + parameters["bias"]
    return (outputs - targets).square().mean()


def resume(case: Case, grid: Grid, **options: Any) -> bool:
    """Return whether saving, loading into a fresh optimizer and going on equals going on, to the bit."""
    parameters, optimizer = build(case, grid, **options)
    go_on(case, grid, parameters, optimizer, range(2))
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # to be restored too
    file = saved(parameters, optimizer)
    go_on(case, grid, parameters, optimizer, range(2, 4))

    others, other = build(case, grid, **options)
    go_on(case, grid, others, other, range(5, 6))  # so that it has a state to lose
    restore(file, others, other)
    go_on(case, grid, others, other, range(2, 4))
    return same((values(parameters), optimizer.state_dict()), (values(others), other.state_dict()))


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
    optimizer.gradient_views.collect(range(len(optimizer.buffers.parameters)))
    for bucket in optimizer.buckets:
        optimizer.reduce_scatter(bucket)
    return {
        optimizer.buffers.names[piece.index]: (piece.meta.range_in_param.as_slice, piece.gradient.clone())
        for piece in pieces(optimizer)
    }


def keeps_its_homes(case: Case, grid: Grid) -> bool:
    """Return whether, after two steps, every parameter lies contiguous at its place in the flat storage's memory."""
    parameters, optimizer = build(case, grid)
    go_on(case, grid, parameters, optimizer, range(2))
    flats = optimizer.buffers.flat_parameters
    return all(
        p.is_contiguous() and p.data_ptr() == flats[meta.buffer_idx][meta.global_range.start :].data_ptr()
        for p, meta in zip(optimizer.buffers.parameters, optimizer.buffers.metas, strict=True)
        if p.numel()
    )
