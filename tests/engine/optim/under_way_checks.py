"""On every rank of 2 x 2: gradients sent under a backward pass, parameters that arrive under a forward."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import io
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
import torch
from checks import check, check_each
from late_wire import late_wire
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.nn.utils import clip_grad_norm_

from distmuon.launch import World
from distmuon.models.networks import MLP
from distmuon.optim import sharded_optimizer
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.overlap import PipelinedMuon
from distmuon.optim.param_groups import split_parameters
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding import arriving
from distmuon.sharding.backward_overlap import BackwardOverlap
from distmuon.sharding.collectives import Group
from distmuon.sharding.consistency import RankMismatchError
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mark, mark_replicated

WIDTH, STEPS, MICRO_BATCHES = 8, 3, 2


class Odd(nn.Module):
    """What makes gradients come at other times, or not at all: see `forward`."""

    def __init__(self, tp: Group, dp_rank: int) -> None:
        super().__init__()
        self.dp_rank = dp_rank
        self.embed = nn.Embedding(12, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, tp)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, tp)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        mark_replicated(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.frozen(x + self.down(F.gelu(self.up(x))))
        if self.dp_rank == 1:
            x = x + self.sometimes(x)
        x = self.twice(F.gelu(self.twice(x)))
        return self.last(x) @ self.embed.weight.T  # tied


VARIANTS: dict[str, tuple[type, dict[str, Any]]] = {
    "AdamW": (Zero1AdamW, {}),
    "owner": (DistributedMuon, {"strategy": "owner", "max_norm": 0.05}),
    "pipelined": (PipelinedMuon, {"strategy": "owner"}),
    "updates": (DistributedMuon, {"strategy": "owner", "publish": "updates"}),
    "gather_all, bf16": (DistributedMuon, {}),
}
Parts = tuple[Odd, Any]


def make(grid: Grid, variant: str, **options: Any) -> Parts:
    torch.manual_seed(0)
    model = Odd(grid.tp, grid.dp.rank)
    if variant.endswith("bf16"):
        model.bfloat16()
    kind, own = VARIANTS[variant]
    groups = list(model.named_parameters()) if kind is Zero1AdamW else split_parameters(model, frozen=True)
    return model, kind(groups, grid, lr=0.01, bucket_size=100, **own, **options)


def losses(model: nn.Module, grid: Grid, step: int) -> list[Callable[[], Tensor]]:
    """Return the micro-batches of a step, each as a call that makes its loss."""
    random = torch.Generator().manual_seed(100 * step + grid.dp.rank)
    batches = [torch.randint(12, (5, 7), generator=random) for _ in range(MICRO_BATCHES)]
    return [lambda b=batch: F.cross_entropy(model(b).flatten(0, 1), b.flatten()) for batch in batches]  # type: ignore[misc]


def take(parts: Parts, grid: Grid, step: int, overlapped: bool) -> int:
    """Take a step; return how many buckets were sent under its backward pass."""
    model, optimizer = parts
    *first, last = losses(model, grid, step)
    for loss in first:
        loss().backward()
    if not overlapped:
        last().backward()
        optimizer.step()
        return 0
    with optimizer.overlap_backward():
        last().backward()
        sent = len(optimizer.buckets) - len(optimizer.waiting_buckets)
    optimizer.step()
    return sent


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have the same parameters, to the bit."""
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@check_each(VARIANTS)
def on_a_late_wire_a_step_ends_to_the_bit_where_one_that_waits_does(world: World, choice: str) -> None:
    grid = Grid.of(world)
    plain, optimizer = parts = make(grid, choice)
    for step in range(STEPS):
        assert take(parts, grid, step, overlapped=False) == 0
    expected = dict(grid.ledger)
    grid.ledger.clear()
    with late_wire():
        model, optimizer = parts = make(grid, choice, overlap_forward=True)
        grid.ledger.clear()
        for step in range(STEPS):
            # `never` and, where it is not used, `sometimes` hold their buckets back to the end of the block
            assert 0 < take(parts, grid, step, overlapped=True) < len(optimizer.buckets)
        assert any(hasattr(p, "arrival") for p in model.parameters())
        assert not any(hasattr(p, "arrival") for p in plain.parameters())
        assert alike(model, plain)
    found = dict(grid.ledger)
    (once_more,) = found.keys() - expected.keys()
    assert once_more.label == "order of the buckets"
    assert {row: n for row, n in found.items() if row is not once_more} == expected


@check
def the_backends_own_reduce_scatter_may_be_late_too(world: World) -> None:
    grid = Grid.of(world)
    grid.dp.native_reduce_scatter = True
    (late, _), (plain, _) = late_parts, plain_parts = make(grid, "owner", overlap_forward=True), make(grid, "owner")
    for step in range(STEPS):
        take(plain_parts, grid, step, overlapped=False)
        with late_wire():
            take(late_parts, grid, step, overlapped=True)
    with late_wire():
        assert alike(late, plain)


@check
def from_the_second_step_on_every_bucket_sets_out_before_the_first_layer_is_through(world: World) -> None:
    grid = Grid.of(world)
    torch.manual_seed(0)
    model = MLP([16] * 10, grid.tp)
    optimizer = DistributedMuon(split_parameters(model), grid, bucket_size=200, strategy="owner")
    waiting: list[int] = []
    first: Any = model.layers[0].weight
    first.register_post_accumulate_grad_hook(lambda p: waiting.append(len(optimizer.waiting_buckets)))
    for step in range(STEPS):
        loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean()
        with optimizer.overlap_backward():
            loss.backward()
        optimizer.step()
    assert max(waiting[1:]) <= 2 < len(optimizer.buckets)


@check
def one_rank_that_overlaps_alone_is_named(world: World) -> None:
    grid = Grid.of(world)
    with pytest.raises(RankMismatchError, match="'overlap_backward' is True on rank"):
        take(make(grid, "owner"), grid, 0, overlapped=grid.dp.rank == 1)


class SendsEarly(BackwardOverlap):
    """Takes a bucket for complete with the first gradient in it."""

    def _arrived(self, index: int) -> None:
        if self._open:
            self._missing[self._bucket_of[index]].clear()
        super()._arrived(index)


@check
def a_bucket_that_is_sent_before_it_is_complete_is_found(world: World) -> None:
    grid = Grid.of(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_optimizer, "BackwardOverlap", SendsEarly)
        with pytest.raises(RuntimeError, match="gets a gradient after those of its bucket were sent"):
            take(make(grid, "AdamW"), grid, 0, overlapped=True)


@check
def a_grad_scaler_may_leave_its_scale_to_the_step(world: World) -> None:
    grid, ends = Grid.of(world), []
    for overlapped in (False, True):
        model, optimizer = make(grid, "owner")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(2):
            loss = scaler.scale(losses(model, grid, step)[0]())
            with optimizer.overlap_backward() if overlapped else contextlib.nullcontext():
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append(model)
    assert alike(*ends)


def fail(gradient: Tensor) -> Tensor:
    raise ArithmeticError("in the middle of a backward pass")


@check_each(["dropped", "failed"])
def a_pass_that_came_to_nothing_leaves_nothing(world: World, choice: str) -> None:
    grid = Grid.of(world)
    expected, plain = make(grid, "owner")
    losses(expected, grid, 0)[0]().backward()
    plain.step()
    model, optimizer = make(grid, "owner")
    other, loss = losses(model, grid, 5)[0], losses(model, grid, 0)[0]
    handle = model.up.weight.register_hook(fail if choice == "failed" else lambda gradient: None)
    with contextlib.suppress(ArithmeticError), optimizer.overlap_backward():
        other().backward()
    handle.remove()
    optimizer.zero_grad()
    with optimizer.overlap_backward():
        loss().backward()
    optimizer.step()
    assert alike(model, expected)


# ---- What comes too late for gradients that were sent ------------------------------------------------------


def again(model: nn.Module, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    loss().backward()


def nested(model: nn.Module, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    with optimizer.overlap_backward():
        loss().backward()


def clipped_by_torch(model: nn.Module, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def unscaled(model: nn.Module, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def dropped_by_the_model(model: Any, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    model.zero_grad()
    optimizer.step()


def dropped_inside(model: nn.Module, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    with optimizer.overlap_backward():
        optimizer.zero_grad()  # which is fine as yet
        loss().backward()
        optimizer.zero_grad()


def clipped_before(model: Any, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    optimizer.clip_grad_norm_(1.0)
    nested(model, optimizer, loss)


def added_on_one_rank(model: Any, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    """One rank alone changes a gradient: all of them hear of it, or it would be a hang."""
    if model.dp_rank == 1:
        model.last.weight.grad.add_(1)
    optimizer.step()


CHANGED = "was changed after it had been sent under the backward pass; clip with max_norm"
REFUSED: dict[str, tuple[Callable[[Any, Any, Any], None], str]] = {
    "again": (again, "gets a gradient after those of its bucket were sent; put only the last backward pass"),
    "nested": (nested, "have been sent already; overlap_backward() is for its last backward pass alone"),
    "clipped by torch": (clipped_by_torch, CHANGED),
    "unscaled": (unscaled, CHANGED),
    "dropped by the model": (dropped_by_the_model, CHANGED),
    "clipped before": (clipped_before, "of this step are clipped already; call step() or zero_grad() next"),
    "dropped inside": (dropped_inside, "are being sent; leave the block of overlap_backward() before zero_grad()"),
    "added on one rank": (added_on_one_rank, CHANGED),
}


@check_each(REFUSED)
def what_comes_too_late_is_refused_on_all_ranks_and_changes_nothing(world: World, choice: str) -> None:
    grid, (fault, words) = Grid.of(world), REFUSED[choice]
    (model, optimizer), (honest, _) = parts, others = make(grid, "owner"), make(grid, "owner")
    *_, loss = losses(model, grid, 0)
    with optimizer.overlap_backward():
        loss().backward()
    with pytest.raises((RuntimeError, ValueError), match=re.escape(words)):
        fault(model, optimizer, loss)
    assert alike(model, honest)
    optimizer.zero_grad()
    for each in (parts, others):
        take(each, grid, 0, overlapped=True)
    assert alike(model, honest)


# ---- Parameters that are read before they have arrived -----------------------------------------------------


def arrays(p: Any) -> Tensor:
    return torch.from_numpy(numpy.asarray(p.detach()))


def saved(p: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def summed(p: Any) -> Tensor:
    return torch._foreach_add([p.detach() * 0], [p])[0]


def pointed(p: Any) -> Tensor:
    memory = (ctypes.c_float * p.numel()).from_address(p.data_ptr())
    return torch.tensor(list(memory)).view(p.shape)


def written(p: Any) -> Tensor:
    with torch.no_grad():
        p.add_(1)
        p.sub_(1)
    return p


READS: Mapping[str, Callable[[Any], Tensor]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone(),
    "deepcopy": copy.deepcopy,
    "numpy": arrays,
    "view": lambda p: p.view(-1).view(p.shape),
    "product": lambda p: torch.eye(len(p)) @ p,
    "linear": lambda p: F.linear(torch.eye(p.shape[1]), p).T,
    "out": lambda p: torch.add(torch.zeros(()), p.detach(), out=torch.empty(p.shape)),
    "foreach": summed,
    "saved": saved,
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "written": written,
    "pickled": lambda p: pickle.loads(pickle.dumps(p)),
    "storage": lambda p: torch.empty(0).set_(p.untyped_storage(), p.storage_offset(), p.shape, p.stride()),
    "pointer": pointed,
}
ASKS: Mapping[str, Callable[[Any], object]] = {
    "shape": lambda p: tuple(p.shape),
    "dtype": lambda p: p.dtype,
    "grad": lambda p: p.grad,
    "requires_grad": lambda p: p.requires_grad,
    "hash": lambda p: {p: True}[p],
    "is a parameter": lambda p: isinstance(p, nn.Parameter),
    "in its module": lambda p: p.device.type,
}


def after_a_step(grid: Grid) -> tuple[Odd, Odd, Any]:
    """Return a model whose parameters may still be on their way, one where they have arrived, and its optimizer."""
    expected = make(grid, "owner")
    take(expected, grid, 0, overlapped=False)
    model, optimizer = parts = make(grid, "owner", overlap_forward=True)
    take(parts, grid, 0, overlapped=False)
    return model, expected[0], optimizer


@check_each(READS)
def whoever_reads_a_parameter_gets_it_when_it_is_there(world: World, choice: str) -> None:
    """On a wire where it is NaN until somebody waits."""
    with late_wire():
        model, expected, _ = after_a_step(Grid.of(world))
        assert hasattr(model.up.weight, "arrival")
        value = READS[choice](model.up.weight)
        assert type(model.up.weight) is nn.Parameter
        assert not hasattr(model.up.weight, "arrival")
        assert torch.equal(value, expected.up.weight)


@check_each(["traced", "scripted", "inside another"])
def a_traced_or_scripted_module_waits_when_it_is_called(world: World, choice: str) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), torch.ones(2, WIDTH)
    for p in model.parameters():
        mark(p, None)
    optimizer = DistributedMuon(split_parameters(model), Grid.of(world), overlap_forward=True, bucket_size=100)
    script: Any = torch.jit.script(model) if choice == "scripted" else torch.jit.trace(model, batch)
    whole = nn.Sequential(script, nn.Identity()) if choice == "inside another" else script
    while gc.collect():  # buckets of other checks, for which nobody has waited
        pass
    model(batch).square().sum().backward()
    with late_wire():
        optimizer.step()
        assert len(optimizer.arriving_buckets) > 1
        found = whole(batch)
        assert not optimizer.arriving_buckets
        assert torch.equal(found, model(batch))
        assert not _global_forward_pre_hooks


@check
def what_needs_no_values_waits_for_none_and_after_the_wait_all_are_ordinary(world: World) -> None:
    with late_wire():
        model, expected, optimizer = after_a_step(Grid.of(world))
        for name, ask in ASKS.items():
            assert ask(model.up.weight) == ask(expected.up.weight), name
            assert hasattr(model.up.weight, "arrival"), name
        optimizer.state_dict()
        optimizer.wait_for_parameters()
        assert not any(hasattr(p, "arrival") for p in model.parameters())
        assert alike(model, expected)


@check
def a_wire_that_is_late_would_show_who_does_not_wait(world: World) -> None:
    with late_wire(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(arriving, "_arriving", lambda kind: kind)
        model, expected, optimizer = after_a_step(Grid.of(world))
        torn, by_rank = not torch.equal(model.up.weight.detach(), expected.up.weight), [False] * world.size
        optimizer.wait_for_parameters()
    torch.distributed.all_gather_object(by_rank, torn)
    assert by_rank.count(True) == 2, by_rank  # a TP rank's owner has it


@check
def a_world_ends_where_nobody_waits(world: World) -> None:
    take(make(Grid.of(world), "owner", overlap_forward=True), Grid.of(world), 0, overlapped=False)
