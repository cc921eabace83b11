"""Before processes: what one step will send and allocate, per rank, bucket and collective, from the map alone.

ZeRO-1's outer moves are the same for every optimizer; between them each strategy has a prediction of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from distmuon.optim import strategies
from distmuon.optim.strategies.owner import costs
from distmuon.optim.strategies.strategy import gather_dtype_name, momentum_label, updates_label
from distmuon.sharding.gradients import STATISTICS_LABEL, statistics_bytes
from distmuon.sharding.layout import ITEM_BYTES, Bucket, Layout
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.ownership import owners

STATISTICS_BYTES = 128  # per parameter, an upper bound: norms, AdamW's counters, flags


def predict_step(
    layout: Layout,
    tp: int,
    dp_rank: int,
    muon: Collection[int] = (),
    strategy: str = "gather_all",
    gather_dtype: str | None = None,
    tp_rank: int = 0,
    publish: str = "parameters",
) -> Ledger:
    """Return the ledger that the optimizer's step will have filled on the rank (dp_rank, tp_rank).

    layout: the map; its `dp` is D. tp: T. muon: indices of the parameters that go to Muon; none is ZeRO-1 AdamW.
    gather_dtype, publish: as given to DistributedMuon, the first by name. Assumes that every parameter has a gradient.
    Raises ValueError for a strategy that has no prediction here.
    """
    ledger = Ledger()
    for bucket in layout.buckets:
        grad_bytes = ITEM_BYTES[layout.buffers[bucket.buffer_idx].grad_dtype]
        sent = (bucket.padded - bucket.shard(dp_rank).size) * grad_bytes
        payload, label = bucket.padded * grad_bytes, f"gradients, {bucket.label}"
        ledger.record("reduce_scatter", "dp", layout.dp, payload, label, sent_bytes=sent)
    ledger.record("all_reduce", "world", layout.dp * tp, statistics_bytes(len(layout.specs)), STATISTICS_LABEL)
    sends = of_strategy(strategy).sends
    sends(ledger, layout, frozenset(muon), tp, dp_rank, _item_bytes(gather_dtype), tp_rank)
    for bucket in layout.buckets:
        size, label = ITEM_BYTES[layout.buffers[bucket.buffer_idx].param_dtype], f"parameters, {bucket.label}"
        if publish == "updates" and set(muon) & set(bucket.params):
            size, label = _momentum_bytes(layout, bucket, _item_bytes(gather_dtype))[1], updates_label(bucket)
        sent = (layout.dp - 1) * bucket.shard(dp_rank).size * size
        ledger.record("all_gather", "dp", layout.dp, bucket.padded * size, label, sent_bytes=sent)
    return ledger


def predict_transient(
    layout: Layout,
    tp: int,
    dp_rank: int,
    muon: Collection[int] = (),
    strategy: str = "gather_all",
    gather_dtype: str | None = None,
    compute_dtype: str = "float32",
    native_reduce_scatter: bool = False,
) -> int:
    """Return an upper bound, in bytes, of what one optimizer step allocates at its worst moment on one rank.

    That is beyond parameters, gradients, master weights and state, which stay. Without a native reduce-scatter (gloo),
    receiving a bucket of gradients takes its size once more; AdamW's temporaries are three of its largest piece.
    """
    exchange = adamw = 0
    for bucket in layout.buckets:
        buffer, own = layout.buffers[bucket.buffer_idx], bucket.shard(dp_rank).size
        grad_bytes = ITEM_BYTES[buffer.grad_dtype]
        adamw = max(adamw, 3 * grad_bytes * own)
        if layout.dp > 1 and (bucket.ends or not native_reduce_scatter):
            exchange = max(exchange, grad_bytes * layout.dp * own)
    moves = of_strategy(strategy).allocates(
        layout, frozenset(muon), tp, dp_rank, _item_bytes(gather_dtype), ITEM_BYTES[compute_dtype]
    )
    return max(exchange, adamw, moves) + STATISTICS_BYTES * (len(layout.specs) + 1)


def more_transient(schedule: str, layout: Layout, muon: Collection[int], gather_dtype: str | None = None) -> int:
    """Return by how many bytes a schedule's transient memory may exceed that of the synchronous step.

        w b + m (b + B)     for each bucket group that is gathered while another is worked on

    with the signs of `gather_all_allocates`: the momentum's pieces, the shard, the gathered bucket. Pipelined, that is
    one group, the largest; naive, all of them. gather_dtype: as given to DistributedMuon, by name.
    """
    sizes = [0]
    for bucket in layout.buckets:
        if set(bucket.params) & set(muon):
            momentum, gathered = _momentum_bytes(layout, bucket, _item_bytes(gather_dtype))
            sizes.append(momentum * bucket.shard_size + gathered * (bucket.shard_size + bucket.padded))
    return {"synchronous": 0, "naive": sum(sizes), "pipelined": max(sizes)}[schedule]


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
        _, size = _momentum_bytes(layout, bucket, item_bytes)
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

    w b                            the momentum's pieces
    + m (b + B)                    the shard, and the gathered bucket
    + (2 m + max(p + c, 5 c)) F    whole matrices, their batch (it becomes their update),
                                   Newton–Schulz's own
    + m L                          the copy that puts blocks cut along dimension 1 side by side

    with B elements in the bucket (padded) and b = B / D in a shard; F in the whole matrices of
    which this rank owns a part, L in the largest of them; w, m, c bytes per element of the
    momentum, the gather and Newton–Schulz; p of the norm (float32 or wider). F <= T b + 2 L, for
    only the two matrices at the ends of a shard can stick out of it: the bound grows with the
    bucket and the largest matrix, never with the model.
    """
    worst = 0
    for bucket in layout.buckets:
        if not any(i in muon for i in bucket.params):
            continue
        mine = _owned(layout, bucket, muon, dp_rank)
        whole = [math.prod(layout.specs[i].full_shape(tp)) for i in mine]
        w, m = _momentum_bytes(layout, bucket, item_bytes)
        matrices = whole_matrix_bytes(m, compute_bytes) * sum(whole) + m * max(whole, default=0)
        flat = w * bucket.shard_size + m * (bucket.shard_size + bucket.padded)
        worst = max(worst, flat + matrices)
    return worst


def whole_matrix_bytes(gathered: int, compute: int) -> int:
    """Return a bound, per element, of what whole matrices take from their gather to their updates.

    2 m + max(p + c, 5 c), with m = `gathered` and c = `compute` bytes per element; see
    `gather_all_allocates`.
    """
    return 2 * gathered + max(max(gathered, 4) + compute, 5 * compute)


def _gathers_over_tp(ledger: Ledger, layout: Layout, owned: Collection[int], tp: int, size: int) -> None:
    """Add the TP gather of every cut matrix of which a DP rank owns a piece; size: bytes per element."""
    for index in owned:
        spec = layout.specs[index]
        if spec.tp_split_dim is not None:
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
        _, size = _momentum_bytes(layout, bucket, item_bytes)
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
    """Return a bound, in bytes, of what one bucket's moves allocate, for the worst bucket; signs as in gather_all's.

    w b                             the momentum's pieces
    + m b                           in the dtype in which they travel
    + m S                           packed: a piece once for every other owner
    + 2 m L'                        what came, and TP-local matrices joined
    + as gather_all                 whole matrices and Newton–Schulz
    """
    worst = 0
    for bucket in layout.buckets:
        mine = _owned(layout, bucket, muon, dp_rank)
        pieces = sum(layout.meta(bucket, i, dp_rank).local_range.size for i in mine)
        local = sum(layout.specs[i].numel for i in mine)
        whole = [math.prod(layout.specs[i].full_shape(tp)) for i in mine]
        w, m = _momentum_bytes(layout, bucket, item_bytes)
        matrices = whole_matrix_bytes(m, compute_bytes) * sum(whole) + m * max(whole, default=0)
        flat = (w + m) * pieces + m * (_packed(layout, bucket, mine, dp_rank) + 2 * local)
        worst = max(worst, flat + matrices)
    return worst


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
) -> None:
    """Add what one step sends: nothing over DP; over TP, blocks to their owners and blocks of the updates back."""
    if tp == 1:
        return
    dealt = owners(costs(layout.specs, muon, tp), layout.dp, tp)
    for bucket in layout.buckets:
        row = _owned(layout, bucket, muon, dp_rank)
        cut = [index for index in row if layout.specs[index].tp_split_dim is not None]
        _, size = _momentum_bytes(layout, bucket, item_bytes)
        if cut:
            sent = size * sum(layout.specs[i].numel for i in cut if dealt[i].tp != tp_rank)
            ledger.record("all_to_all", "tp", tp, sent, momentum_label(bucket), sent_bytes=sent)
        if row:
            sent = size * (tp - 1) * sum(layout.specs[i].numel for i in row if dealt[i].tp == tp_rank)
            ledger.record("all_to_all", "tp", tp, sent, updates_label(bucket), sent_bytes=sent)


def owner_allocates(
    layout: Layout,
    muon: frozenset[int],
    tp: int,
    dp_rank: int,
    item_bytes: int | None,
    compute_bytes: int,
) -> int:
    """Return a bound, in bytes, of what one bucket's moves allocate, for the worst bucket and the busiest TP rank.

    (w + 2 m) b                     the momentum's pieces, in the dtype in which they travel, and packed
    + m F                           blocks that came
    + (2 m + max(p + c, 5 c)) F     whole matrices, and Newton–Schulz, as in gather_all's
    + m (F + b)                     updates packed, and blocks of them that came
    + m (b + B)                     updates packed and gathered, where those are published

    with b elements of Muon's in this rank's shard, B in the bucket, and F in the whole matrices that it owns.
    """
    dealt = owners(costs(layout.specs, muon, tp), layout.dp, tp)
    worst = 0
    for bucket in layout.buckets:
        row = _owned(layout, bucket, muon, dp_rank)
        own = sum(layout.specs[index].numel for index in row)
        wholes = [0] * tp
        for index in row:
            wholes[dealt[index].tp] += math.prod(layout.specs[index].full_shape(tp))
        w, m = _momentum_bytes(layout, bucket, item_bytes)
        matrices = (2 * m + whole_matrix_bytes(m, compute_bytes)) * max(wholes)
        worst = max(worst, (w + 4 * m) * own + matrices + m * bucket.padded)
    return worst


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


# ---- All strategies ---------------------------------------------------------------------------------------


class StrategyPrediction(NamedTuple):
    """What a strategy's moves, between momentum and apply, send and allocate on the ranks with one `dp_rank`.

    sends: (ledger, layout, muon, tp, dp_rank, item_bytes, tp_rank) -> None; adds a step's collectives to the ledger.
    allocates: (layout, muon, tp, dp_rank, item_bytes, compute_bytes) -> an upper bound of the bytes that the moves of
        one bucket group allocate beyond state, parameters and gradients.

    muon: indices of the Muon parameters. item_bytes: of the gather dtype; None: the default, per buffer.
    compute_bytes: per element of Newton–Schulz's compute dtype.
    """

    sends: Callable[[Ledger, Layout, frozenset[int], int, int, int | None, int], None]
    allocates: Callable[[Layout, frozenset[int], int, int, int | None, int], int]


PREDICTIONS = {
    "gather_all": StrategyPrediction(gather_all_sends, gather_all_allocates),
    "gather_cut": StrategyPrediction(gather_cut_sends, gather_cut_allocates),
    "owner": StrategyPrediction(owner_sends, owner_allocates),
    "blockwise": StrategyPrediction(blockwise_sends, blockwise_allocates),
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


def _owned(layout: Layout, bucket: Bucket, muon: Collection[int], dp_rank: int) -> list[int]:
    """Return the matrices of Muon's in this bucket of which a DP rank owns a piece."""
    return [index for index in bucket.params if index in muon and dp_rank in layout.owners(bucket, index)]


def _item_bytes(gather_dtype: str | None) -> int | None:
    return ITEM_BYTES[gather_dtype] if gather_dtype else None


def _momentum_bytes(layout: Layout, bucket: Bucket, item_bytes: int | None) -> tuple[int, int]:
    """Return bytes per element of the bucket's momentum as it is kept, and as it is gathered."""
    grad_dtype = layout.buffers[bucket.buffer_idx].grad_dtype
    return ITEM_BYTES[grad_dtype], item_bytes or ITEM_BYTES[gather_dtype_name(grad_dtype)]
