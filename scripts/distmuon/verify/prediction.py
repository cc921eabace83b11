"""Bytes before processes: what one step will send, per rank, bucket and collective, from the map alone."""

from __future__ import annotations

from collections.abc import Collection

from distmuon.optim import strategies
from distmuon.sharding.gradients import SUMMARY_LABEL
from distmuon.sharding.layout import ITEM_BYTES, Layout
from distmuon.sharding.ledger import Ledger

SMALL_CHANGE = 128  # bytes per parameter: norms, counters, flags


def predict_step(
    layout: Layout,
    tp: int,
    dp_rank: int,
    muon: Collection[int] = (),
    strategy: str = "gather_all",
    gather_dtype: str | None = None,
) -> Ledger:
    """Return the ledger that the optimizer's step will have filled on every rank with this `dp_rank`.

    layout: the map; its `dp` is D. tp: T. muon: indices of the parameters that go to Muon; none is ZeRO-1 AdamW.
    gather_dtype: as given to DistributedMuon, by name. Assumes that every parameter has a gradient.
    """
    ledger = Ledger()
    for bucket in layout.buckets:
        grad_bytes = ITEM_BYTES[layout.buffers[bucket.buffer_idx].grad_dtype]
        ledger.record("reduce_scatter", "dp", layout.dp, bucket.padded * grad_bytes, f"gradients, {bucket.label}")
    ledger.record("all_reduce", "world", layout.dp * tp, 2 * len(layout.specs) * 8, SUMMARY_LABEL)
    item_bytes = ITEM_BYTES[gather_dtype] if gather_dtype else None
    strategies.load(strategy).predict(ledger, layout, frozenset(muon), tp, dp_rank, item_bytes)
    for bucket in layout.buckets:
        param_bytes = ITEM_BYTES[layout.buffers[bucket.buffer_idx].param_dtype]
        ledger.record("all_gather", "dp", layout.dp, bucket.padded * param_bytes, f"parameters, {bucket.label}")
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
        grad_bytes = ITEM_BYTES[layout.buffers[bucket.buffer_idx].grad_dtype]
        adamw = max(adamw, 3 * grad_bytes * bucket.shard_size)
        if layout.dp > 1 and not native_reduce_scatter:
            exchange = max(exchange, grad_bytes * bucket.padded)
    item_bytes = ITEM_BYTES[gather_dtype] if gather_dtype else None
    moves = strategies.load(strategy).transient_bytes(
        layout, frozenset(muon), tp, dp_rank, item_bytes, ITEM_BYTES[compute_dtype]
    )
    return max(exchange, adamw, moves) + SMALL_CHANGE * (len(layout.specs) + 1)
