"""Bytes before processes: what one step will send, per rank, bucket and collective, from the map alone."""

from __future__ import annotations

from collections.abc import Collection

from distmuon import strategies
from distmuon.gradients import SUMMARY_LABEL
from distmuon.layout import ITEM_BYTES, Layout
from distmuon.ledger import Ledger


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
