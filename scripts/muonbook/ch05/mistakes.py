"""Three mistakes that stop or spoil collectives, made on purpose, and what each rank then has to say.

A mistake is made in a group of its own. Its wires may break, while those of the world stay whole, and every rank lives
to tell. What a rank says is the function's result: it goes home through the launcher, since a broken group carries
nothing.

What is told here was seen with torch 2.13 and gloo.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distmuon.launch import World

RANKS = 4  # with two ranks, gloo ends the process on `shapes`, and nobody tells


def skip(rank: int, group: Any) -> str | None:
    """Let rank 2 leave early, perhaps because its data ran out. It notices nothing: None."""
    import torch
    import torch.distributed as dist

    if rank == 2:
        return None
    gradient = torch.ones(4)
    dist.all_reduce(gradient, group=group)
    return f"no error; the gradients add up to {gradient.long().tolist()}"


def shapes(rank: int, group: Any) -> str:
    """Let rank 1 bring 4 elements to a sum of 8."""
    import torch
    import torch.distributed as dist

    gradient = torch.full([4 if rank == 1 else 8], rank + 1.0)
    dist.all_reduce(gradient, group=group)
    return f"no error; the gradients add up to {gradient.long().tolist()}"


def order(rank: int, group: Any) -> str:
    """Let rank 1 sum the gradient before the loss, and the others after it."""
    import torch
    import torch.distributed as dist

    loss, gradient = torch.tensor([rank + 1]), torch.tensor([100 * (rank + 1)])
    for tensor in (gradient, loss) if rank == 1 else (loss, gradient):
        dist.all_reduce(tensor, group=group)
    return f"no error; loss {loss.item()}, gradient {gradient.item()}"


MISTAKES = {"skip": skip, "shapes": shapes, "order": order}


def make(world: World, mistake: str, seconds: float) -> str | None:
    """Make the mistake, on every rank, with a timeout of `seconds`; return what this rank says of it.

    Raises whatever is not an error of a collective.
    """
    import torch.distributed as dist

    group = dist.new_group(timeout=timedelta(seconds=seconds))  # not inherited: without it, many minutes
    try:
        return MISTAKES[mistake](world.rank, group)
    except RuntimeError as error:
        return f"RuntimeError: {digest(str(error))}"


def digest(words: str) -> str:
    """Return what an error of gloo says, without the addresses, times and file names that differ from run to run.

    gloo has no exceptions of its own, only words. Raises ValueError for words that are not known here.
    """
    running = r"Rank (\d+) is running collective: .*?OpType=(\w+), TensorShape=\[([\d, ]*)\]"
    told = [f"rank {rank} {op} [{shape}]" for rank, op, shape in re.findall(running, words)]
    if told:
        return ", but ".join(told)
    missing = re.search(r"\[Rank 0\]: Ranks ([\d, ]+) failed to pass monitoredBarrier", words)
    if missing:
        return f"rank {missing[1]} did not come"
    if re.search("[Tt]imed out|timeout|Connection|Broken pipe", words):  # who times out first hangs up on the others
        return "I waited for the others in vain"
    raise ValueError(f"not known as an error of a collective: {words}")
