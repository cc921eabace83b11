"""What a rank keeps between steps, kind by kind: counted on storages that exist, and predicted from shapes alone.

Counting walks parameters, gradients, master weights and the optimizers' state down to the storages behind them. The
moment is that between the backward pass and the update, when gradients exist in every way of training. Predictions know
four ways to lay a model out: ours (flat buckets in shards), whole (DDP), dealt out (torch's ZeroRedundancyOptimizer)
and cut by rows (FSDP2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distmuon.sharding.layout import ITEM_BYTES, Layout, ParamSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from muonbook.measure.baselines import Trainer
    from muonbook.measure.workload import Workload

STATE = {"momentum": "momentum_buffer", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "counters": "step"}
KINDS = ("parameters", "gradients", "masters", *STATE)  # counters: AdamW's step numbers, 4 bytes each
Kept = dict[str, int]  # bytes per kind

# ---- Counted ----------------------------------------------------------------------------------------------


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage behind a tensor; of a DTensor, that of this rank's part."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def count(tensors: Mapping[str, Iterable[Tensor]]) -> Kept:
    """Return bytes per kind of the storages behind these tensors, each counted once, where it is first met."""
    kept, seen = dict.fromkeys(tensors, 0), set()
    for kind, theirs in tensors.items():
        for storage in map(storage_of, theirs):
            kept[kind] += storage.nbytes() if storage._cdata not in seen else 0
            seen.add(storage._cdata)
    return kept


def by_kind(states: Iterable[Mapping[str, Any]]) -> dict[str, list[Tensor]]:
    """Return the tensors of an optimizer's state by the kinds of STATE; raise RuntimeError for one of another name."""
    found: dict[str, list[Tensor]] = {kind: [] for kind in STATE}
    for state in states:
        if unknown := set(state) - set(STATE.values()):
            raise RuntimeError(f"the optimizer's state has {sorted(unknown)}, which nobody counts; add it to STATE.")
        for kind, name in STATE.items():
            found[kind] += [state[name]] if name in state else []
    return found


def kept_by(trainer: Trainer) -> dict[str, list[Tensor]]:
    """Return all tensors that a contender keeps between backward pass and update, by kind, for `count`."""
    from distmuon.optim.sharded_optimizer import Zero1AdamW

    weights: list[Tensor] = list(trainer.model.parameters())
    kept: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    kept["parameters"] = weights
    kept["gradients"] = [p.grad for p in weights if p.grad is not None]
    for optimizer in trainer.optimizers:
        inner = [optimizer, getattr(optimizer, "optim", None)]  # the second: inside torch's ZeroRedundancyOptimizer
        if isinstance(optimizer, Zero1AdamW):
            inner.append(optimizer.adamw)
            kept["gradients"] += optimizer.buffers.flat_gradients
            kept["masters"] += optimizer.buffers.masters.values()
        for one in filter(None, inner):
            for kind, tensors in by_kind(one.state.values()).items():
                kept[kind] += tensors
    return kept


# ---- Predicted, one layout each ---------------------------------------------------------------------------


def predict_shards(layout: Layout, dp_rank: int, muon: Collection[int] = ()) -> Kept:
    """Return what our optimizers keep on a DP rank: whole parameters and gradients, masters and state of the shards.

    muon: indices of the Muon parameters. In a map for D = 1 nothing is cut.
    """
    kept, metas = dict.fromkeys(KINDS, 0), layout.view(dp_rank)
    for bucket in layout.buckets:
        buffer = layout.buffers[bucket.buffer_idx]
        item = ITEM_BYTES[buffer.grad_dtype]
        kept["parameters"] += bucket.padded * ITEM_BYTES[buffer.param_dtype]
        kept["gradients"] += bucket.padded * item
        if buffer.grad_dtype != buffer.param_dtype:  # else the parameters are their own masters
            kept["masters"] += bucket.shard_size * item
        for index in bucket.params:
            _add_state(kept, metas[index].local_range.size * item, index in muon, metas[index].owned)
    return kept


def predict_whole(specs: Sequence[ParamSpec], muon: Collection[int] = ()) -> Kept:
    """Return what DDP and an optimizer behind it keep on every rank: everything, in the model's dtype."""
    kept = dict.fromkeys(KINDS, 0)
    for index, spec in enumerate(specs):
        size = spec.numel * ITEM_BYTES[spec.dtype]
        kept["parameters"] += size
        kept["gradients"] += size
        _add_state(kept, size, index in muon, True)
    return kept


def predict_dealt(specs: Sequence[ParamSpec], dp: int, dp_rank: int, muon: Collection[int] = ()) -> Kept:
    """Return what torch's ZeroRedundancyOptimizer leaves on a DP rank: state of whole parameters.

    The largest is dealt out first, each to the rank that has least so far (torch 2.13, `_partition_parameters`).
    """
    kept, elements = predict_whole(specs) | dict.fromkeys(STATE, 0), [0] * dp
    for index, spec in sorted(enumerate(specs), key=lambda pair: pair[1].numel, reverse=True):
        owner = elements.index(min(elements))
        elements[owner] += spec.numel
        if owner == dp_rank:
            _add_state(kept, spec.numel * ITEM_BYTES[spec.dtype], index in muon, True)
    return kept


def predict_rows(specs: Sequence[ParamSpec], dp: int, dp_rank: int, muon: Collection[int] = ()) -> Kept:
    """Return what FSDP2 leaves on a DP rank: rows in equal runs; parameters and gradients padded to the longest run."""
    kept = dict.fromkeys(KINDS, 0)
    for index, spec in enumerate(specs):
        rows, row = -(-spec.shape[0] // dp), spec.numel // spec.shape[0] * ITEM_BYTES[spec.dtype]
        kept["parameters"] += rows * row
        kept["gradients"] += rows * row
        _add_state(kept, min(rows, max(0, spec.shape[0] - rows * dp_rank)) * row, index in muon, True)
    return kept


def _add_state(kept: Kept, size: int, is_muon: bool, stepped: bool) -> None:
    """Add one parameter's state of `size` bytes: one buffer for Muon, two and a step number for AdamW."""
    for kind in ("momentum",) if is_muon else ("exp_avg", "exp_avg_sq"):
        kept[kind] += size
    kept["counters"] += 4 * (stepped and not is_muon)


# ---- Predicted, for the contenders ------------------------------------------------------------------------


def whole(layout: Layout, dp_rank: int, muon: Collection[int]) -> Kept:
    return predict_whole(layout.specs, muon)


def dealt(layout: Layout, dp_rank: int, muon: Collection[int]) -> Kept:
    return predict_dealt(layout.specs, layout.dp, dp_rank, muon)


def by_rows(layout: Layout, dp_rank: int, muon: Collection[int]) -> Kept:
    return predict_rows(layout.specs, layout.dp, dp_rank, muon)


# What the map is planned for, and how the contender lays it out; on one DP rank all four ways are the same.
LAID_OUT: dict[str, tuple[str, Callable[[Layout, int, Collection[int]], Kept]]] = {
    "ddp": ("adamw", whole),
    "zero1": ("adamw", predict_shards),
    "torch_zero": ("adamw", dealt),
    "muon": ("muon", predict_shards),
    "muon_ddp": ("muon", whole),
    "muon_fsdp2": ("muon", by_rows),
}


def predict_kept(name: str, workload: Workload, dp: int, tp: int, dp_rank: int) -> Kept:
    """Return what the contender `name` will keep on the ranks with this `dp_rank`; starts nothing."""
    algorithm, predict = LAID_OUT[name]
    layout, muon, _ = workload.plan(dp, tp, algorithm)
    return predict(layout, dp_rank, muon)
