"""Chapter 05's puzzle: an all-reduce out of nothing but "pass this on to my right, take what comes from my left".

The solution is `all_reduce`, at the end of this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from muonbook.puzzles import Puzzle, expect_tensor, first_difference, insist

if TYPE_CHECKING:
    import torch

    from distmuon.launch import World

RANKS = 4
LENGTHS = (8, 10, 3)  # cut evenly among 4 ranks, not evenly, and fewer elements than ranks


class Ring:
    """One rank's place in a ring, and the one move that is allowed in it.

    rank: this rank's number. size: how many ranks there are. calls, elements: passed on so far by this rank.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.calls = self.elements = 0

    def pass_on(self, chunk: torch.Tensor) -> torch.Tensor:
        """Send `chunk` to the right neighbour, rank + 1, and return the chunk that the left one, rank - 1, has sent.

        All ranks call it together, with 1-D tensors of one length and dtype (float32).
        """
        import torch

        insist("" if isinstance(chunk, torch.Tensor) else f"pass_on takes a tensor, not a {type(chunk).__name__}.")
        insist("" if chunk.dim() == 1 else f"pass_on takes a 1-D tensor, not one of shape {tuple(chunk.shape)}.")
        insist("" if chunk.dtype == torch.float32 else f"pass_on takes float32, not {chunk.dtype}.")
        length = int(
            self._swap(torch.tensor([len(chunk)]))
        )  # first, because gloo ends a rank whose message does not fit
        if length != len(chunk):
            insist(
                f"it passed on {len(chunk)} elements while its left neighbour passed on {length}: chunks must be alike."
            )
        self.calls += 1
        self.elements += len(chunk)
        return self._swap(chunk)

    def _swap(self, message: torch.Tensor) -> torch.Tensor:
        import torch
        import torch.distributed as dist

        message, received = message.detach().contiguous(), torch.empty(len(message), dtype=message.dtype)
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        moves = [dist.P2POp(dist.isend, message, right), dist.P2POp(dist.irecv, received, left)]
        for work in dist.batch_isend_irecv(moves):
            work.wait()
        return received


class Seen(NamedTuple):
    """What one rank saw with one length: its result and the right one, and how much it passed on."""

    length: int
    found: list[int]
    wanted: list[int]
    elements: int
    calls: int


def trial(world: World, all_reduce: Callable[..., Any]) -> list[Seen]:
    """Call the reader's function with vectors of whole numbers, whose sum is exact in any order."""
    import torch

    from muonbook.ch05._calls import Calls

    seen = []
    for length in LENGTHS:
        ring = Ring(world.rank, world.size)
        vectors = [torch.arange(length, dtype=torch.float32) * (rank + 1) + 10 * rank for rank in range(world.size)]
        with Calls() as calls:
            found = all_reduce(ring, vectors[world.rank].clone())
        beside = calls.names - Counter(dict.fromkeys(("send", "recv_"), 2 * ring.calls))
        insist(f"it asked torch.distributed for {min(beside)}; only ring.pass_on is allowed here." if beside else "")
        insist(expect_tensor("all_reduce's result", found, [length], torch.float32))
        wanted = torch.stack(vectors).sum(0)
        whole = found.detach().nan_to_num(nan=-1.0).long().tolist()
        seen.append(Seen(length, whole, wanted.long().tolist(), ring.elements, ring.calls))
    return seen


def budget(length: int, ranks: int) -> int:
    """Return how many elements a rank needs to pass on: each of n - 1 chunks once to sum it, once to share the sum."""
    return 2 * (ranks - 1) * -(-length // ranks)


def judge(evidence: list[list[Seen]]) -> list[str]:
    """Return what is wrong: sums first, then what was passed on in excess."""
    wrong, dear = [], []
    for rank, seen in enumerate(evidence):
        for one in seen:
            if (i := first_difference(one.found, one.wanted)) is not None:
                wrong.append(
                    f"with {one.length} elements, rank {rank} has {one.found[i]} at index {i}, "
                    f"where the sum is {one.wanted[i]}."
                )
            enough = budget(one.length, len(evidence))
            if one.elements > enough:
                dear.append(
                    f"over budget: with {one.length} elements, rank {rank} passed on {one.elements}, "
                    f"and {enough} are enough. Does every rank need to see every whole vector?"
                )
    return [*wrong[:1], *dear[:1]]


def praise(evidence: list[list[Seen]]) -> str:
    """Return what was achieved, with the numbers of the run."""
    passed = " and ".join(f"{one.elements} for {one.length}" for one in evidence[0][:2])
    return (
        f"the exact sum on all {len(evidence)} ranks, in {evidence[0][0].calls} moves. Each rank passed on no more "
        f"elements than an all-reduce needs: {passed}."
    )


PUZZLE = Puzzle(
    name="ring all-reduce",
    function="all_reduce",
    dp=RANKS,
    tp=1,
    trial=trial,
    judge=judge,
    praise=praise,
    hints=(
        "Cut the vector into as many chunks as there are ranks, padded with zeros so that all are alike. In each move, "
        "every rank passes on one chunk, and no two ranks the same one.",
        "First half, n - 1 moves: pass on a chunk, add what arrives to your copy of the chunk that arrived, and pass "
        "that sum on next. Rank r starts with chunk r. At the end each rank holds one finished sum.",
        "Second half, n - 1 moves more: rank r holds the finished chunk (r + 1) % n. Pass it on, keep what arrives "
        "instead of adding, pass that on next. Then join the chunks and cut the padding off.",
    ),
)


# ---- The solution -----------------------------------------------------------------------------------------


def all_reduce(ring: Ring, x: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' x, [length] float32: reduce-scatter around the ring, then all-gather around it."""
    import torch

    n = ring.size
    width = -(-len(x) // n)  # the length divided by n, rounded up
    padding = x.new_zeros(n * width - len(x))
    chunks = list(torch.cat([x, padding]).split(width))
    for move in range(n - 1):  # a sum grows while it travels; rank r starts the sum of chunk r
        outgoing, incoming = (ring.rank - move) % n, (ring.rank - move - 1) % n
        chunks[incoming] = chunks[incoming] + ring.pass_on(chunks[outgoing])
    for move in range(n - 1):  # rank r now holds the whole sum of chunk r + 1; finished sums travel on
        outgoing, incoming = (ring.rank + 1 - move) % n, (ring.rank - move) % n
        chunks[incoming] = ring.pass_on(chunks[outgoing])
    return torch.cat(chunks)[: len(x)]
