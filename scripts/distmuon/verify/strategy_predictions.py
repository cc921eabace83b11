"""What each strategy's moves send, allocate and orthogonalize, from the map alone: what `prediction` asks.

Formulas are per strategy, in its section; the five moves they speak of are in `optim.strategies`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from distmuon.optim import strategies
from distmuon.optim.strategies.gather_cut import may_share_a_wave
from distmuon.optim.strategies.owner import assign_owners, work
from distmuon.optim.strategies.strategy import momentum_label, updates_label
from distmuon.sharding.layout import ITEM_BYTES, Bucket, Layout
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.matrices import MatrixBlock
from distmuon.sharding.ownership import Owner
from distmuon.sharding.precision import default_gather_dtype
from distmuon.verify.ns_workspace import WholeMatrices

# ---- gather_all -------------------------------------------------------------------------------------------


def gather_all_sends(
    ledger: Ledger,
    layout: Layout,
    muon: frozenset[int],
    tp: int,
    dp_rank: int,
    item_bytes: int | None,
    tp_rank: int = 0,
) -> None:
    """Add to `ledger` what DP rank `dp_rank` sends between momentum and apply in one step; see `StrategyPrediction`."""
    for bucket in layout.buckets:
        matrices = [index for index in bucket.params if index in muon]
        if not matrices:
            continue
        _, size = momentum_bytes(layout, bucket, item_bytes)
        ledger.record("all_gather", "dp", layout.dp, bucket.padded * size, momentum_label(bucket))
        _gathers_over_tp(ledger, layout, _owned(layout, bucket, muon, dp_rank), tp, size)


def gather_all_allocates(
    layout: Layout,
    muon: frozenset[int],
    tp: int,
    dp_rank: int,
    item_bytes: int | None,
    compute_bytes: int,
) -> int:
    """Return a bound, in bytes, of what one bucket group's moves allocate, for the worst bucket.

    w b             the momentum's pieces
    + m (b + B)     the shard, and the gathered bucket
    + m L           the copy that puts blocks cut along dimension 1 side by side
    + whole matrices, and Newton–Schulz: see `WholeMatrices`

    with B elements in the bucket (padded), b = B / D in a shard and L in the largest whole matrix; w
    and m bytes per element of the momentum and of the gather. Of the whole matrices of which a rank
    owns a part, only the two at the ends of its shard can stick out of it: the bound grows with the
    bucket and the largest matrix, never with the model.
    """
    worst = 0
    for bucket in layout.buckets:
        if not any(i in muon for i in bucket.params):
            continue
        w, m = momentum_bytes(layout, bucket, item_bytes)
        whole = WholeMatrices.of((layout.specs[i] for i in _owned(layout, bucket, muon, dp_rank)), tp)
        flat = w * bucket.shard_size + m * (bucket.shard_size + bucket.padded + whole.largest)
        worst = max(worst, flat + whole.bytes(m, compute_bytes))
    return worst


def _gathers_over_tp(ledger: Ledger, layout: Layout, owned: Collection[int], tp: int, size: int) -> None:
    """Add the TP gather of every cut matrix of which a DP rank owns a piece; size: bytes per element."""
    for index in owned:
        spec = layout.specs[index]
        if spec.tp_gather_dim is not None:
            ledger.record("all_gather", "tp", tp, spec.numel * tp * size, f"momentum, {spec.name}")


# ---- gather_cut -------------------------------------------------------------------------------------------


def gather_cut_sends(
    ledger: Ledger,
    layout: Layout,
    muon: frozenset[int],
    tp: int,
    dp_rank: int,
    item_bytes: int | None,
    tp_rank: int = 0,
) -> None:
    """Add what one step sends: this rank's pieces of cut matrices to all their other owners; over TP as gather_all."""
    for bucket in layout.buckets:
        _, size = momentum_bytes(layout, bucket, item_bytes)
        mine = _owned(layout, bucket, muon, dp_rank)
        if any(len(layout.owners(bucket, index)) > 1 for index in bucket.params if index in muon):
            sent = size * _packed(layout, bucket, mine, dp_rank)
            ledger.record("all_to_all", "dp", layout.dp, sent, momentum_label(bucket), sent_bytes=sent)
        _gathers_over_tp(ledger, layout, mine, tp, size)


def gather_cut_allocates(
    layout: Layout,
    muon: frozenset[int],
    tp: int,
    dp_rank: int,
    item_bytes: int | None,
    compute_bytes: int,
) -> int:
    """Return a bound, in bytes, of what one wave allocates, for the worst; see `gather_cut_bound`."""
    worst = 0
    for bucket in layout.buckets:
        sizes = momentum_bytes(layout, bucket, item_bytes)
        cut, small, large = gather_cut_waves(layout, bucket, _owned(layout, bucket, muon, dp_rank), tp)
        for wave in (cut, small, *([index] for index in large)):
            pieces = sum(layout.meta(bucket, i, dp_rank).local_range.size for i in wave)
            joined = sum(layout.specs[i].numel for i in wave if wave is cut)
            whole = WholeMatrices.of((layout.specs[i] for i in wave), tp)
            packed = _packed(layout, bucket, wave, dp_rank)
            worst = max(worst, gather_cut_bound(pieces, packed, joined, whole, sizes, compute_bytes))
    return worst


def gather_cut_waves(
    layout: Layout, bucket: Bucket, indices: Collection[int], tp: int
) -> tuple[list[int], list[int], list[int]]:
    """Return which of these matrices are cut; which of the others are small to some device, and go together; the rest.

    What a device takes singly although another would not, it takes with less room than is bounded here.
    """
    cut, small, large = list[int](), list[int](), list[int]()
    for index in indices:
        if len(layout.owners(bucket, index)) > 1:
            cut.append(index)
        else:
            (small if may_share_a_wave(layout.specs[index], tp) else large).append(index)
    return cut, small, large


def gather_cut_bound(
    pieces: int, packed: int, joined: int, whole: WholeMatrices, sizes: tuple[int, int], compute: int
) -> int:
    """Return a bound, in bytes, of what one wave allocates; signs as in `gather_all_allocates`.

    w b                             the momentum's pieces
    + m b                           in the dtype in which they travel
    + m S                           packed: a piece once for every other owner
    + 2 m L'                        what came, and TP-local matrices joined, of the first wave
    + m L                           the copy that puts blocks cut along dimension 1 side by side
    + whole matrices, and Newton–Schulz: see `WholeMatrices`

    with b = `pieces`, S = `packed`, L' = `joined` and L = `whole.largest` elements; `sizes` are w and m of
    `momentum_bytes`.
    """
    w, m = sizes
    return (w + m) * pieces + m * (packed + 2 * joined + whole.largest) + whole.bytes(m, compute)


def _packed(layout: Layout, bucket: Bucket, mine: Collection[int], dp_rank: int) -> int:
    """Return how many elements a rank sends: each of its pieces, once to every other owner of that matrix."""
    others = {index: len(layout.owners(bucket, index)) - 1 for index in mine}
    return sum(count * layout.meta(bucket, index, dp_rank).local_range.size for index, count in others.items())


# ---- owner ------------------------------------------------------------------------------------------------


def owner_sends(
    ledger: Ledger,
    layout: Layout,
    muon: frozenset[int],
    tp: int,
    dp_rank: int,
    item_bytes: int | None,
    tp_rank: int = 0,
    whole: frozenset[int] | None = None,
) -> None:
    """Add what one step sends: nothing over DP; over TP, blocks to their owners and blocks of the updates back.

    whole: the matrices that have owners in this step; None: all of them.
    """
    if tp == 1:
        return
    owner_of = _owners_of(layout, muon, tp)
    for bucket in layout.buckets:
        taken = _owned(layout, bucket, muon if whole is None else muon & whole, dp_rank)
        row = [index for index in taken if owner_of[index].tp is not None]
        cut = [index for index in row if layout.specs[index].tp_gather_dim is not None]
        _, size = momentum_bytes(layout, bucket, item_bytes)
        if cut:
            sent = size * sum(layout.specs[i].numel for i in cut if owner_of[i].tp != tp_rank)
            ledger.record("all_to_all", "tp", tp, sent, momentum_label(bucket), sent_bytes=sent)
        if row:
            sent = size * (tp - 1) * sum(layout.specs[i].numel for i in row if owner_of[i].tp == tp_rank)
            ledger.record("all_to_all", "tp", tp, sent, updates_label(bucket), sent_bytes=sent)


def owner_allocates(
    layout: Layout,
    muon: frozenset[int],
    tp: int,
    dp_rank: int,
    item_bytes: int | None,
    compute_bytes: int,
    blocks_too: bool = False,
) -> int:
    """Return a bound, in bytes, of what one bucket's moves allocate, for the worst bucket and the busiest TP rank.

    blocks_too: what a rank does not own, it works on, too, as blocks. See `owner_bound`.
    """
    owner_of = _owners_of(layout, muon, tp)
    worst = 0
    for bucket in layout.buckets:
        row = _owned(layout, bucket, muon, dp_rank)
        own = sum(layout.specs[index].numel for index in row)
        wholes = [WholeMatrices()] * tp
        for index in row:
            spec, owner = layout.specs[index], owner_of[index].tp
            for rank in range(tp):
                if owner in (rank, None) or blocks_too:
                    more = WholeMatrices.of_one(spec, tp, blocks=owner not in (rank, None))
                    wholes[rank] = wholes[rank].plus(more)
        sizes = momentum_bytes(layout, bucket, item_bytes)
        bounds = (owner_bound(own, whole, sizes, compute_bytes) for whole in set(wholes))
        worst = max(worst, *bounds)
    return worst


def owner_bound(own: int, whole: WholeMatrices, sizes: tuple[int, int], compute: int) -> int:
    """Return a bound, in bytes, of what one bucket's moves allocate.

    (w + 2 m) b                     the momentum's pieces, in the dtype in which they travel, and packed
    + m F                           blocks that came
    + whole matrices, and Newton–Schulz: see `WholeMatrices`
    + m (F + b)                     updates packed, and blocks of them that came

    with b = `own` elements of Muon's in this rank's shard, F = `whole.total` in the matrices that it owns; `sizes` are
    w and m of `momentum_bytes`, `compute` is c.
    """
    w, m = sizes
    return (w + 3 * m) * own + 2 * m * whole.total + whole.bytes(m, compute)


# ---- blockwise --------------------------------------------------------------------------------------------


def blockwise_sends(*_: Any) -> None:
    """Add nothing: no move between momentum and apply sends."""


def blockwise_allocates(
    layout: Layout,
    muon: frozenset[int],
    tp: int,
    dp_rank: int,
    item_bytes: int | None,
    compute_bytes: int,
) -> int:
    """Return owner's bound for T = 1: a block is taken for a whole matrix."""
    return owner_allocates(layout, muon, 1, dp_rank, item_bytes, compute_bytes)


# ---- periodic ---------------------------------------------------------------------------------------------


# Owner's bound for any mixture of whole matrices and blocks: groups may have periods of their own.
periodic_allocates = partial(owner_allocates, blocks_too=True)


# ---- Who orthogonalizes what ------------------------------------------------------------------------------


class Task(NamedTuple):
    """One parameter in the hands of some ranks.

    parameter: its place in the map. parts: the matrices that each of them orthogonalizes: whole ones, or blocks.
    ranks: (dp, tp) of each.
    """

    parameter: int
    parts: Sequence[MatrixBlock]
    ranks: Sequence[tuple[int, int]]

    @property
    def flops(self) -> int:
        """What it costs each of the ranks."""
        return work(self.parts)


def by_all_owners(layout: Layout, muon: Collection[int], tp: int) -> Iterator[Task]:
    """Yield all parameters, each at all DP ranks that own a piece of it, and at all their TP ranks."""
    for bucket in layout.buckets:
        for index in bucket.params:
            if index in muon:
                rows = layout.owners(bucket, index)
                yield Task(index, layout.specs[index].seen_parts(tp), [(d, t) for d in rows for t in range(tp)])


def by_one_owner(layout: Layout, muon: Collection[int], tp: int) -> Iterator[Task]:
    """Yield all parameters, each at one rank; one whose matrices TP does not cut, at all ranks of a row."""
    for index, owner in assign_owners(layout, muon, tp).items():
        ranks = [(owner.dp, t) for t in (range(tp) if owner.tp is None else [owner.tp])]
        yield Task(index, layout.specs[index].seen_parts(tp), ranks)


def by_blocks(layout: Layout, muon: Collection[int], tp: int) -> Iterator[Task]:
    """Yield the TP-local blocks, each at its own rank of the row that owns it."""
    for task in by_all_owners(layout, muon, tp):
        spec = layout.specs[task.parameter]
        yield task._replace(parts=spec.local_parts)


# ---- All strategies ---------------------------------------------------------------------------------------


class StrategyPrediction(NamedTuple):
    """What a strategy's moves, between momentum and apply, send and allocate on the ranks with one `dp_rank`.

    sends: (ledger, layout, muon, tp, dp_rank, item_bytes, tp_rank) -> None; adds a step's collectives to the ledger.
        That of a strategy whose steps are not all alike takes one argument more: see `predict_step` for `whole`.
    allocates: (layout, muon, tp, dp_rank, item_bytes, compute_bytes) -> an upper bound of the bytes that the moves of
        one bucket group, or of one wave of it, allocate beyond state, parameters and gradients.
    in_waves: whether a bucket group may take several.
    tasks: (layout, muon, tp) -> every rank's work, in one sweep over the map; None: not known.

    muon: indices of the Muon parameters. item_bytes: of the gather dtype; None: the default, per buffer.
    compute_bytes: per element of Newton–Schulz's compute dtype.
    """

    sends: Callable[..., None]
    allocates: Callable[[Layout, frozenset[int], int, int, int | None, int], int]
    tasks: Callable[[Layout, Collection[int], int], Iterator[Task]] | None = None
    in_waves: bool = False


PREDICTIONS = {
    "gather_all": StrategyPrediction(gather_all_sends, gather_all_allocates, by_all_owners),
    "gather_cut": StrategyPrediction(gather_cut_sends, gather_cut_allocates, by_all_owners, in_waves=True),
    "owner": StrategyPrediction(owner_sends, owner_allocates, by_one_owner),
    "blockwise": StrategyPrediction(blockwise_sends, blockwise_allocates, by_blocks),
    "periodic": StrategyPrediction(owner_sends, periodic_allocates, by_one_owner),
}


def of_strategy(name: str) -> StrategyPrediction:
    """Return the prediction of the strategy `name`; raises ValueError where there is none.

    A file with a strategy of one's own may have one too: `PREDICTION = StrategyPrediction(sends, allocates)`.
    """
    own = getattr(strategies.module(name), "PREDICTION", None) if strategies.is_file(name) else PREDICTIONS.get(name)
    if own is None:
        raise ValueError(f"strategy is {name!r}, of which nothing is predicted; give its file a PREDICTION.")
    return own


def is_predicted(name: str) -> bool:
    """Say whether there is a prediction of the strategy `name`."""
    try:
        return of_strategy(name) is not None
    except ValueError:
        return False


@lru_cache(maxsize=8)
def _owners_of(layout: Layout, muon: frozenset[int], tp: int) -> dict[int, Owner]:
    """Return `assign_owners` of the same, once for all ranks that are asked about."""
    return assign_owners(layout, muon, tp)


def _owned(layout: Layout, bucket: Bucket, muon: Collection[int], dp_rank: int) -> list[int]:
    """Return the matrices of Muon's in this bucket of which a DP rank owns a piece."""
    return [index for index in layout.owned(bucket, dp_rank) if index in muon]


def momentum_bytes(layout: Layout, bucket: Bucket, item_bytes: int | None) -> tuple[int, int]:
    """Return bytes per element of the bucket's momentum as it is kept, and as it is gathered."""
    grad_dtype = layout.buffers[bucket.buffer_idx].grad_dtype
    return ITEM_BYTES[grad_dtype], item_bytes or default_gather_dtype(getattr(torch, grad_dtype)).itemsize
