"""DistributedMuon and Zero1AdamW on every rank of a grid: equal to one process to the bit, through every bad day."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import optimizer_cases as cases
import pytest
import torch
import torch.distributed as dist
from checks import check, check_each
from optimizer_cases import (
    ABSENT_ROWS,
    ADAMW_ONLY,
    MATRICES,
    RAGGED,
    SINGLE_SCALAR,
    SMALL,
    TINY,
    Case,
    Outcome,
    Weight,
    build,
    give,
    go_on,
    restore,
    saved,
    train_sharded,
    values,
)
from torch import Tensor

from distmuon.launch import World
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.sharding.gradients import NonFiniteGradient
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import FLAT
from distmuon.verify.counter import CollectiveCounter
from muon_conformance.reference import distance

MIXED = SMALL.of_dtype(torch.bfloat16, torch.float32)
FLOAT64 = SMALL.of_dtype(torch.float64)
CASES = {
    "small": SMALL,
    "ragged": RAGGED,
    "bf16 and fp32": MIXED,
    "absent": ABSENT_ROWS,
    "one element": TINY,
    "matrices": MATRICES,
    "float64": FLOAT64,
    "clipped": replace(FLOAT64, max_norm=1.5),
    "AdamW": ADAMW_ONLY,
    "AdamW, bf16": ADAMW_ONLY.of_dtype(torch.bfloat16),
    "AdamW, one scalar": SINGLE_SCALAR,
}
WAVES = {"strategy": "gather_cut", "bucket_size": FLAT}
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {  # what ends to the bit where one process does -> the case, and how
    **{
        f"{strategy} {case}": (case, {"strategy": strategy})
        for strategy in ("gather_all", "gather_cut", "owner")
        for case in ("ragged", "bf16 and fp32", "absent", "one element")
    },
    **{case: (case, {}) for case in CASES if case.startswith("AdamW")},
    "in waves": ("ragged", WAVES),
    "publishing updates": ("absent", {"strategy": "owner", "publish": "updates"}),
    "publishing updates, in waves": ("matrices", WAVES | {"publish": "updates"}),
    "small buckets": ("small", {"bucket_size": 1}),
    "one bucket": ("small", {"bucket_size": 10_000}),
    "owner, small buckets": ("small", {"bucket_size": 1, "strategy": "owner"}),
    "not clipped": ("float64", {"max_norm": 1e6}),
    "poisoned": ("bf16 and fp32", {"poisoned": True, "max_norm": 1e6}),  # in padding, and what is gathered for nobody
}


# ---- Equal to one process ---------------------------------------------------------------------------------


@functools.cache
def alone(case: str, dp: int, tp: int) -> Outcome:
    """Return how training ends in one process, which is every rank for itself."""
    no_world: Any = None
    return cases.train_alone(no_world, CASES[case], dp, tp)


def mine(case: str, grid: Grid) -> dict[str, Tensor]:
    """Return this rank's slices of where training in one process ends."""
    whole = alone(case, grid.dp.size, grid.tp.size).values
    return {w.name: cases.cut(whole[w.name], w.dim, grid.tp.size, grid.tp.rank) for w in CASES[case].weights}


def different(outcome: Outcome, expected: Mapping[str, Tensor]) -> set[str]:
    return {name for name, value in expected.items() if not torch.equal(outcome.values[name], value)}


def furthest(outcome: Outcome, expected: Mapping[str, Tensor]) -> float:
    """Return the largest relative difference of any parameter."""
    return max(distance(outcome.values[name], value) for name, value in expected.items())


@check_each(EQUAL)
def every_rank_ends_to_the_bit_where_one_process_does(world: World, choice: str) -> None:
    grid, (case, options) = Grid.of(world), EQUAL[choice]
    outcome = train_sharded(CASES[case], grid, **options)
    assert different(outcome, mine(case, grid)) == set()
    assert all(math.isfinite(norm) for norm in outcome.norms)
    end = alone(case, grid.dp.size, grid.tp.size).values
    still = {w.name for w in CASES[case].weights if torch.equal(end[w.name], cases.whole_start(w, grid.tp.size))}
    assert still == ({"other rows"} if case == "absent" else set())  # what never has a gradient does not even decay


@check
def blockwise_is_muon_on_all_that_tp_does_not_cut_and_on_nothing_else(world: World) -> None:
    grid = Grid.of(world)
    cut = {w.name for w in SMALL.weights if w.dim is not None and len(w.shape) == 2}
    found = different(train_sharded(SMALL, grid, strategy="blockwise"), mine("small", grid))
    assert found == (cut if grid.tp.size > 1 else set())


@check
def batching_equal_shapes_changes_no_more_than_rounding(world: World) -> None:
    grid = Grid.of(world)
    assert furthest(train_sharded(FLOAT64, grid, batched=True), mine("float64", grid)) < 1e-12


@check
def an_empty_parameter_is_no_obstacle(world: World) -> None:
    grid = Grid.of(world)
    case = replace(ADAMW_ONLY, weights=(Weight("empty", (0, 3)), *ADAMW_ONLY.weights))
    outcome = train_sharded(case, grid)
    assert outcome.values["empty"].shape == (0, 3)
    assert different(outcome, mine("AdamW", grid)) == set()


@check
def clipping_equals_torchs_on_the_whole_gradients(world: World) -> None:
    grid = Grid.of(world)
    expected, free = (alone(case, grid.dp.size, grid.tp.size) for case in ("clipped", "float64"))
    assert all(norm > 1.5 for norm in expected.norms)
    for name in ("table", "rows"):  # clipping that forgot an algorithm would leave its parameters here
        assert distance(expected.values[name], free.values[name]) > 1e-6
    outcome = train_sharded(CASES["clipped"], grid)
    assert furthest(outcome, mine("clipped", grid)) < 1e-12
    in_float32 = train_sharded(replace(SMALL, max_norm=1.5), grid)
    for found, tolerance in ((outcome, 1e-14), (in_float32, 1e-6)):
        assert found.norms == pytest.approx(expected.norms, rel=tolerance)
        by_rank = [found.norms] * world.size
        dist.all_gather_object(by_rank, found.norms)
        assert by_rank == [found.norms] * world.size  # to the bit: all ranks clip alike


@check
def these_cases_hold_what_is_hard(world: World) -> None:
    grid = Grid.of(world)
    layout = build(MIXED, grid)[1].buffers.layout
    assert len(layout.buffers) == 2
    assert len(layout.buckets) >= 4
    assert any(bucket.padded > bucket.numel for bucket in layout.buckets)
    assert sum(len(layout.owners(b, i)) > 1 for b in layout.buckets for i in b.params) >= 3
    owned = pieces(build(TINY, grid)[1])
    assert len(owned) == (grid.dp.rank == 0)  # more ranks than elements: the others own nothing


def pieces(optimizer: ShardedOptimizer) -> list[Any]:
    return [piece for pieces in optimizer.buffers.pieces.values() for piece in pieces]


@check
def a_shards_gradient_is_the_mean_in_rank_order_to_the_bit(world: World) -> None:
    grid = Grid.of(world)
    parameters, optimizer = build(ADAMW_ONLY, grid)
    give(ADAMW_ONLY, grid, parameters, 0)
    optimizer.gradient_views.collect(range(len(optimizer.buffers.parameters)))
    for bucket in optimizer.buckets:
        optimizer.reduce_scatter(bucket)
    weights = {w.name: w for w in ADAMW_ONLY.weights}
    owned, backwards = dict.fromkeys(weights, 0), []
    for piece in pieces(optimizer):
        w, place = weights[optimizer.buffers.names[piece.index]], piece.meta.range_in_param.as_slice
        copies = [cases.whole_gradient(ADAMW_ONLY, w, grid.tp.size, 0, r) for r in range(grid.dp.size)]
        slices = [cases.cut(c, w.dim, grid.tp.size, grid.tp.rank).flatten()[place] for c in copies if c is not None]
        assert torch.equal(piece.gradient, functools.reduce(torch.add, slices) / grid.dp.size), w.name
        backwards.append(torch.equal(piece.gradient, functools.reduce(torch.add, slices[::-1]) / grid.dp.size))
        owned[w.name] += len(piece.gradient)
    assert all(backwards) == (grid.dp.size == 2)  # the order can be seen in the bits, from three ranks on
    by_rank = [owned] * world.size
    dist.all_gather_object(by_rank, owned)
    for w in ADAMW_ONLY.weights:
        assert sum(of[w.name] for of in by_rank) == grid.tp.size * math.prod(w.shape)


@check
def parameters_stay_in_the_flat_storage(world: World) -> None:
    for case in ("AdamW", "AdamW, bf16"):
        parameters, optimizer = build(CASES[case], Grid.of(world))
        go_on(CASES[case], Grid.of(world), parameters, optimizer, range(2))
        flats = optimizer.buffers.flat_parameters
        for p, meta in zip(optimizer.buffers.parameters, optimizer.buffers.metas, strict=True):
            assert p.is_contiguous()
            assert p.data_ptr() == flats[meta.buffer_idx][meta.global_range.start :].data_ptr()


# ---- Gradients that are not there, or not finite ----------------------------------------------------------


@check
def where_nobody_has_a_gradient_nothing_moves_and_no_state_is_made(world: World) -> None:
    parameters, optimizer = build(SMALL, Grid.of(world))
    before = values(parameters)
    parameters["rows"].grad = torch.ones(SMALL.weights[0].shape)
    optimizer.step()
    assert [name for name, p in parameters.items() if not torch.equal(p, before[name])] == ["rows"]
    assert {name for name, p in parameters.items() if optimizer.state.get(p)} <= {"rows"}


BAD_NUMBERS = {
    "raise, NaN in rows": ("raise", "rows", torch.nan),
    "skip, minus infinity in columns": ("skip", "columns", -torch.inf),
    "raise, NaN in scalar": ("raise", "scalar", torch.nan),
    "skip, infinity in split bias": ("skip", "split bias", torch.inf),
}


@check_each(BAD_NUMBERS)
def one_bad_number_on_one_rank_stops_the_step_on_all(world: World, choice: str) -> None:
    how, name, number = BAD_NUMBERS[choice]
    grid, ends = Grid.of(world), []
    for meets in (True, False):
        parameters, optimizer = build(SMALL, grid, on_nonfinite=how)
        go_on(SMALL, grid, parameters, optimizer, [0])
        if meets:
            give(SMALL, grid, parameters, 1)
            gradient = parameters[name].grad
            assert gradient is not None
            if world.rank == world.size - 1:
                gradient.view(-1)[-1] = number
            before = copy.deepcopy((values(parameters), optimizer.state_dict()))
            if how == "skip":
                optimizer.step()
            else:
                with pytest.raises(NonFiniteGradient, match=f"the gradient of {name} is not finite, or its square"):
                    optimizer.step()
            assert same(before, (values(parameters), optimizer.state_dict()))
            assert optimizer.skipped_steps == (how == "skip")
        go_on(SMALL, grid, parameters, optimizer, [2])
        ends.append((values(parameters), optimizer.state_dict()))
    assert same(*ends)  # as if the bad step had never been


# ---- Saving and loading -----------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Return whether two nested structures are equal, tensors to the bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b


RESUMED: dict[str, tuple[Case, dict[str, Any]]] = {
    "gather_all, float64": (FLOAT64, {}),
    "owner, bf16 and rows": (replace(MIXED, groups=ABSENT_ROWS.groups), {"strategy": "owner"}),
}


@check_each(RESUMED)
def a_saved_run_goes_on_to_the_bit(world: World, choice: str) -> None:
    grid, (case, options) = Grid.of(world), RESUMED[choice]
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
    assert same((values(parameters), optimizer.state_dict()), (values(others), other.state_dict()))


@check
def one_rank_can_save_alone_and_its_state_is_refused_elsewhere(world: World) -> None:
    grid = Grid.of(world)
    parameters, optimizer = build(SMALL, grid)
    go_on(SMALL, grid, parameters, optimizer, range(1))
    if world.rank == 1:
        with CollectiveCounter() as counter:
            state = copy.deepcopy(optimizer.state_dict())
        assert counter.ledger.total().calls == 0
        assert state["place"]["rank"] == (grid.dp.rank, grid.tp.rank)
        _, elsewhere = build(SMALL, Grid.alone())
        with pytest.raises(ValueError, match=r"it has another grid: \(\d, \d\) instead of \(1, 1\); load it"):
            elsewhere.load_state_dict(state)
    states = world.gather(optimizer.state_dict())
    if states is not None:  # on rank 0
        before = copy.deepcopy((values(parameters), optimizer.state_dict()))
        with pytest.raises(ValueError, match=r"another rank: \(\d, \d\) instead of \(0, 0\); load it"):
            optimizer.load_state_dict(states[1])
        assert same(before, (values(parameters), optimizer.state_dict()))
