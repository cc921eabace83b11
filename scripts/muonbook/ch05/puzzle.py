"""Chapter 05's puzzle: an all-reduce out of nothing but "pass this on to my right, take what comes from my left".

The solution is `all_reduce`, at the end of this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from muonbook.puzzles import CaseReport, Puzzle, each_operator, first_difference, require, require_tensor, unless

if TYPE_CHECKING:
    import torch

    from distmuon.sharding.grid import Grid

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

        require(isinstance(chunk, torch.Tensor), f"pass_on takes a tensor, not a {type(chunk).__name__}.")
        require(chunk.dim() == 1, f"pass_on takes a 1-D tensor, not one of shape {tuple(chunk.shape)}.")
        require(chunk.dtype == torch.float32, f"pass_on takes float32, not {chunk.dtype}.")
        length, found = len(chunk), int(self._swap(torch.tensor([len(chunk)])))  # gloo ends a rank if they do not fit
        unlike = f"it passed on {length} elements while its left neighbour passed on {found}: chunks must be alike."
        require(length == found, unlike)
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


def trial(grid: Grid, all_reduce: Callable[..., Any]) -> Iterator[CaseReport]:
    """Call the reader's function with vectors of whole numbers, whose sum is exact in any order."""
    import torch

    rank = grid.world.rank
    asked: Counter[str] = Counter()  # of torch.distributed, sends and receives included

    def look(namespace: str, operator: str, _: object) -> None:
        asked.update([operator] if "c10d" in namespace else [])

    for length in LENGTHS:
        ring = Ring(rank, RANKS)
        vectors = [torch.arange(length, dtype=torch.float32) * (each + 1) + 10 * each for each in range(RANKS)]
        asked.clear()
        with each_operator(look):
            found = all_reduce(ring, vectors[rank].clone())
        beside = asked - Counter(dict.fromkeys(("send", "recv_"), 2 * ring.calls))
        around = f"it asked torch.distributed for {min(beside, default='')}; only ring.pass_on is allowed here."
        require(not beside, around)
        require_tensor("all_reduce's result", found, [length], torch.float32)

        where, enough = f"with {length} elements, rank {rank}", budget(length, RANKS)
        sentence = f"{where} has {{found}} at index {{0}}, where the sum is {{wanted}}."
        complaints = [
            first_difference(found, torch.stack(vectors).sum(0), sentence),
            unless(
                ring.elements <= enough,
                f"over budget: {where} passed on {ring.elements}, and {enough} are enough. "
                "Does every rank need to see every whole vector?",
            ),
        ]
        yield CaseReport(complaints, (ring.calls, f"{ring.elements} for {length}"))


def budget(length: int, ranks: int) -> int:
    """Return how many elements a rank needs to pass on: each of n - 1 chunks once to sum it, once to share the sum."""
    return 2 * (ranks - 1) * -(-length // ranks)


PUZZLE = Puzzle(
    function="all_reduce",
    trial=trial,
    praise=lambda facts: (
        f"the exact sum on all {RANKS} ranks, in {facts[0][0][0]} moves. Each rank passed on no more "
        f"elements than an all-reduce needs: {' and '.join(passed for _, passed in facts[0][:2])}."
    ),
    hints=(
        "Cut the vector into as many chunks as there are ranks, padded with zeros so that all are alike. In each move, "
        "every rank passes on one chunk, and no two ranks the same one.",
        "First half, n - 1 moves: pass on a chunk, add what arrives to your copy of the chunk that arrived, and pass "
        "that sum on next. Rank r starts with chunk r. At the end each rank holds one finished sum.",
        "Second half, n - 1 moves more: rank r holds the finished chunk (r + 1) % n. Pass it on, keep what arrives "
        "instead of adding, pass that on next. Then join the chunks and cut the padding off.",
    ),
    goal="Build an all-reduce out of nothing but messages to the right neighbour in a ring.",
    dp=RANKS,
)


# ---- The solution -----------------------------------------------------------------------------------------


def all_reduce(ring: Ring, x: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' x, [length] float32: twice around the ring."""
    import torch

    n = ring.size
    width = -(-len(x) // n)  # the length divided by n, rounded up
    padding = x.new_zeros(n * width - len(x))
    chunks = list(torch.cat([x, padding]).split(width))
    for move in range(n - 1):  # a sum grows as it travels; rank r starts that of chunk r
        outgoing, incoming = (ring.rank - move) % n, (ring.rank - move - 1) % n
        chunks[incoming] = chunks[incoming] + ring.pass_on(chunks[outgoing])
    for move in range(n - 1):  # rank r holds the finished sum of chunk r + 1; sums travel on
        outgoing, incoming = (ring.rank + 1 - move) % n, (ring.rank - move) % n
        chunks[incoming] = ring.pass_on(chunks[outgoing])
    return torch.cat(chunks)[: len(x)]
