"""What the ranks of a TP group find out about tensor-parallel layers and models: outputs, gradients, traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distmuon.launch import World
from distmuon.models.networks import ALONE, MLP, Transformer, initial_weights
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_parallel import (
    ColumnParallelLinear,
    CopyToTP,
    RowParallelLinear,
    SumOverTP,
    load_slices,
    tp_split_dim,
    whole_parameters,
)
from distmuon.verify.counter import CollectiveCounter

INPUTS, OUTPUTS, BATCH = 8, 12, (2, 5)
ROWS, VOCABULARY, CONTEXT = 6, 11, 7


def synthetic(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_linear(bias: bool, inputs: int = INPUTS, outputs: int = OUTPUTS, seed: int = 1) -> dict[str, Tensor]:
    weights = {"weight": synthetic(outputs, inputs, seed=seed), "bias": synthetic(outputs, seed=seed + 1)}
    return weights if bias else {"weight": weights["weight"]}


def gradients(module: nn.Module) -> dict[str, tuple[int | None, Tensor | None]]:
    return {name: (tp_split_dim(p), p.grad) for name, p in module.named_parameters()}


def slice_of(whole: Tensor, dim: int, group: Group) -> Tensor:
    return whole.chunk(group.size, dim)[group.rank]


# ---- Layers -----------------------------------------------------------------------------------------------


def layer_facts(world: World) -> dict[str, Any]:
    tp = Grid.of(world).tp
    return {
        "column": {bias: column(tp, bias) for bias in (True, False)},
        "row": {bias: row(tp, bias) for bias in (True, False)},
        "shared copy": shared_copy(tp),
        "inputs after": inputs_after(tp),
        "pair": pair(tp),
        "slices": load_and_gather(tp),
    }


def column(tp: Group, bias: bool) -> dict[str, Any]:
    layer = ColumnParallelLinear(INPUTS, OUTPUTS, tp, bias).double()
    load_slices(layer, whole_linear(bias), tp)
    x = synthetic(*BATCH, INPUTS).requires_grad_()
    y = layer(x)
    y.backward(slice_of(synthetic(*BATCH, OUTPUTS, seed=9), -1, tp))
    return {"y": y.detach(), "x": x.grad, "parameters": gradients(layer)}


def row(tp: Group, bias: bool) -> dict[str, Any]:
    layer = RowParallelLinear(OUTPUTS, INPUTS, tp, bias).double()
    load_slices(layer, whole_linear(bias, OUTPUTS, INPUTS), tp)
    x = slice_of(synthetic(*BATCH, OUTPUTS), -1, tp).clone().requires_grad_()
    y = layer(x)
    y.backward(synthetic(*BATCH, INPUTS, seed=9))
    return {"y": y.detach(), "x": x.grad, "parameters": gradients(layer)}


def shared_copy(tp: Group) -> dict[str, Any]:
    """Let two layers share one copy of their input."""
    first, second = (ColumnParallelLinear(INPUTS, OUTPUTS, tp, bias=False).double() for _ in range(2))
    load_slices(first, whole_linear(False, seed=0), tp)
    load_slices(second, whole_linear(False, seed=10), tp)
    x = synthetic(*BATCH, INPUTS).requires_grad_()
    before = tp.ledger.total().calls
    copied = first.copy_in(x)
    (first(copied, copied=True).square().sum() + second(copied, copied=True).square().sum()).backward()
    return {"x": x.grad, "collectives": tp.ledger.total().calls - before}


def inputs_after(tp: Group) -> dict[str, tuple[Tensor, Tensor]]:
    """Return, for both collectives, what they were given as it was and as it is afterwards: others may hold it too."""
    x, partial, gradient = synthetic(INPUTS).requires_grad_(), synthetic(INPUTS), synthetic(INPUTS, seed=1)
    SumOverTP.apply(partial, tp, "sum")
    CopyToTP.apply(x, tp, "copy").backward(gradient)
    return {"sum": (synthetic(INPUTS), partial), "copy": (synthetic(INPUTS, seed=1), gradient)}


def pair(tp: Group) -> dict[str, Any]:
    """Count what a column- and a row-parallel layer in a row send: the rows of the ledger, and an independent count."""
    tp.ledger.clear()
    first = ColumnParallelLinear(INPUTS, OUTPUTS, tp, name="up").double()
    second = RowParallelLinear(OUTPUTS, INPUTS, tp, name="down").double()
    x = synthetic(*BATCH, INPUTS).requires_grad_()
    with CollectiveCounter() as counter:
        y = second(F.relu(first(x)))
        forward = [entry.label for entry, _ in tp.ledger]
        y.sum().backward()
    return {
        "forward": forward,
        "all": {entry.label: traffic for entry, traffic in tp.ledger},
        "counted": counter.ledger.by_collective() == tp.ledger.by_collective(),
    }


def load_and_gather(tp: Group) -> dict[str, Any]:
    model = nn.ModuleDict(
        {
            "column": ColumnParallelLinear(INPUTS, OUTPUTS, tp),
            "row": RowParallelLinear(OUTPUTS, INPUTS, tp),
            "norm": nn.LayerNorm(OUTPUTS),
        }
    ).double()
    full = {
        f"{layer}.{name}": synthetic(*shape, seed=len(layer + name))
        for layer, shapes in (
            ("column", {"weight": (OUTPUTS, INPUTS), "bias": (OUTPUTS,)}),
            ("row", {"weight": (INPUTS, OUTPUTS), "bias": (INPUTS,)}),
            ("norm", {"weight": (OUTPUTS,), "bias": (OUTPUTS,)}),
        )
        for name, shape in shapes.items()
    }
    load_slices(model, full, tp)
    local = {name: p.detach().clone() for name, p in model.named_parameters()}
    whole = whole_parameters(model, tp)
    kept = {name: value.clone() for name, value in whole.items()}
    for p in model.parameters():
        p.data.fill_(0)
    load_slices(model, whole, tp)
    again = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"full": full, "whole": kept, "whole later": whole, "local": local, "again": again}


# ---- Models -----------------------------------------------------------------------------------------------


def make_mlp(tp: Group) -> MLP:
    return MLP((6, 8, 12, 8, 12, 8, 3), tp)  # two pairs, an odd hidden layer, the head


def make_transformer(tp: Group) -> Transformer:
    return Transformer(VOCABULARY, 16, layers=2, heads=4, context=CONTEXT, tp=tp)


MODELS: dict[str, Callable[[Group], Any]] = {"mlp": make_mlp, "transformer": make_transformer}


def batch(name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs and labels."""
    if name == "mlp":
        return synthetic(ROWS, 6, seed=seed), torch.arange(ROWS) % 3
    ids = torch.randint(VOCABULARY, (3, CONTEXT), generator=torch.Generator().manual_seed(seed))
    return ids, ids.roll(-1, 1).flatten()


def loss_of(model: nn.Module, name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits [rows, classes] and the mean loss."""
    inputs, labels = batch(name, seed)
    dtype = next(model.parameters()).dtype
    logits = model(inputs.to(dtype) if inputs.is_floating_point() else inputs).flatten(0, -2)
    return logits, F.cross_entropy(logits, labels)


def start(name: str, tp: Group, dtype: torch.dtype) -> Any:
    """Return the model cut over TP, from the seeded whole weights: not the zeros and ones where mistakes can hide."""
    model = MODELS[name](tp).to(dtype)
    whole = initial_weights(MODELS[name](ALONE), seed=3)
    noise = {key: 0.1 * synthetic(*value.shape, seed=i) for i, (key, value) in enumerate(whole.items())}
    load_slices(model, {key: value + noise[key] for key, value in whole.items()}, tp)
    return model


def model_facts(world: World) -> dict[str, Any]:
    grid = Grid.of(world)
    found: dict[str, Any] = {name: forward_and_backward(name, grid) for name in MODELS}
    dtypes = (torch.float32, torch.bfloat16)
    found["trained"] = {(name, str(dtype)): train(name, grid, dtype) for name in MODELS for dtype in dtypes}
    return found


def forward_and_backward(name: str, grid: Grid) -> dict[str, Any]:
    model = start(name, grid.tp, torch.float64)
    grid.ledger.clear()
    with CollectiveCounter() as counter:
        logits, loss = loss_of(model, name)
        loss.backward()
    predicted = Ledger()
    model.predict_activations(predicted, rows=len(logits), item_bytes=8, tp=grid.tp.size)
    return {
        "logits": logits.detach(),
        "loss": loss.detach(),
        "parameters": gradients(model),
        "differences": predicted.differences(grid.ledger),
        "predicted": predicted.by_collective(),
        "counted": counter.ledger.by_collective(),
    }


def train(name: str, grid: Grid, dtype: torch.dtype) -> dict[str, Any]:
    """Train, each DP rank on its own rows; return TP-local parameters by name, which have moved, which are split."""
    model = start(name, grid.tp, dtype)
    before = local(model.named_parameters())
    optimizer = DistributedMuon(split_parameters(model), grid, bucket_size=500, lr=0.01)
    losses = []
    for step in range(4):
        _, loss = loss_of(model, name, seed=10 * step + grid.dp.rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = local(model.named_parameters())
    moved = [key for key in after if not torch.equal(after[key], before[key])]
    split = [key for key, p in model.named_parameters() if tp_split_dim(p) is not None]
    return {"after": after, "moved": moved, "split": split, "losses": losses}


def local(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named}
