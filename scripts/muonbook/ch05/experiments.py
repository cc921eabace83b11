"""What chapter 5 runs on every rank: what each collective moves and sends, the groups, and three mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.launch import World
from distmuon.sharding.grid import Grid

NATIVE = "native reduce_scatter"


# ---- Collectives and groups -------------------------------------------------------------------------------


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
        written = None if before is None or after is None else after - before
        counted = grid.ledger.total()
        seen[op] = {"before": small.tolist(), "after": values, "origins": origins}
        seen[op] |= {"payload": counted.payload_bytes, "ledger": counted.sent_bytes, "socket": written}
    x = torch.arange(2 * n, device=grid.device) * (group.rank + 1)
    two = group.all_gather(group.reduce_scatter(x, x.new_empty(2), "first half"), "second half")
    whole = group.all_reduce(x.clone(), "both at once")
    return world.gather({"moves": seen, "halves make the whole": torch.equal(two, whole)})


def groups(world: World) -> list[dict[str, Any]] | None:
    """All-gather one number, this rank's own, over the DP group and over the TP group of the grid."""
    grid, found = Grid.of(world), {}
    for name in ("dp", "tp"):
        group, mine = getattr(grid, name), torch.tensor([world.rank], device=grid.device)
        found[name] = {"rank": group.rank, "met": group.all_gather(mine, "who is here?").tolist()}
    return world.gather(found)


def bytes_written() -> int | None:
    """Return the bytes that this process has handed to the operating system, or None where only Linux would say."""
    try:
        with open("/proc/self/io") as file:
            return int(dict(line.split(":") for line in file)["wchar"])
    except OSError:
        return None


# ---- Where values come from, measured ---------------------------------------------------------------------

# A picture that colours every value by the rank it came from must not take a textbook's word for it.


def with_origins(collective: Callable[[Any], Any], tensor: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Return (values, origins) of `collective(tensor)` on this rank, as lists that fit into JSON.

    collective: takes a tensor and returns what this rank holds afterwards; it must be linear (sums, means, copies), and
        every rank of the group calls this with the same one. It runs 1 + `size` times the tensor's length times, and a
        ledger counts them all.
    tensor: 1-D, equally long on all ranks, of a floating dtype or wide enough integers; it is not changed.
    rank, size: of the group. origins: of each value, the [rank, element] that are in it.
    """
    every = [[source, element] for source in range(size) for element in range(len(tensor))]

    def mark(origin: list[int]) -> Any:
        marked = tensor * 0
        marked[origin[1]] = int(rank == origin[0])
        return collective(marked)

    values = collective(tensor.clone()).tolist()
    marks = [mark(origin).tolist() for origin in every]
    return values, [[origin for origin, at in zip(every, marks, strict=True) if at[n]] for n in range(len(values))]


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
    lines = [f"{len(seen)} ranks ran each collective. What rank 1 held before and after it:"]
    for op, move in seen[1]["moves"].items():
        if op != NATIVE:
            lines.append(f"  {op:15s}{move['before']!s:18s}-> {move['after']}")
    right = all(rank["halves make the whole"] for rank in seen)
    return [*lines, f"reduce_scatter, then all_gather equals all_reduce on every rank: {right}."], right


def groups_page(seen: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return which ranks each rank met in its two groups, as lines, and whether no other rank was in both."""
    met = [(found["dp"]["met"], found["tp"]["met"]) for found in seen]
    lines = [f"rank {rank}: DP group {column}, TP group {row}" for rank, (column, row) in enumerate(met)]
    return lines, all(set(column) & set(row) == {rank} for rank, (column, row) in enumerate(met))


# ---- Three mistakes that stop or spoil collectives --------------------------------------------------------

# Each is made in a group of its own, whose connections may break while those of the world stay whole. What a rank says
# is the function's result, which goes home through the launcher, since a broken group carries nothing.


def skip(rank: int, group: Any) -> str | None:
    """Let rank 2 return one line too early. It notices nothing, so it has nothing to say: None."""
    gradient = torch.ones(4)  # [4]
    if rank == 2:
        return None
    dist.all_reduce(gradient, group=group)
    return f"no error; the gradients add up to {gradient.long().tolist()}"


def shapes(rank: int, group: Any) -> str:
    """Let rank 1 bring 4 elements to a sum of 8."""
    gradient = torch.full([4 if rank == 1 else 8], rank + 1.0)  # [8], on rank 1 [4]
    dist.all_reduce(gradient, group=group)
    return f"no error; the gradients add up to {gradient.long().tolist()}"


def order(rank: int, group: Any) -> str:
    """Let rank 1 sum the gradient before the loss, and the others after it."""
    loss, gradient = torch.tensor([rank + 1]), torch.tensor([100 * (rank + 1)])
    for tensor in (gradient, loss) if rank == 1 else (loss, gradient):
        dist.all_reduce(tensor, group=group)
    return f"no error; loss {loss.item()}, gradient {gradient.item()}"


MISTAKES = {"skip": skip, "shapes": shapes, "order": order}


def make(world: World, mistake: str, seconds: float) -> str | None:
    """Make the mistake with a timeout of `seconds`; return what this rank says of it. Raises any other error."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))  # a new group takes no other group's
    try:
        return MISTAKES[mistake](world.rank, group)
    except RuntimeError as error:
        return f"RuntimeError: {digest(str(error))}"


def digest(words: str) -> str:
    """Return what an error of gloo says, without the addresses, times and file names that differ from run to run.

    gloo has no exceptions of its own, so its words decide; these are those of torch 2.13. Raises ValueError for others.
    """
    running = r"Rank (\d+) is running collective: .*?OpType=(\w+), TensorShape=\[([\d, ]*)\]"
    found = [f"rank {rank} {op} [{shape}]" for rank, op, shape in re.findall(running, words)]
    if found:
        return ", but ".join(found)
    missing = re.search(r"\[Rank 0\]: Ranks ([\d, ]+) failed to pass monitoredBarrier", words)
    if missing:
        return f"rank {missing[1]} did not come"
    if re.search(
        "[Tt]imed out|timeout|Connection|Broken pipe", words
    ):  # the first to time out closes its connections, which ends the others' wait
        return "stopped waiting for the others"
    raise ValueError(f"not known as an error of a collective: {words}")
