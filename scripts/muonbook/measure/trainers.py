"""Ways to train one model on one grid: a model and its optimizers at work, and what a step of torch's own sends.

    maker            gradients       optimizer's state                     whose code
    make_ddp         all-reduced     whole on every rank, AdamW            torch: DistributedDataParallel
    make_zero1       reduce-scatter  1/D, AdamW                            ours
    make_torch_zero  all-reduced     whole parameters dealt out, AdamW     torch: ZeroRedundancyOptimizer
    make_strategy    reduce-scatter  1/D, Muon by strategy                 ours
    make_muon_ddp    all-reduced     whole on every rank, Muon             torch's DDP, our single-device Muon
    make_muon_fsdp2  reduce-scatter  1/D by rows, torch.optim.Muon         torch: FSDP2, DTensor
    make_fsdp2       reduce-scatter  1/D by rows, AdamW or MuonW           torch: FSDP2, DTensor

`muonbook.runnable_baselines` has what part III says of each. Chapter 6 wraps as they do. DDP reduces all gradients in
one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from distmuon.models.networks import Transformer
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import Muon
from distmuon.optim.muonw import MuonW
from distmuon.optim.param_groups import by_algorithm, groups_for
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from distmuon.sharding.hooks import hooked
from distmuon.sharding.layout import ITEM_BYTES
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_parallel import load_slices
from distmuon.verify import model_states
from muonbook.measure.workload import Workload

SAME_EVERYWHERE: dict[str, Any] = dict(compute_dtype=torch.float32, ns_form="standard")  # for counts of Muon
ONE_BUCKET = 1e4  # MB: larger than any gradient here, so that DDP sends all of it in one call


@dataclass
class Trainer:
    """A baseline at work on one rank. model: called with token ids. optimizers: stepped one after the other."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    def step(self, batch: tuple[Tensor, Tensor], before_update: Callable[[], object] = lambda: None) -> Tensor:
        """Take one training step on (inputs, targets); return this rank's mean loss.

        before_update: called once gradients exist, and before anybody uses them.
        """
        loss = self.forward_backward(*batch)
        before_update()
        self.update()
        return loss

    @hooked
    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Accumulate gradients of the mean loss over this rank's tokens; return that loss."""
        logits = self.model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1))
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """Take the optimizers' step and drop the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return all tensors that the rank keeps between backward pass and update, by kind: `model_states.count`."""
        weights: list[Tensor] = list(self.model.parameters())
        found: dict[str, list[Tensor]] = {kind: [] for kind in model_states.KINDS}
        found["parameters"] = weights
        found["gradients"] = [p.grad for p in weights if p.grad is not None]
        for optimizer in self.optimizers:
            inner = [optimizer, getattr(optimizer, "optim", None)]  # the second: inside torch's ZeroRedundancyOptimizer
            if isinstance(optimizer, ShardedOptimizer):
                found["parameters"] = list(optimizer.buffers.flat_parameters)
                found["gradients"] = list(optimizer.buffers.flat_gradients)
                found["masters"] += optimizer.buffers.masters.values()
            for one in filter(None, inner):
                for kind, tensors in model_states.by_kind(one.state.values()).items():
                    found[kind] += tensors
        return found


# ---- Wrapping what is torch's -----------------------------------------------------------------------------


def data_parallel(model: nn.Module, grid: Grid, bucket_mb: float | None = None) -> nn.Module:
    """Wrap in DDP over the DP group; with D = 1 there is nobody to average with."""
    if grid.dp.size == 1:
        return model
    return nn.parallel.DistributedDataParallel(
        model, process_group=grid.dp.process_group, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
    )


def shard_by_rows(parts: Iterable[nn.Module], grid: Grid, **options: Any) -> None:
    """Let FSDP2 cut the parameters over the DP group, part by part, the whole model last; with D = 1 nothing is cut.

    options: of `fully_shard`.
    """
    if grid.dp.size == 1:
        return
    assert grid.mesh is not None
    for part in parts:
        fully_shard(part, mesh=grid.mesh["dp"], **options)


# ---- Making them ------------------------------------------------------------------------------------------


def sliced_model(workload: Workload, grid: Grid) -> Transformer:
    """Return this rank's slice of the model, on the grid's device, from the weights that all start from."""
    model = workload.model(grid.tp).to(grid.device)
    load_slices(model, {name: w.to(grid.device) for name, w in workload.weights().items()}, grid.tp)
    return model


def _adamw(workload: Workload, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, **workload.hyperparameters)


def make_ddp(workload: Workload, grid: Grid) -> Trainer:
    model = sliced_model(workload, grid)
    return Trainer(data_parallel(model, grid, ONE_BUCKET), [_adamw(workload, model.parameters())])


def make_zero1(workload: Workload, grid: Grid) -> Trainer:
    model = sliced_model(workload, grid)
    options: dict[str, Any] = workload.hyperparameters | {"bucket_size": workload.bucket_size}
    return Trainer(model, [Zero1AdamW(groups_for(model, "adamw"), grid, **options)])


def make_torch_zero(workload: Workload, grid: Grid) -> Trainer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # 0.4 s, and no other baseline needs it

    if grid.dp.size == 1:
        return make_ddp(workload, grid)
    model = sliced_model(workload, grid)
    options: dict[str, Any] = workload.hyperparameters | {"process_group": grid.dp.process_group}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    return Trainer(data_parallel(model, grid, ONE_BUCKET), [optimizer])


def make_muon(workload: Workload, grid: Grid) -> Trainer:
    return make_strategy(workload, grid, "gather_all", workload.bucket_size)


def make_strategy(workload: Workload, grid: Grid, strategy: str, bucket_size: int) -> Trainer:
    """Return distributed Muon with one of its strategies. bucket_size: elements."""
    model = sliced_model(workload, grid)
    options: dict[str, Any] = workload.hyperparameters | {"strategy": strategy, "bucket_size": bucket_size}
    if workload.gather_dtype is not None:
        options["gather_dtype"] = getattr(torch, workload.gather_dtype)
    return Trainer(model, [DistributedMuon(groups_for(model, "muon"), grid, **options)])


def make_fsdp2(workload: Workload, grid: Grid, muonw: bool, **options: Any) -> Trainer:
    """Return torch's AdamW or our MuonW on FSDP2, layer by layer. options: of `fully_shard`."""
    model = sliced_model(workload, grid)
    shard_by_rows([*model.blocks, model], grid, **options)
    if muonw:
        return Trainer(model, [MuonW(groups_for(model, "muon"), **workload.hyperparameters)])
    return Trainer(model, [_adamw(workload, model.parameters())])


def make_muon_ddp(workload: Workload, grid: Grid) -> Trainer:
    model = sliced_model(workload, grid)
    chosen = by_algorithm(model)
    muon = Muon(chosen["muon"], input_dtype=torch.bfloat16, **workload.hyperparameters)
    return Trainer(data_parallel(model, grid, ONE_BUCKET), [muon, _adamw(workload, chosen["adamw"])])


def make_muon_fsdp2(workload: Workload, grid: Grid) -> Trainer:
    model = sliced_model(workload, grid)
    shard_by_rows([*model.blocks, model], grid)
    chosen = by_algorithm(model)
    muon = torch.optim.Muon(chosen["muon"], adjust_lr_fn="match_rms_adamw", **workload.hyperparameters)
    return Trainer(model, [muon, _adamw(workload, chosen["adamw"])])


# ---- Predicting what they send ----------------------------------------------------------------------------


def predict_activations(model: Transformer, workload: Workload, dp: int, tp: int) -> Ledger:
    """Return what a rank's model sends in forward and backward, of one micro-batch."""
    ledger = Ledger()
    model.predict_activations(ledger, workload.tokens // dp, workload.torch_dtype.itemsize, tp)
    return ledger


def predict_ddp(workload: Workload, dp: int, tp: int, place: tuple[int, int]) -> Ledger:
    """One all-reduce of all gradients, in the model's dtype."""
    layout, _, model = workload.plan(dp, tp, "adamw")
    ledger = predict_activations(model, workload, dp, tp)
    item = workload.torch_dtype.itemsize
    ledger.record("all_reduce", "dp", dp, item * sum(spec.numel for spec in layout.specs), "gradients")
    return ledger


def predict_torch_zero(workload: Workload, dp: int, tp: int, place: tuple[int, int]) -> Ledger:
    """DDP's all-reduce; then every parameter is broadcast by the rank that keeps its state."""
    ledger = predict_ddp(workload, dp, tp, place)
    layout, _, _ = workload.plan(dp, tp, "adamw")
    for spec in layout.specs:
        ledger.record("broadcast", "dp", dp, spec.numel * ITEM_BYTES[spec.dtype], "parameters")
    return ledger
