"""Before processes: which ranks will orthogonalize which matrix, and what that costs them.

The bytes and the memory of a step are in `prediction`; this is its third bill, the work of Newton–Schulz. One sweep
over the map answers for all ranks at once, so a laptop can plan a thousand of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from distmuon.optim.newton_schulz import flops
from distmuon.optim.strategies.owner import costs
from distmuon.sharding.layout import Layout
from distmuon.sharding.ownership import Owner, owners


class Task(NamedTuple):
    """One matrix in the hands of some ranks.

    parameter: its place in the map. shape: what each of them orthogonalizes: the whole matrix, or a block.
    """

    parameter: int
    shape: tuple[int, ...]
    ranks: Sequence[Owner]


def by_all_owners(layout: Layout, muon: Collection[int], tp: int) -> Iterator[Task]:
    """Yield the whole matrices, each at all DP ranks that own a piece of it, and at all their TP ranks."""
    for bucket in layout.buckets:
        for index in bucket.params:
            if index in muon:
                rows = layout.owners(bucket, index)
                yield Task(index, layout.specs[index].full_shape(tp), [Owner(d, t) for d in rows for t in range(tp)])


def by_one_owner(layout: Layout, muon: Collection[int], tp: int) -> Iterator[Task]:
    """Yield the whole matrices, each at one rank."""
    for index, owner in owners(costs(layout.specs, muon, tp), layout.dp, tp).items():
        yield Task(index, layout.specs[index].full_shape(tp), [owner])


def by_blocks(layout: Layout, muon: Collection[int], tp: int) -> Iterator[Task]:
    """Yield the TP-local matrices, each at its own rank of the row that owns it."""
    for task in by_all_owners(layout, muon, tp):
        yield task._replace(shape=layout.specs[task.parameter].shape)


WORK: dict[str, Callable[[Layout, Collection[int], int], Iterator[Task]]] = {
    "gather_all": by_all_owners,
    "gather_cut": by_all_owners,
    "owner": by_one_owner,
    "blockwise": by_blocks,
}


def predict_work(strategy: str, layout: Layout, tp: int, muon: Collection[int]) -> dict[Owner, float]:
    """Return what Newton–Schulz costs each rank of the grid in one step, in FLOPs; those that do none have 0.

    layout: the strategy's own map; its `dp` is D. tp: T. muon: indices of Muon's parameters. Raises ValueError for a
    strategy of which this is not known.
    """
    if strategy not in WORK:
        raise ValueError(f"strategy is {strategy!r}; whose work is known are {', '.join(WORK)}.")
    found = {Owner(d, t): 0.0 for d in range(layout.dp) for t in range(tp)}
    for task in WORK[strategy](layout, muon, tp):
        cost = float(flops(task.shape))
        for rank in task.ranks:
            found[rank] += cost
    return found
