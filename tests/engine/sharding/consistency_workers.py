"""What the ranks of a grid hear from each other when some of them hold something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.launch import World
from distmuon.sharding import consistency
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger

LINES = [
    ("optimizer", "DistributedMuon"),
    ("bucket_size", "60"),
    ("rows", "3x5 float32, cut over TP along 0, muon lr=0.02"),
    ("whole", "5x4 bfloat16, muon lr=0.02"),
    ("bias", "7 float32, adamw lr=0.01"),
]


def changed(name: str, old: str, new: str) -> list[tuple[str, str]]:
    return [(n, d.replace(old, new) if n == name else d) for n, d in LINES]


OTHER_LINES = {
    "shape": changed("rows", "3x5", "3x6"),
    "lr": changed("bias", "0.01", "0.1"),
    "order": [*LINES[:2], LINES[3], LINES[2], LINES[4]],
    "missing": [*LINES[:3], LINES[4]],
    "extra": [*LINES[:4], ("Größe", "1 float32"), LINES[4]],
    "extra at the end": [*LINES, ("head", "1x1 float32")],
    "none at all": [],
    "far more": LINES[:2] + [(f"layers.{i}.weight", "64x64 float32") for i in range(3000)],
}


class Parameters(NamedTuple):
    """One rank's slices: leaves as a model has them, each in another way of lying in memory."""

    names: list[str]
    tensors: list[Tensor]
    replicated: list[bool]
    storage: Tensor


def parameters(column: int, seed: int = 0, whole_seed: int = 0) -> Parameters:
    """Return what a rank of TP rank `column` holds. seeds: of all values, and of those that are whole over TP."""
    numbers = torch.Generator().manual_seed(1000 * seed + column)
    numbers_alike = torch.Generator().manual_seed(1000 * seed + 100 * whole_seed + 99)
    storage = torch.full((64,), 7.0)
    tensors = {
        "rows": storage[3:18].view(3, 5).copy_(torch.randn(3, 5, generator=numbers)),
        "whole": torch.randn(5, 4, generator=numbers_alike).bfloat16(),
        "columns": storage[20:44].view(4, 6).copy_(torch.randn(4, 6, generator=numbers)),
        "turned": torch.randn(6, 3, generator=numbers).bfloat16().t(),
        "scalar": torch.randn((), generator=numbers_alike),
        "nothing": torch.empty(0, 4),
        "wide": torch.randn(9, generator=numbers_alike, dtype=torch.float64),
    }
    whole = [name in ("whole", "scalar", "nothing", "wide") for name in tensors]
    return Parameters(list(tensors), [t.requires_grad_() for t in tensors.values()], whole, storage)


def heard(call: Callable[[], Any]) -> str | None:
    """Return the words of a RankMismatchError; None if there is none."""
    try:
        call()
    except consistency.RankMismatchError as disagreement:
        return str(disagreement)
    return None


def facts(world: World) -> dict[str, Any]:
    grid = Grid.of(world)
    turned = replace(grid, dp=grid.tp, tp=grid.dp)  # on which ranks are counted along DP first
    last = world.size - 1
    found: dict[str, Any] = {
        "lines alike": heard(lambda: consistency.check_same(grid, "options", LINES, "x")),
        "lines": {name: differ(grid, lines, {last}) for name, lines in OTHER_LINES.items()},
        "lines on rank 0": {name: differ(grid, lines, {0}) for name, lines in OTHER_LINES.items()},
        "values": {name: spoil(grid, *spoilt) for name, spoilt in spoilers(grid).items()},
        "turned": {name: spoil(turned, *spoilt) for name, spoilt in spoilers(turned).items()},
        "outcomes": {
            "fine": fate(grid, {}),
            "one fails": fate(grid, {last: "lr is -1."}),
            "all fail alike": fate(grid, dict.fromkeys(range(world.size), "lr is -1.")),
            "each fails otherwise": fate(grid, {rank: f"lr\nis -{rank}." for rank in range(world.size)}),
        },
        "ballots": [vote(grid, set(range(culprits))) for culprits in range(world.size + 1)],
        "silent": len(list(grid.ledger)) == 0,
    }
    if (world.dp, world.tp) == (3, 1):
        found["two of three"] = two_of_three(world)
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    return found | {"total": float(total)}


def differ(grid: Grid, other: list[tuple[str, str]], culprits: set[int]) -> str | None:
    lines = other if grid.world.rank in culprits else LINES
    return heard(lambda: consistency.check_same(grid, "options", lines, "give every rank the same"))


def fate(grid: Grid, failures: dict[int, str]) -> str:
    """Return what this rank raises in the end, after some have raised a ValueError."""
    try:
        with consistency.raise_together(grid, "setup", "give every rank the same"):
            if grid.world.rank in failures:
                raise ValueError(failures[grid.world.rank])
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def vote(grid: Grid, culprits: set[int]) -> bool:
    lines = OTHER_LINES["lr"] if grid.world.rank in culprits else LINES
    total = torch.tensor(consistency.checksum(lines, grid.world.size), dtype=torch.float64)
    dist.all_reduce(total)
    return consistency.all_equal(total.tolist(), grid.world.size)


def spoilers(grid: Grid) -> dict[str, tuple[Parameters, Callable[[Parameters], Any]]]:
    """Return, by name, what this rank should hold in the end, and what is done to it first."""
    d, t = grid.dp.rank, grid.tp.rank
    last = (d, t) == (grid.dp.size - 1, grid.tp.size - 1)

    def flip(p: Parameters) -> None:
        if last:
            bits = p.tensors[p.names.index("whole")].detach().view(torch.int16).view(-1)
            bits[-1] ^= 1

    def sign(p: Parameters) -> None:
        p.tensors[p.names.index("scalar")].detach().fill_(-0.0 if last else 0.0)

    def overwrite(p: Parameters, seed: int, whole_seed: int = 0) -> None:
        for tensor, other in zip(p.tensors, parameters(t, seed, whole_seed).tensors, strict=True):
            tensor.detach().copy_(other)

    plain, zero_scalar, first_column = parameters(t), parameters(t), parameters(t)
    zero_scalar.tensors[zero_scalar.names.index("scalar")].detach().zero_()
    for tensor, whole in zip(first_column.tensors, first_column.replicated, strict=True):
        tensor.detach().mul_(1 if whole or t == 0 else 0).abs_()
    return {
        "alike": (plain, lambda p: None),
        "a seed for each DP rank": (plain, lambda p: overwrite(p, d)),
        "a checkpoint on rank 0": (
            first_column,
            lambda p: [x.detach().mul_(int(d == t == 0)).abs_() for x in p.tensors],
        ),
        "a seed for each TP rank": (plain, lambda p: overwrite(p, 0, t)),
        "one bit": (plain, flip),
        "a zero's sign": (zero_scalar, sign),
    }


def spoil(grid: Grid, wanted: Parameters, how: Callable[[Parameters], Any]) -> dict[str, Any]:
    """Return what a check says before and after a broadcast, and whether that brought the right bits and no others."""
    mine = parameters(grid.tp.rank)
    how(mine)
    kept = [t.detach().clone() for t in mine.tensors]
    before = heard(lambda: check(grid, mine))
    unspoilt = all(torch.equal(bits(a), bits(b)) for a, b in zip(kept, mine.tensors, strict=True))
    consistency.PIECE_BYTES = 150  # so that some travel together, and not all
    consistency.broadcast_values(grid, mine.tensors, mine.replicated)
    after = heard(lambda: check(grid, mine))
    padding = torch.cat([mine.storage[:3], mine.storage[18:20], mine.storage[44:]])
    return {
        "before": before,
        "after": after,
        "mended": [bool(torch.equal(bits(a), bits(b))) for a, b in zip(mine.tensors, wanted.tensors, strict=True)],
        "untouched": unspoilt and bool((padding == 7).all()),
    }


def check(grid: Grid, p: Parameters) -> None:
    consistency.check_values(grid, p.names, p.tensors, p.replicated, "load the same on every rank")


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def two_of_three(world: World) -> dict[str, Any] | None:
    """Return what ranks 1 and 2 hear on a grid of their own; rank 0 is not on it."""
    handle = dist.new_group([1, 2])
    if world.rank == 0:
        return None
    ledger = Ledger()
    dp, everyone = (Group(name, 2, world.rank - 1, handle, ledger) for name in ("dp", "world"))
    grid = Grid(dp, Group("tp"), everyone, torch.device("cpu"), ledger)
    return {"lines": differ(grid, OTHER_LINES["lr"], {1}), "values": spoil(grid, *spoilers(grid)["one bit"])["before"]}
