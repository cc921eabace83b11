"""Do all ranks hold the same thing? Asked before a step can mix what they hold: names, shapes, options, values.

Nothing in a step would notice. Ranks that were built differently stitch one model together from pieces of several, or
wait for each other's bytes, or end in gloo's SIGABRT. So every rank looks at the same numbers of all ranks, and either
all raise the same `RankMismatchError` or none does.

The ledger counts what a step moves; what is exchanged here is not part of one, and is not recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_lists import runs

Lines = Sequence[tuple[str, str]]  # (name, description), in order

PIECE_NUMEL = 2**18  # numbers whose fingerprint is taken at once: 2 MB of int64
PIECE_BYTES = 25_000_000  # tensors that are broadcast together
NAMED = 4  # ranks that a sentence lists


class RankMismatchError(ValueError):
    """Ranks do not hold the same thing. Raised on all of them, with the same words."""


# ---- Names, shapes, options -------------------------------------------------------------------------------


def check_same(grid: Grid, topic: str, lines: Lines, remedy: str) -> None:
    """Raise RankMismatchError on every rank unless all give the same lines in the same order. Collective.

    topic: what the lines are, in the plural: "parameters". remedy: the end of the sentence, without its full stop.
    Names are unique. One all-gather of 40 bytes a rank; only ranks that disagree show each other their lines.
    """
    if grid.world.size == 1:
        return
    text = json.dumps(lines).encode()
    digest = hashlib.sha256(text).digest() + len(text).to_bytes(8, "little")
    digests = _silent(grid.world).all_gather(_tensor(digest, grid), "agreement").view(grid.world.size, -1).tolist()
    differing = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if not differing:
        return
    ours, theirs = (
        _lines_of(rank, text, int.from_bytes(bytes(digests[rank][32:]), "little"), grid) for rank in (0, differing[0])
    )
    first, other = (f"rank {_global_ranks(grid)[rank]}" for rank in (0, differing[0]))
    raise RankMismatchError(
        f"the {topic} of {_listed(differing, grid)} differ from those of {first}: "
        f"{_difference(ours, theirs, first, other)}; {remedy}."
    )


@contextlib.contextmanager
def raise_together(grid: Grid, action: str, remedy: str) -> Iterator[None]:
    """Let all ranks fail where some do: with RankMismatchError, unless all raise the same. Collective: `check_same`.

    Without it, a rank that raises leaves the others waiting in the next collective. action: names the block: "setup".
    No collective inside the block: where one rank has raised, the others would wait in it.
    """
    try:
        yield
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        check_same(grid, "outcomes", [(action, words)], remedy)
        raise
    check_same(grid, "outcomes", [(action, "fine")], remedy)


def _tensor(text: bytes, grid: Grid) -> Tensor:  # [len(text)], uint8
    return torch.tensor(list(text), dtype=torch.uint8, device=grid.device)


def _lines_of(rank: int, text: bytes, length: int, grid: Grid) -> Lines:
    """Return the lines of one rank on every rank. text: this rank's own."""
    mine = rank == grid.world.rank
    letters = _tensor(text, grid) if mine else torch.empty(length, dtype=torch.uint8, device=grid.device)
    dist.broadcast(letters, group_src=rank, group=grid.world.process_group)
    return json.loads(bytes(letters.tolist()))


def _difference(ours: Lines, theirs: Lines, first: str, other: str) -> str:
    """Return a clause on the first line that differs. ours: of the rank called `first`; theirs: of `other`."""
    mine, found = next(pair for pair in zip_longest(ours, theirs) if pair[0] != pair[1])
    if mine and (found is None or mine[0] not in dict(theirs)):
        return f"{mine[0]!r} is missing on {other}"
    if mine is None or found[0] not in dict(ours):
        return f"{other} has {found[0]!r}, which {first} has not"
    if mine[0] != found[0]:
        return f"{other} has {found[0]!r} in the place of {mine[0]!r}"
    return f"{mine[0]!r} is {found[1]} on {other}, and {mine[1]} on {first}"


# ---- Values -----------------------------------------------------------------------------------------------


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> Tensor:  # [P], int64
    """Return a number for each tensor that depends on every bit of it and on their order, on the first one's device.

    A single changed bit always changes it, and any other change does but with a chance of 2^-32 at most (two numbers
    that differ in their highest bits only, in each other's place), 2^-64 mostly. Values count as bits: -0.0 is not
    0.0, and one NaN may differ from another. Beside a tensor that is not contiguous, which is copied, it takes 6 MB.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    count = min(PIECE_NUMEL, max(tensor.nbytes for tensor in tensors))  # small models need few, and soon have them
    weights = {device: _odd(count, device) for device in {tensor.device for tensor in tensors}}
    taken = [_fingerprint(tensor, weights[tensor.device]).to(tensors[0].device) for tensor in tensors]
    return torch.stack(taken)


def check_values(
    grid: Grid, names: Sequence[str], tensors: Sequence[Tensor], replicated_over_tp: Sequence[bool], remedy: str
) -> None:
    """Raise RankMismatchError on every rank unless all DP ranks hold the same bits. Collective: gathers [2 + P].

    names, tensors, replicated_over_tp: of the P parameters, alike on all ranks (see `check_same`). A replicated
    parameter must be the same on all TP ranks, too. Each rank is compared with DP rank 0 of its TP rank and of TP
    rank 0.
    """
    if grid.world.size == 1:
        return
    place = torch.tensor([grid.dp.rank, grid.tp.rank], device=grid.device)
    mine = torch.cat([place, fingerprints(tensors).to(grid.device)])  # [2 + P]
    table = _silent(grid.world).all_gather(mine, "agreement").view(grid.world.size, -1).cpu()  # [W, 2 + P]
    places = [(dp, tp) for dp, tp in table[:, :2].tolist()]
    at = {place: rank for rank, place in enumerate(places)}
    # Whom each rank is compared with: itself where nobody is found, in a world whose collectives do nothing.
    columns = [at.get((0, tp), rank) for rank, (_, tp) in enumerate(places)]
    corner = [at.get((0, 0), rank) for rank in range(len(places))]
    whole = torch.tensor(list(replicated_over_tp), dtype=torch.bool)  # [P]
    values = table[:, 2:]
    different = values != torch.where(whole, values[corner], values[columns])  # [W, P]
    if not different.any():
        return
    index, *more = different.any(0).nonzero().flatten().tolist()
    rank = int(different[:, index].nonzero()[0])
    other = (corner if whole[index] else columns)[rank]
    called = [f"rank {_global_ranks(grid)[r]} (DP {places[r][0]}, TP {places[r][1]})" for r in (rank, other)]
    crosses = " (whole on every TP rank)" if places[rank][1] != places[other][1] else ""
    also = f" and of {len(more)} more" if more else ""
    raise RankMismatchError(
        f"the values of {names[index]!r}{crosses}{also} differ: "
        f"{called[0]} does not hold what {called[1]} holds; {remedy}."
    )


@torch.no_grad()
def broadcast_values(grid: Grid, tensors: Sequence[Tensor], replicated_over_tp: Sequence[bool]) -> None:
    """Give every rank DP rank 0's values, in place, and of replicated parameters TP rank 0's. Collective.

    tensors, replicated_over_tp: of the P parameters, alike on all ranks (see `check_same`). Small ones travel together.
    At most 25 MB are copied for that, but for a tensor that is not contiguous or not on the grid's device.
    """
    replicated = [tensor for tensor, whole in zip(tensors, replicated_over_tp, strict=True) if whole]
    for group, chosen in ((grid.tp, replicated), (grid.dp, tensors)):
        if group.size > 1:
            for some in _batches(chosen):
                flat = some[0].reshape(-1) if len(some) == 1 else torch.cat([t.reshape(-1) for t in some])
                flat = _silent(group).broadcast(flat.to(grid.device), "agreement")
                if group.rank > 0:
                    for tensor, values in zip(some, flat.split([t.numel() for t in some]), strict=True):
                        tensor.copy_(values.view_as(tensor))


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors that may travel together: of one dtype and device, up to PIECE_BYTES; a larger one by itself."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in kinds.values():
        yield from runs(kind, [tensor.nbytes for tensor in kind], PIECE_BYTES)


def _fingerprint(tensor: Tensor, weights: Tensor) -> Tensor:  # [], int64
    """Return sum_k w_k mix(sum_i w_i x_i), x_i the numbers of piece k; all in integers modulo 2^64.

    All w are odd and mix is one to one: a bit that changes in a single x_i changes every sum that it enters.
    """
    # at most 32 bits, so that a product with a weight keeps 32 bits or more of the weight, whatever the number
    integers = {1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    numbers = tensor.detach().contiguous().view(-1).view(integers)
    sums = torch.stack([(piece * weights[: len(piece)]).sum() for piece in numbers.split(PIECE_NUMEL)])  # [k]
    return (_mixed(sums) * _odd(len(sums), tensor.device)).sum()


def _odd(count: int, device: torch.device) -> Tensor:  # [count], int64
    """Return odd numbers that look random."""
    return _mixed(torch.arange(1, count + 1, device=device) * -7046029254386353131) | 1


def _mixed(x: Tensor) -> Tensor:
    """Return a permutation of the 64-bit integers that leaves no pattern. Source: splitmix64 (Steele et al. 2014)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor  # torch's own shift repeats the sign
    return x


# ---- During training: a vote inside a sum that is taken anyway --------------------------------------------


def checksum(lines: Lines, ranks: int, dtype: torch.dtype = torch.float64) -> tuple[float, float]:
    """Return (h, h^2), h a digest of the lines: two numbers for an all-reduce by sum over `ranks` ranks.

    h has as many bits as let the sums stay exact in any order: of float64, 25 for 4 ranks, 20 for 8,192.
    """
    digits = 1 - int(math.log2(torch.finfo(dtype).eps))  # 53 of float64
    bits = (digits - (ranks - 1).bit_length()) // 2
    text = json.dumps(lines).encode()
    h = int.from_bytes(hashlib.sha256(text).digest()[:8], "little") % 2**bits
    return float(h), float(h * h)


def all_equal(total: Sequence[float], ranks: int) -> bool:
    """Return whether all ranks have the same checksum. total: the two sums, after the all-reduce.

    By Cauchy and Schwarz, (sum h)^2 <= ranks * sum h^2, and they are equal only where all h are.
    """
    linear, square = (int(number) for number in total)
    return linear * linear == ranks * square


# ---- Words and wires --------------------------------------------------------------------------------------


def _silent(group: Group) -> Group:
    """Return the group with a ledger of its own, which nobody reads."""
    return replace(group, ledger=Ledger())


def _global_ranks(grid: Grid) -> list[int]:
    return dist.get_process_group_ranks(grid.world.process_group)


def _listed(ranks: Sequence[int], grid: Grid) -> str:
    """Return "rank 1", "ranks 1 and 3", "ranks 1, 3, 5, 7 and 24 more"."""
    numbers = [str(_global_ranks(grid)[rank]) for rank in ranks[:NAMED]]
    last = f"{len(ranks) - NAMED} more" if len(ranks) > NAMED else numbers.pop()
    return f"rank{'s' if len(ranks) > 1 else ''} " + (f"{', '.join(numbers)} and {last}" if numbers else last)
