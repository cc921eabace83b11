"""What chapter 5 shows on every rank: that nothing is shared, what each collective moves and sends, and the groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from muonbook.provenance import with_origins

whiteboard: Tensor | None = None  # a module-level variable: every process that imports this file has its own
NATIVE = "native reduce_scatter"


# ---- What every rank runs ---------------------------------------------------------------------------------


def ranks(world: World) -> None:
    """Write on the whiteboard; then rank 0 sends what it wrote, and all others receive it."""
    global whiteboard
    whiteboard = torch.arange(4, device=world.device) + 10 * world.rank
    wrote = whiteboard.tolist()
    if world.size > 1:
        dist.broadcast(whiteboard, src=0)
    reads = whiteboard.tolist()
    world.report(f"rank {world.rank} of {world.size} wrote {wrote}, now reads {reads}")
    processes = world.gather(os.getpid())
    world.say(f"different processes: {len(set(processes or []))}")


def collectives(world: World, elements: int) -> list[dict[str, Any]] | None:
    """Run every collective on small whole numbers, for what it does, and on `elements` floats, for what it sends."""
    grid = Grid.of(world)
    group, n = grid.world, grid.world.size
    native = replace(group, native_reduce_scatter=True)  # the backend's own, to compare

    # how each is called, and whether it takes a whole tensor or a shard
    moves: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
        "broadcast": (lambda x: group.broadcast(x, "payload"), n),
        "all_reduce": (lambda x: group.all_reduce(x, "payload"), n),
        "all_gather": (lambda x: group.all_gather(x, "payload"), 1),
        "reduce_scatter": (lambda x: group.reduce_scatter(x, x.new_empty(len(x) // n), "payload"), n),
        "all_to_all": (lambda x: group.all_to_all(x, "payload"), n),
        NATIVE: (lambda x: native.reduce_scatter(x, x.new_empty(len(x) // n), "payload"), n),
    }
    seen = {}
    for op, (move, parts) in moves.items():
        small = torch.arange(parts, device=grid.device) + 10 * group.rank  # 21: rank 2's element 1
        values, origins = with_origins(move, small, group.rank, n)
        large = torch.ones(elements // n * parts, device=grid.device)
        dist.barrier()
        grid.ledger.clear()
        before = bytes_written()
        move(large)
        dist.barrier()
        after = bytes_written()
        left = None if before is None or after is None else after - before
        counted = grid.ledger.total()
        seen[op] = {"before": small.tolist(), "after": values, "origins": origins}
        seen[op] |= {"payload": counted.payload_bytes, "ledger": counted.sent_bytes, "socket": left}
    x = torch.arange(2 * n, device=grid.device) * (group.rank + 1)
    two = group.all_gather(group.reduce_scatter(x, x.new_empty(2), "first half"), "second half")
    whole = group.all_reduce(x.clone(), "both at once")
    return world.gather({"moves": seen, "halves make the whole": torch.equal(two, whole)})


def groups(world: World) -> list[dict[str, Any]] | None:
    """All-gather one number, this rank's own, over the DP group and over the TP group."""
    grid, found = Grid.of(world), {}
    for name in ("dp", "tp"):
        group, mine = getattr(grid, name), torch.tensor([world.rank], device=grid.device)
        found[name] = {"rank": group.rank, "met": group.all_gather(mine, "who is here?").tolist()}
    return world.gather(found)


def bytes_written() -> int | None:
    """Return the bytes that this process has handed to the operating system, or None where that is not told."""
    try:
        with open("/proc/self/io") as file:
            return int(dict(line.split(":") for line in file)["wchar"])
    except OSError:
        return None  # not Linux


# ---- What rank 0 prints -----------------------------------------------------------------------------------


def report(seen: list[dict[str, Any]], page: str, path: str | None) -> tuple[bool, dict[str, Any]]:
    """Print the page of collectives or of groups. path: where what every rank saw will be written."""
    lines, right = {"collectives": collectives_page, "groups": groups_page}[page](seen)
    print("\n".join(lines))
    if path:
        print(f"What every rank saw: {path}")
    return right, {"ranks": seen, "right": right}


def collectives_page(seen: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return what rank 1 held before and after, as lines, and whether the two halves made the whole on all ranks."""
    lines = [f"{len(seen)} ranks; 12 is rank 1's element 2. What rank 1 holds, before -> after:"]
    for op, move in seen[1]["moves"].items():
        if op != NATIVE:
            lines.append(f"  {op:15s}{move['before']!s:18s}-> {move['after']}")
    right = all(rank["halves make the whole"] for rank in seen)
    return [*lines, f"reduce_scatter, then all_gather = all_reduce, exactly and on every rank: {right}."], right


def groups_page(seen: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return whom each rank met in its two groups, as lines, and whether it alone was in both."""
    met = [(found["dp"]["met"], found["tp"]["met"]) for found in seen]
    lines = [f"rank {rank}: DP group {column}, TP group {row}" for rank, (column, row) in enumerate(met)]
    return lines, all(set(column) & set(row) == {rank} for rank, (column, row) in enumerate(met))
