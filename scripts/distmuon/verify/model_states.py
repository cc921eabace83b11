"""Model states: what a rank keeps between steps, kind by kind, counted on storages and predicted from shapes alone.

Parameters, gradients, master weights and optimizer state, as ZeRO names them (Rajbhandari et al. 2020, section 3).
Counting walks them down to the storages behind them. The moment is that between the backward pass and the update, when
gradients exist in every way of training. Predictions know four ways to lay a model out: ours (flat buckets in shards),
replicated (DDP), partitioned (torch's ZeroRedundancyOptimizer) and cut by rows (FSDP2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from distmuon.sharding.layout import ITEM_BYTES, Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STATE = {"momentum": "momentum_buffer", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "counters": "step"}
KINDS = ("parameters", "gradients", "masters", *STATE)  # counters: AdamW's step numbers, 4 bytes each
ModelStates = dict[str, int]  # bytes per kind

# ---- Counted ----------------------------------------------------------------------------------------------


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage behind a tensor; of a DTensor, that of this rank's part."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def count(tensors: Mapping[str, Iterable[Tensor]]) -> ModelStates:
    """Return bytes per kind of the storages behind these tensors, each where it is first met."""
    states, counted = dict.fromkeys(tensors, 0), set()
    for kind, of_kind in tensors.items():
        for storage in map(storage_of, of_kind):
            states[kind] += storage.nbytes() if storage._cdata not in counted else 0
            counted.add(storage._cdata)
    return states


def by_kind(states: Iterable[Mapping[str, Any]]) -> dict[str, list[Tensor]]:
    """Return the tensors of an optimizer's state by kind; raise RuntimeError for one of another name."""
    names = STATE | {"masters": "master_weight"}
    tensors: dict[str, list[Tensor]] = {kind: [] for kind in names}
    for state in states:
        if unknown := set(state) - set(names.values()):
            raise RuntimeError(f"the optimizer's state has {sorted(unknown)}, which nobody counts; add it to STATE.")
        for kind, name in names.items():
            tensors[kind] += [state[name]] if name in state else []
    return tensors


# ---- Predicted, one layout each: what DP rank `dp_rank` keeps; muon: indices of the Muon parameters -------


def predict_shards(layout: Layout, dp_rank: int, muon: Collection[int] = ()) -> ModelStates:
    """Return what our optimizers keep.

    Whole parameters and gradients, masters and state of the shards. For D = 1 nothing is cut.
    """
    states, metas = dict.fromkeys(KINDS, 0), layout.view(dp_rank)
    for bucket in layout.buckets:
        buffer = layout.buffers[bucket.buffer_idx]
        item = ITEM_BYTES[buffer.grad_dtype]
        states["parameters"] += bucket.padded * ITEM_BYTES[buffer.param_dtype]
        states["gradients"] += bucket.padded * item
        if buffer.grad_dtype != buffer.param_dtype:  # else the parameters are their own masters
            states["masters"] += bucket.shard(dp_rank).size * item
        for index in bucket.params:
            meta = metas[index]
            _add_state(states, meta.local_range.size * item, index in muon, meta.owned)
    return states


def predict_replicas(layout: Layout, dp_rank: int = 0, muon: Collection[int] = ()) -> ModelStates:
    """Return what DDP and an optimizer behind it keep on every rank: everything, in the model's dtype."""
    states = dict.fromkeys(KINDS, 0)
    for index, spec in enumerate(layout.specs):
        size = spec.numel * ITEM_BYTES[spec.dtype]
        states["parameters"] += size
        states["gradients"] += size
        _add_state(states, size, index in muon, True)
    return states


def predict_partition(layout: Layout, dp_rank: int, muon: Collection[int] = ()) -> ModelStates:
    """Return what torch's ZeroRedundancyOptimizer leaves: DDP's parameters and gradients, state of whole parameters.

    The largest is dealt out first, each to the rank that has least so far (torch 2.13, `_partition_parameters`).
    """
    states, elements = predict_replicas(layout) | dict.fromkeys(STATE, 0), [0] * layout.dp
    for index, spec in sorted(enumerate(layout.specs), key=lambda pair: pair[1].numel, reverse=True):
        owner = elements.index(min(elements))
        elements[owner] += spec.numel
        if owner == dp_rank:
            _add_state(states, spec.numel * ITEM_BYTES[spec.dtype], index in muon, True)
    return states


def predict_rows(layout: Layout, dp_rank: int, muon: Collection[int] = ()) -> ModelStates:
    """Return what FSDP2 leaves: rows in equal runs; parameters and gradients are padded to the longest run."""
    states = dict.fromkeys(KINDS, 0)
    for index, spec in enumerate(layout.specs):
        rows, row = -(-spec.shape[0] // layout.dp), spec.numel // spec.shape[0] * ITEM_BYTES[spec.dtype]
        states["parameters"] += rows * row
        states["gradients"] += rows * row
        _add_state(states, min(rows, max(0, spec.shape[0] - rows * dp_rank)) * row, index in muon, True)
    return states


def _add_state(states: ModelStates, size: int, is_muon: bool, stepped: bool) -> None:
    """Add one parameter's state of `size` bytes: one buffer; for AdamW two and a step number."""
    for kind in ("momentum",) if is_muon else ("exp_avg", "exp_avg_sq"):
        states[kind] += size
    states["counters"] += 4 * (stepped and not is_muon)
