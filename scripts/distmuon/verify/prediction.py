"""Before processes: what one step will send, allocate and orthogonalize, from the map alone.

ZeRO-1's outer moves are the same for every optimizer; what goes on between them, each strategy says in its own file
(`strategies.costs`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from distmuon.optim import strategies
from distmuon.optim.strategies.costs import PlannedRank
from distmuon.optim.strategies.strategy import updates_label
from distmuon.sharding.gradients import STATISTICS_LABEL, statistics_bytes
from distmuon.sharding.layout import ITEM_BYTES, Layout
from distmuon.sharding.ledger import Ledger

STATISTICS_BYTES = 128  # per parameter, an upper bound: norms, AdamW's counters, flags


def adamw_temporaries(sizes: Iterable[int], foreach: bool = False) -> int:
    """Return what AdamW allocates for tensors of these sizes, in the unit of the sizes: an upper bound.

    Three of the largest where it takes one after the other. foreach: torch takes all at once, as it does on a GPU, and
    then one of each is alive.
    """
    numels = list(sizes)
    return max(3 * max(numels, default=0), sum(numels) if foreach else 0)


def predict_step(
    layout: Layout,
    tp: int,
    dp_rank: int,
    muon: Collection[int] = (),
    strategy: str = "gather_all",
    gather_dtype: str | None = None,
    tp_rank: int = 0,
    publish: str = "parameters",
    whole: Collection[int] | None = None,
) -> Ledger:
    """Return the ledger that the optimizer's step will have filled on the rank (dp_rank, tp_rank).

    layout: the map; its `dp` is D. tp: T. muon: indices of the parameters that go to Muon; none is ZeRO-1 AdamW.
    gather_dtype, publish: as given to DistributedMuon, the first by name. Assumes that every parameter has a gradient.
    whole: of `periodic`, the matrices that are whole in this step, by index; () in a block step, None: all of them.
    Raises ValueError for a strategy that has no prediction here.
    """
    ledger = Ledger()
    for bucket in layout.buckets:
        size = ITEM_BYTES[layout.buffers[bucket.buffer_idx].grad_dtype]
        ledger.record("reduce_scatter", "dp", layout.dp, bucket.padded * size, f"gradients, {bucket.label}")
    ledger.record("all_reduce", "world", layout.dp * tp, statistics_bytes(len(layout.specs)), STATISTICS_LABEL)
    chosen = None if whole is None else frozenset(whole)
    at = PlannedRank(layout, frozenset(muon), tp, dp_rank, tp_rank, _item_bytes(gather_dtype), whole=chosen)
    strategies.costs_of(strategy).sends(ledger, at)
    for bucket in layout.buckets:
        size, label = ITEM_BYTES[layout.buffers[bucket.buffer_idx].param_dtype], f"parameters, {bucket.label}"
        if publish == "updates" and set(muon) & set(bucket.params):
            size, label = at.momentum_bytes(bucket)[1], updates_label(bucket)
        ledger.record("all_gather", "dp", layout.dp, bucket.padded * size, label)
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
    publish: str = "parameters",
    foreach: bool = False,
) -> int:
    """Return an upper bound, in bytes, of what one optimizer step allocates at its worst moment on one rank.

    That is beyond parameters, gradients, master weights and state, which stay. Without a native reduce-scatter (on
    gloo) a bucket's gradients are received to be added up; AdamW's temporaries are `adamw_temporaries`, of whole shards
    for its largest piece; who publishes updates packs its own and gathers all of a bucket's, and keeps those of earlier
    waves until then.

    foreach: as torch's AdamW does on a GPU.
    """
    item_bytes, compute_bytes = _item_bytes(gather_dtype), ITEM_BYTES[compute_dtype]
    at = PlannedRank(layout, frozenset(muon), tp, dp_rank, 0, item_bytes, compute_bytes)
    adding = adamw = all_pieces = published = 0
    for bucket in layout.buckets:
        buffer, own = layout.buffers[bucket.buffer_idx], bucket.shard_size
        grad_bytes = ITEM_BYTES[buffer.grad_dtype]
        adamw = max(adamw, adamw_temporaries([grad_bytes * own]))
        if foreach:
            others = (index for index in bucket.params if index not in muon)
            all_pieces += grad_bytes * sum(layout.meta(bucket, index, dp_rank).local_range.size for index in others)
        if layout.dp > 1 and not native_reduce_scatter:
            adding = max(adding, grad_bytes * bucket.padded)
        if publish == "updates" and set(bucket.params) & set(muon):
            wire = at.momentum_bytes(bucket)[1]
            kept = own if strategies.costs_of(strategy).in_waves else 0
            published = max(published, wire * (kept + own + bucket.padded))
    moves = strategies.costs_of(strategy).allocates(at)
    return max(adding, adamw, all_pieces, moves + published) + STATISTICS_BYTES * (len(layout.specs) + 1)


def predict_work(strategy: str, layout: Layout, tp: int, muon: Collection[int]) -> dict[tuple[int, int], int]:
    """Return what Newton–Schulz costs each rank (dp, tp) of the grid in one step, in FLOPs of the standard form.

    layout: the strategy's own map; its `dp` is D. tp: T. muon: indices of Muon's parameters. Of `periodic`, a whole
    step. Raises ValueError for a strategy of which this is not known.
    """
    tasks = strategies.priced(strategy).tasks
    assert tasks is not None
    flops_of = {(d, t): 0 for d in range(layout.dp) for t in range(tp)}
    for task in tasks(layout, muon, tp):
        for rank in task.ranks:
            flops_of[rank] += task.flops
    return flops_of


def _item_bytes(gather_dtype: str | None) -> int | None:
    return ITEM_BYTES[gather_dtype] if gather_dtype else None
