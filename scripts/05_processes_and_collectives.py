"""Chapter 5: what a rank is, what each collective does to real tensors, what it sends, and how a hang is read.

python scripts/05_processes_and_collectives.py --show ranks
python scripts/05_processes_and_collectives.py --show collectives --json out/05.json
python scripts/05_processes_and_collectives.py --show groups --dp 2 --tp 2
python scripts/05_processes_and_collectives.py --mistake skip --timeout 3
TORCH_DISTRIBUTED_DEBUG=DETAIL python scripts/05_processes_and_collectives.py --mistake shapes --timeout 3
torchrun --nproc-per-node 4 scripts/05_processes_and_collectives.py --show collectives
"""

import os
from collections.abc import Callable
from typing import Any

from distmuon import launch
from muonbook import puzzles
from muonbook.ch05 import mistakes
from muonbook.ch05.puzzle import PUZZLE

whiteboard = "nothing"  # a module-level variable: every process that imports this file has its own
NATIVE = "native reduce_scatter"


# ---- What every rank runs ---------------------------------------------------------------------------------


def ranks(world):
    """Write on the whiteboard, wait until all have written, and read it."""
    import torch.distributed as dist

    global whiteboard
    whiteboard = f"rank {world.rank}"
    if world.size > 1:
        dist.barrier()  # nobody passes this line before everybody has reached it
    world.report(f"I am rank {world.rank} of {world.size}. On the whiteboard I read: {whiteboard}.")
    processes = world.gather(os.getpid())
    world.say(f"Different processes: {len(set(processes or []))}.")


def collectives(world, elements):
    """Run every collective on small whole numbers, for what it does, and on `elements` floats, for what it sends."""
    import dataclasses

    import torch
    import torch.distributed as dist

    from distmuon.sharding.grid import Grid
    from muonbook.provenance import trace

    grid = Grid.of(world)
    group, n = grid.world, grid.world.size
    native = dataclasses.replace(group, native_reduce_scatter=True)  # the backend's own, to compare

    moves = {  # how each is called, and whether it takes a whole tensor or a shard
        "broadcast": (lambda x: group.broadcast(x, "payload"), n),
        "all_reduce": (lambda x: group.all_reduce(x, "payload"), n),
        "all_gather": (lambda x: group.all_gather(x, "payload"), 1),
        "reduce_scatter": (lambda x: group.reduce_scatter(x, x.new_empty(len(x) // n), "payload"), n),
        "all_to_all": (lambda x: group.all_to_all(x, "payload"), n),
        NATIVE: (lambda x: native.reduce_scatter(x, x.new_empty(len(x) // n), "payload"), n),
    }
    seen = {}
    for op, (move, parts) in moves.items():
        small = torch.arange(max(parts, 2), device=grid.device) + 10 * group.rank  # 21: rank 2's element 1
        values, sources = trace(move, small, group.rank, n)
        large = torch.ones(elements // n * parts, device=grid.device)
        dist.barrier()
        grid.ledger.clear()
        written = bytes_written()
        move(large)
        dist.barrier()
        left = None if written is None else bytes_written() - written
        counted = grid.ledger.total()
        seen[op] = {"before": small.tolist(), "after": values, "sources": sources}
        seen[op] |= {"payload": counted.payload_bytes, "ledger": counted.sent_bytes, "socket": left}
    x = torch.arange(2 * n, device=grid.device) * (group.rank + 1)
    two = group.all_gather(group.reduce_scatter(x, x.new_empty(2), "first half"), "second half")
    whole = group.all_reduce(x.clone(), "both at once")
    return world.gather({"moves": seen, "halves make the whole": torch.equal(two, whole)})


def groups(world):
    """All-gather one number, this rank's own, over the DP group and over the TP group."""
    from functools import partial

    import torch

    from distmuon.sharding.grid import Grid
    from muonbook.provenance import trace

    grid, found = Grid.of(world), {}
    for name in ("dp", "tp"):
        group, mine = getattr(grid, name), torch.tensor([world.rank], device=grid.device)
        values, sources = trace(partial(group.all_gather, label="who is here?"), mine, group.rank, group.size)
        found[name] = {"rank": group.rank, "before": [world.rank], "after": values, "sources": sources}
    return world.gather(found)


def bytes_written():
    """Return the bytes that this process has handed to the operating system, or None where that is not told."""
    try:
        with open("/proc/self/io") as file:
            return int(dict(line.split(":") for line in file)["wchar"])
    except OSError:
        return None  # not Linux


# ---- What rank 0 prints -----------------------------------------------------------------------------------


def collectives_page(seen):
    """Return what rank 1 held before and after, as lines, and whether the two halves made the whole on all ranks."""
    lines = [f"{len(seen)} ranks; 12 is rank 1's element 2. What rank 1 holds, before -> after:"]
    for op, move in seen[1]["moves"].items():
        if op != NATIVE:
            lines.append(f"  {op:15s}{move['before']!s:18s}-> {move['after']}")
    right = all(rank["halves make the whole"] for rank in seen)
    return [*lines, f"reduce_scatter, then all_gather = all_reduce, exactly and on every rank: {right}."], right


def groups_page(seen):
    """Return whom each rank met in its two groups, as lines, and whether it alone was in both."""
    met = [(found["dp"]["after"], found["tp"]["after"]) for found in seen]
    lines = [f"rank {rank}: DP group {column}, TP group {row}" for rank, (column, row) in enumerate(met)]
    return lines, all(set(column) & set(row) == {rank} for rank, (column, row) in enumerate(met))


SHOWS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {  # what every rank runs, and with what
    "ranks": (ranks, ()),
    "collectives": (collectives, (1_200_000,)),
    "groups": (groups, ()),
}
PAGES = {"collectives": collectives_page, "groups": groups_page}


# ---- The command line -------------------------------------------------------------------------------------


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=1)
    shows, made = launch.choices(tuple(SHOWS)), launch.choices(tuple(mistakes.MISTAKES))
    parser.add_argument("--show", metavar=shows, default="collectives", help="what to run (default: %(default)s)")
    parser.add_argument("--mistake", metavar=made, help="make this mistake instead; --timeout is for its group alone")
    parser.add_argument("--json", metavar="FILE", help="write what every rank saw here")
    puzzles.add_arguments(parser)
    return parser.parse_args()


def check(arguments):
    """Raise UsageError where the arguments do not fit together."""
    show, mistake, world = arguments.show, arguments.mistake, arguments.dp * arguments.tp
    for option, name, known in (("--show", show, SHOWS), ("--mistake", mistake, mistakes.MISTAKES)):
        if name is not None and name not in known:
            raise launch.UsageError(f"{option} {name} is unknown; choose one of {', '.join(known)}.")
    if mistake and (world != mistakes.RANKS or arguments.backend != "gloo" or launch.under_torchrun()):
        raise launch.UsageError(f"--mistake {mistake} is made by {mistakes.RANKS} ranks on gloo, without torchrun.")
    if mistake and arguments.timeout <= 0:
        raise launch.UsageError(f"--timeout {arguments.timeout:g}: it must be positive.")
    if arguments.json and (mistake or show == "ranks"):
        raise launch.UsageError(
            "--json goes with --show collectives and --show groups; the others have nothing to write."
        )
    if world == 1 and show != "ranks":
        raise launch.UsageError(f"--show {show}: one rank has nobody to talk to; choose --dp 2 or more.")
    if launch.speaks():
        launch.check_writable("--json", arguments.json)


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, PUZZLE)) is not None:
        return code
    check(arguments)
    options = launch.options(arguments)
    if arguments.mistake:
        made = (arguments.mistake, arguments.timeout)  # the world itself keeps the usual timeout
        told = launch.run(mistakes.make, made, **options | {"timeout": launch.DEFAULT_TIMEOUT})
        print("\n".join(f"rank {rank}: {words}" for rank, words in enumerate(told) if words is not None))
        return 0
    work, given = SHOWS[arguments.show]
    seen = launch.run(work, given, **options)[0]
    if seen is None:
        return 0  # told already, or under torchrun the work of rank 0
    lines, right = PAGES[arguments.show](seen)
    print("\n".join(lines))
    if arguments.json:
        from muonbook.report import write_json

        write_json(arguments.json, {"ranks": seen, "right": right})
        print(f"What every rank saw: {arguments.json}")
    return 0 if right else 1


if __name__ == "__main__":
    launch.command(main)
