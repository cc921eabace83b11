"""What every rank finds out about gradients sent under a backward pass and parameters that arrive under a forward."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
import torch
from late_wire import late_wire
from torch import Tensor, nn
from torch.nn import functional as F
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
from distmuon.sharding.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mark_replicated

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


def train(grid: Grid, variant: str, overlapped: bool, **options: Any) -> dict[str, Any]:
    model, optimizer = make(grid, variant, **options)
    grid.ledger.clear()
    sent = [take((model, optimizer), grid, step, overlapped) for step in range(STEPS)]
    arriving_after = sum(hasattr(p, "arrival") for p in model.parameters())
    return {
        "sent": sent,
        "arriving": arriving_after,
        "buckets": len(optimizer.buckets),
        "ledger": dict(grid.ledger),
        "values": {name: p.detach().clone() for name, p in model.named_parameters()},
    }


def sent_when_the_first_layer_comes(grid: Grid) -> list[tuple[int, int]]:
    """Return, of each step of an even MLP: (buckets sent when its first layer's gradients come, all buckets)."""
    torch.manual_seed(0)
    model = MLP([16] * 10, grid.tp)
    optimizer = DistributedMuon(split_parameters(model), grid, bucket_size=200, strategy="owner")
    found: list[tuple[int, int]] = []
    first: Any = model.layers[0].weight
    first.register_post_accumulate_grad_hook(
        lambda p: found.append((len(optimizer.buckets) - len(optimizer.waiting_buckets), len(optimizer.buckets)))
    )
    for step in range(STEPS):
        loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean()
        with optimizer.overlap_backward():
            loss.backward()
        optimizer.step()
    return found


def one_rank_overlaps(grid: Grid) -> str:
    """Return what all ranks are told when one of them alone sends gradients early."""
    model, optimizer = make(grid, "owner")
    try:
        take((model, optimizer), grid, 0, overlapped=grid.dp.rank == 1)
    except RankMismatchError as error:
        return str(error)
    return ""


class SendsEarly(BackwardOverlap):
    """Takes a bucket for complete with the first gradient in it."""

    def _arrived(self, index: int) -> None:
        if self._open:
            self._missing[self._bucket_of[index]].clear()
        super()._arrived(index)


def sends_early(grid: Grid) -> str:
    """Return what such an optimizer is told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_optimizer, "BackwardOverlap", SendsEarly)
        try:
            train(grid, "AdamW", True)
        except RuntimeError as error:
            return str(error)
    return ""


def under_way_facts(world: World) -> dict[str, Any]:
    grid = Grid.of(world)
    found: dict[str, Any] = {"plain": {}, "overlapped": {}}
    for variant in VARIANTS:
        found["plain"][variant] = train(grid, variant, False)
        with late_wire():
            found["overlapped"][variant] = train(grid, variant, True, overlap_forward=True)
    native = Grid.of(world)
    native.dp.native_reduce_scatter = True
    with late_wire():
        found["native"] = train(native, "owner", True, overlap_forward=True), train(native, "owner", False)
    return found | {
        "refusals": refusals(grid),
        "dropped": dropped(grid),
        "scaled": scaled(grid),
        "early": sends_early(grid),
        "one rank": one_rank_overlaps(grid),
        "first layer": sent_when_the_first_layer_comes(grid),
    }


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


REFUSED = [again, nested, clipped_by_torch, unscaled, dropped_by_the_model, clipped_before]
REFUSED += [dropped_inside, added_on_one_rank]


def refusals(grid: Grid) -> dict[str, tuple[str, bool]]:
    """Return what each is told, and whether parameters are as they were and the next step goes on."""
    found = {}
    for fault in REFUSED:
        model, optimizer = parts = make(grid, "owner")
        before = [p.detach().clone() for p in model.parameters()]
        *_, loss = losses(model, grid, 0)
        with optimizer.overlap_backward():
            loss().backward()
        words = ""
        try:
            fault(model, optimizer, loss)
        except Exception as error:
            words = str(error)
        same = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        optimizer.zero_grad()
        honest = make(grid, "owner")
        for each in (parts, honest):
            take(each, grid, 0, overlapped=True)
        goes_on = alike(model, honest[0])
        found[fault.__name__] = words, same and goes_on
    return found


def dropped(grid: Grid) -> dict[str, bool]:
    """Return whether a step is as if a pass that was dropped, or failed, had not been."""
    expected = make(grid, "owner")
    losses(expected[0], grid, 0)[0]().backward()
    expected[1].step()
    found = {}
    for how in ("after", "failed"):
        model, optimizer = make(grid, "owner")
        other, loss = losses(model, grid, 5)[0], losses(model, grid, 0)[0]
        handle = model.up.weight.register_hook(fail if how == "failed" else lambda gradient: None)
        with contextlib.suppress(ArithmeticError), optimizer.overlap_backward():
            other().backward()
        handle.remove()
        optimizer.zero_grad()
        with optimizer.overlap_backward():
            loss().backward()
        optimizer.step()
        found[how] = alike(model, expected[0])
    return found


def fail(gradient: Tensor) -> Tensor:
    raise ArithmeticError("in the middle of a backward pass")


def scaled(grid: Grid) -> bool:
    """Return whether a GradScaler that hands its scale to `step` changes nothing but the scale."""
    found = []
    for overlapped in (False, True):
        model, optimizer = make(grid, "owner")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(2):
            loss = scaler.scale(losses(model, grid, step)[0]())
            if overlapped:
                with optimizer.overlap_backward():
                    loss.backward()
            else:
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
        found.append([p.detach().clone() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


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


def reading_facts(world: World) -> dict[str, Any]:
    """Read parameters that have not arrived, on a wire where they are NaN until somebody waits."""
    grid = Grid.of(world)
    found: dict[str, Any] = {"read": {}, "asked": {}}
    expected = make(grid, "owner")
    take(expected, grid, 0, overlapped=False)
    with late_wire():
        for name, read in READS.items():
            model, optimizer = parts = make(grid, "owner", overlap_forward=True)
            take(parts, grid, 0, overlapped=False)
            there = hasattr(model.up.weight, "arrival")
            value = read(model.up.weight)
            plain = type(model.up.weight) is nn.Parameter and not hasattr(model.up.weight, "arrival")
            found["read"][name] = there, plain, torch.equal(value, expected[0].up.weight)
        model, optimizer = parts = make(grid, "owner", overlap_forward=True)
        take(parts, grid, 0, overlapped=False)
        for name, ask in ASKS.items():
            answer = ask(model.up.weight)
            found["asked"][name] = hasattr(model.up.weight, "arrival"), answer == ask(expected[0].up.weight)
        state = optimizer.state_dict()
        optimizer.wait_for_parameters()
        found["left"] = [name for name, p in model.named_parameters() if hasattr(p, "arrival")]
        found["state"] = str(state) == str(expected[1].state_dict())
        found["torn"] = torn(grid, expected[0])
    take(make(grid, "owner", overlap_forward=True), grid, 0, overlapped=False)  # and nobody waits: the world ends
    return found


def torn(grid: Grid, expected: Odd) -> bool:
    """Return whether a read would be wrong if nothing waited for it."""
    honest = arriving._arriving
    arriving._arriving = lambda kind: kind  # type: ignore[assignment]
    try:
        model, optimizer = parts = make(grid, "owner", overlap_forward=True)
        take(parts, grid, 0, overlapped=False)
        found = not torch.equal(model.up.weight.detach(), expected.up.weight)
        optimizer.wait_for_parameters()
        return found
    finally:
        arriving._arriving = honest
