"""Six ways to train one model on one grid: what is compared throughout part III.

    contender   gradients       optimizer's state                     whose code
    ddp         all-reduced     whole on every rank, AdamW            torch: DistributedDataParallel
    zero1       reduce-scatter  1/D, AdamW                            ours
    torch_zero  all-reduced     whole parameters dealt out, AdamW     torch: ZeroRedundancyOptimizer
    muon        reduce-scatter  1/D, Muon gather_all                  ours
    muon_ddp    all-reduced     whole on every rank, Muon             torch's DDP, our single-device Muon
    muon_fsdp2  reduce-scatter  1/D by rows, torch.optim.Muon         torch: FSDP2, DTensor

All start from the same weights and read the same data. Those that keep whole matrices on every rank, or let DTensor
find out, know nothing of our TP layers: with T > 1 their Newton–Schulz would see blocks, so they refuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distmuon.models.networks import Transformer
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import Muon
from distmuon.optim.sharded_optimizer import Zero1AdamW
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ITEM_BYTES
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_parallel import load_slices
from distmuon.verify.prediction import predict_step
from muonbook.measure.workload import Workload, groups_of

ONE_BUCKET = 1e4  # MB: larger than any gradient here, so that DDP sends all of it in one call


@dataclass
class Trainer:
    """A contender at work on one rank. model: called with token ids. optimizers: stepped one after the other."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

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


@dataclass(frozen=True)
class Contender:
    """One of the six.

    title: for tables. make: (workload, grid, bucket_mb) -> Trainer; collective; bucket_mb is DDP's. predict: (workload,
    dp, tp, dp_rank) -> Ledger of one step with one micro-batch; None where torch's own planning decides, so that its
    collectives can only be counted. over_tp: may be cut over TP. ddp_alone: sends what DDP sends, and nothing else.
    """

    title: str
    make: Callable[[Workload, Grid, float | None], Trainer]
    predict: Callable[[Workload, int, int, int], Ledger] | None
    over_tp: bool
    ddp_alone: bool = False

    def admits(self, workload: Workload, dp: int, tp: int) -> bool:
        """Say whether this contender can train `workload` on a dp x tp grid."""
        return workload.fits(dp, tp) and (self.over_tp or tp == 1)


# ---- Making them ------------------------------------------------------------------------------------------


def sliced_model(workload: Workload, grid: Grid) -> Transformer:
    """Return this rank's slice of the model, on the grid's device, from the weights that all start from."""
    model = workload.model(grid.tp).to(grid.device)
    load_slices(model, {name: w.to(grid.device) for name, w in workload.weights().items()}, grid.tp)
    return model


def _parallel(model: nn.Module, grid: Grid, bucket_mb: float | None) -> nn.Module:
    """Wrap in DDP over the DP group; with D = 1 there is nobody to average with."""
    if grid.dp.size == 1:
        return model
    return nn.parallel.DistributedDataParallel(
        model, process_group=grid.dp.process_group, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
    )


def _adamw(workload: Workload, parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=workload.lr, weight_decay=workload.weight_decay)


def _by_algorithm(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (parameters for Muon, parameters for AdamW)."""
    found: dict[str, list[nn.Parameter]] = {"muon": [], "adamw": []}
    for group in groups_of(model, "muon"):
        found[group["algorithm"]] = [parameter for _, parameter in group["params"]]
    return found["muon"], found["adamw"]


def make_ddp(workload: Workload, grid: Grid, bucket_mb: float | None) -> Trainer:
    model = sliced_model(workload, grid)
    return Trainer(_parallel(model, grid, bucket_mb), [_adamw(workload, model.parameters())])


def make_zero1(workload: Workload, grid: Grid, bucket_mb: float | None = None) -> Trainer:
    model = sliced_model(workload, grid)
    options: dict[str, Any] = dict(bucket_size=workload.bucket_size, lr=workload.lr, weight_decay=workload.weight_decay)
    return Trainer(model, [Zero1AdamW(groups_of(model, "adamw"), grid, **options)])


def make_torch_zero(workload: Workload, grid: Grid, bucket_mb: float | None) -> Trainer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = sliced_model(workload, grid)
    if grid.dp.size == 1:
        return Trainer(model, [_adamw(workload, model.parameters())])
    options: dict[str, Any] = dict(lr=workload.lr, weight_decay=workload.weight_decay)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=grid.dp.process_group, **options
    )
    return Trainer(_parallel(model, grid, bucket_mb), [optimizer])


def make_muon(workload: Workload, grid: Grid, bucket_mb: float | None = None) -> Trainer:
    model = sliced_model(workload, grid)
    options: dict[str, Any] = dict(bucket_size=workload.bucket_size, lr=workload.lr, weight_decay=workload.weight_decay)
    if workload.gather_dtype is not None:
        options["gather_dtype"] = getattr(torch, workload.gather_dtype)
    return Trainer(model, [DistributedMuon(groups_of(model, "muon"), grid, **options)])


def make_muon_ddp(workload: Workload, grid: Grid, bucket_mb: float | None) -> Trainer:
    model = sliced_model(workload, grid)
    matrices, rest = _by_algorithm(model)
    muon = Muon(matrices, lr=workload.lr, weight_decay=workload.weight_decay, input_dtype=torch.bfloat16)
    return Trainer(_parallel(model, grid, bucket_mb), [muon, _adamw(workload, rest)])


def make_muon_fsdp2(workload: Workload, grid: Grid, bucket_mb: float | None = None) -> Trainer:
    model = sliced_model(workload, grid)
    if grid.dp.size > 1:
        from torch.distributed.fsdp import fully_shard

        assert grid.mesh is not None
        for part in (*model.blocks, model):
            fully_shard(part, mesh=grid.mesh["dp"])
    matrices, rest = _by_algorithm(model)
    options: dict[str, Any] = dict(lr=workload.lr, weight_decay=workload.weight_decay)
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)
    return Trainer(model, [muon, _adamw(workload, rest)])


# ---- Predicting what they send ----------------------------------------------------------------------------


def _activations(model: Transformer, workload: Workload, dp: int, tp: int) -> Ledger:
    ledger = Ledger()
    model.predict_activations(ledger, workload.tokens // dp, workload.torch_dtype.itemsize, tp)
    return ledger


def predict_ddp(workload: Workload, dp: int, tp: int, dp_rank: int) -> Ledger:
    """One all-reduce of all gradients, in the model's dtype."""
    layout, _, model = workload.plan(dp, tp, "adamw")
    ledger = _activations(model, workload, dp, tp)
    item = workload.torch_dtype.itemsize
    ledger.record("all_reduce", "dp", dp, item * sum(spec.numel for spec in layout.specs), "gradients")
    return ledger


def predict_torch_zero(workload: Workload, dp: int, tp: int, dp_rank: int) -> Ledger:
    """DDP's all-reduce; then every parameter is broadcast by the rank that keeps its state."""
    ledger = predict_ddp(workload, dp, tp, dp_rank)
    layout, _, _ = workload.plan(dp, tp, "adamw")
    for spec in layout.specs:
        ledger.record("broadcast", "dp", dp, spec.numel * ITEM_BYTES[spec.dtype], "parameters")
    return ledger


def _predict_ours(algorithm: str) -> Callable[[Workload, int, int, int], Ledger]:
    def predict(workload: Workload, dp: int, tp: int, dp_rank: int) -> Ledger:
        layout, muon, model = workload.plan(dp, tp, algorithm)
        ledger = _activations(model, workload, dp, tp)
        ledger.add(predict_step(layout, tp, dp_rank, muon, gather_dtype=workload.gather_dtype))
        return ledger

    return predict


predict_zero1, predict_muon = _predict_ours("adamw"), _predict_ours("muon")

CONTENDERS: dict[str, Contender] = {
    "ddp": Contender("AdamW, DDP", make_ddp, predict_ddp, over_tp=True, ddp_alone=True),
    "zero1": Contender("AdamW, ZeRO-1", make_zero1, predict_zero1, over_tp=True),
    "torch_zero": Contender("AdamW, torch's ZeRO-1", make_torch_zero, predict_torch_zero, over_tp=True),
    "muon": Contender("Muon, gather_all", make_muon, predict_muon, over_tp=True),
    "muon_ddp": Contender("Muon, DDP", make_muon_ddp, predict_ddp, over_tp=False, ddp_alone=True),
    "muon_fsdp2": Contender("torch Muon, FSDP2", make_muon_fsdp2, None, over_tp=False),
}
