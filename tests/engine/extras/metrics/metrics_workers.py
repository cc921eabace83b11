"""What every rank observes of the same training: on flat shards of several grids, and on the meshes of MuonW."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mesh_cases import WRAPS, Net, groups_of, plain, start
from mesh_cases import give as give_placed
from optimizer_cases import ADAMW, Case, build, cut, several, whole_gradient
from torch import Tensor, nn

from distmuon.launch import World
from distmuon.metrics import JsonLines, Metrics
from distmuon.optim.muon import Muon
from distmuon.optim.muonw import MuonW
from distmuon.sharding import hooks
from distmuon.sharding.consistency import RankMismatchError
from distmuon.sharding.grid import Grid

Record = dict[str, Any]
STEPS, ABSENT = 2, "whole qkv"
ALL, SOME = 1000, 8  # samples: every matrix there is; the first ones, then others


def flat_case(tp: int, dtype: str, algorithm: str = "muon") -> Case:
    """Return parameters with several matrices each, cut over T ranks in every way: the same whole ones for any T."""
    case = several(tp).of_dtype(getattr(torch, dtype))
    if algorithm == "adamw":
        return replace(case, groups=(ADAMW,), weights=tuple(w._replace(group=0) for w in case.weights))
    return case


def give(case: Case, grid: Grid, parameters: dict[str, nn.Parameter], step: int, factor: float = 1.0) -> None:
    """Set the same gradients on all DP ranks, whose mean is then to the bit theirs; one has none in the second step."""
    for w in case.weights:
        whole = whole_gradient(case, w, grid.tp.size, step, 0)
        assert whole is not None
        mine = cut(whole * factor, w.dim, grid.tp.size, grid.tp.rank, w.rows)
        parameters[w.name].grad = None if (step, w.name) == (1, ABSENT) else mine


def train_flat(grid: Grid, dtype: str, algorithm: str = "muon", samples: int = SOME, **options: Any) -> list[Record]:
    case = flat_case(grid.tp.size, dtype, algorithm)
    parameters, optimizer = build(case, grid, **options)
    records = []
    with Metrics(optimizer, every=1, samples=samples) as metrics:
        for step in range(STEPS):
            give(case, grid, parameters, step)
            sent = optimizer.grid.ledger.total().sent_bytes
            optimizer.step()
            records.append(metrics.latest | {"told": optimizer.grid.ledger.total().sent_bytes - sent})
    return records


WAYS: dict[str, dict[str, Any]] = {
    "gather_all": {"dtype": "float32"},
    "gather_all, float64, every matrix": {"dtype": "float64", "samples": ALL},
    "gather_all, bf16 with masters": {"dtype": "bfloat16"},
    "gather_cut, clipped": {"dtype": "float32", "strategy": "gather_cut", "max_norm": 0.5},
    "owner": {"dtype": "float32", "strategy": "owner"},
    "adamw": {"dtype": "float32", "algorithm": "adamw"},
    "blockwise": {"dtype": "float32", "strategy": "blockwise"},
}


def on_shards(world: World, ways: Iterable[str], folder: str | None = None) -> dict[str, Any]:
    """Return the records of every way to train; with a folder, what else this rank finds out."""
    grid = Grid.of(world)
    found: dict[str, Any] = {way: train_flat(grid, **WAYS[way]) for way in ways}
    if folder is not None:
        found |= {"bad days": bad_days(grid), "words": words(grid, folder), "scalars": scalars(grid, folder)}
    return found | {"hooks left": len(hooks._around_kinds)}


def bad_days(grid: Grid) -> list[Record]:
    """Observe a skipped step, then a good one; a step that raises, then a good one."""
    case, records = flat_case(grid.tp.size, "float32"), []
    for how in ("skip", "raise"):
        parameters, optimizer = build(case, grid, on_nonfinite=how)
        metrics = Metrics(optimizer, every=1, samples=1)
        for step, factor in enumerate((torch.nan, 1.0)):
            give(case, grid, parameters, step, factor)
            try:
                optimizer.step()
            except FloatingPointError:
                records.append(metrics.latest | {"hooks": len(hooks._around_kinds)})
            else:
                records.append(metrics.latest)
        metrics.close()
    return records


def words(grid: Grid, folder: str) -> list[str]:
    """Return what is said where ranks ask for different things, or rank 0 for a file that is none."""
    _, optimizer = build(flat_case(grid.tp.size, "float32"), grid)
    other = grid.world.rank == 1
    asked: list[dict[str, Any]] = [
        {"every": 3 if other else 2},
        {"scalars": {"loss": "max" if other else "mean"}},
        {"every": 0 if other else 1},
        {"to": [JsonLines(folder)]},
    ]
    said = []
    for arguments in asked:
        try:
            Metrics(optimizer, **arguments)
        except RankMismatchError as error:
            said.append(str(error))
    return said


def scalars(grid: Grid, folder: str) -> Record:
    """Record numbers that differ by rank, one of them on rank 1 alone; only rank 0 of all writers is to write."""
    case = flat_case(grid.tp.size, "float32")
    parameters, optimizer = build(case, grid)
    announced = {"loss": "mean", "tokens": "sum", "logit": "max", "rare": "max", "never": "sum", "broken": "max"}
    announced |= {"of others": "sum"}
    rank, path = grid.world.rank, Path(folder, "all.jsonl")
    with Metrics(optimizer, every=2, to=[JsonLines(path)], scalars=announced, start=4) as metrics:
        for step in range(5):
            give(case, grid, parameters, 0)
            metrics.record(loss=torch.tensor(float(rank + step)), tokens=rank + 1, logit=-5.0 - rank)
            metrics.record(broken=torch.nan if rank == 2 else 1.0)
            if rank == 1:
                metrics.record(rare=7, **{"of others": 7})  # of a rank that sums leave out
            optimizer.step()
        return metrics.latest


# ---- On meshes --------------------------------------------------------------------------------------------


def train_placed(world: World, wrap: Any, dtype: str, reference: bool = False) -> list[Record]:
    torch.manual_seed(0)
    net = Net().to(getattr(torch, dtype))
    start(net)
    model = wrap(world, net)
    optimizer = MuonW(groups_of(model), batched=False)
    records = []
    with Metrics(optimizer, every=1, samples=ALL) as metrics:
        for step in range(STEPS):
            give_placed(model, step, absent=("odd.weight",) if step == 1 else ())
            before = {name: p.detach().clone() for name, p in model.named_parameters()} if reference else {}
            optimizer.step()
            records.append(metrics.latest | ({"expected": expected(model, optimizer, before)} if reference else {}))
    return records


def expected(model: nn.Module, optimizer: Any, before: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the same numbers by singular values of whole matrices, and of parameters by plain sums."""
    samples: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    groups = {name: g for g in optimizer.param_groups for name in g["param_names"]}
    for name, p in model.named_parameters():
        group = groups[name]
        lr, decay = group["lr"], group["weight_decay"]
        state = optimizer.state[p]
        momentum = state["momentum_buffer"] if "momentum_buffer" in state else state["exp_avg"]
        one: dict[str, Any] = {"weight_rms": p.detach().double().square().mean().sqrt().item()}
        one |= {"momentum_norm": momentum.double().norm().item(), "update_rms": None, "gradient_norm": None}
        if p.grad is not None:
            moved = ((1 - lr * decay) * before[name] - p.detach()) / lr
            one |= {"update_rms": moved.double().square().mean().sqrt().item()}
            one |= {"gradient_norm": p.grad.double().norm().item()}
            if group["algorithm"] == "muon":
                seen_in = torch.float64 if p.dtype == torch.float64 else torch.bfloat16
                for label, o, m in matrices(name, moved, fed_of(p.grad, momentum, group).to(seen_in), group):
                    samples[label] = by_svd(o, m, group["scale"])
        parameters[name] = one
    return samples, parameters


def fed_of(gradient: Tensor, momentum: Tensor, group: dict[str, Any]) -> Tensor:
    """Return what Newton–Schulz is fed, from the momentum after the step."""
    mu, average = group["momentum"], group["momentum_kind"] == "average"
    if not group["nesterov"]:
        return momentum
    return (1 - mu) * gradient + mu * momentum if average else gradient + mu * momentum


def matrices(name: str, o: Tensor, m: Tensor, group: dict[str, Any]) -> list[tuple[str, Tensor, Tensor]]:
    """Return (label, O, M) of the matrices in a parameter of the case: written out, case by case."""
    if name == "experts":
        return [(f"{name}[{i}]", o[i], m[i]) for i in range(len(o))]
    if name == "fused":
        rows = [4, 4, 4, 4]
        return [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(o.split(rows), m.split(rows), strict=True))]
    return [(name, o.flatten(1), m.flatten(1))]


def by_svd(o: Tensor, m: Tensor, scale: str) -> dict[str, Any]:
    a, b = o.shape
    o = o.double() / (0.2 * max(a, b) ** 0.5 if scale == "match_rms" else max(1.0, a / b) ** 0.5)
    s = torch.linalg.svdvals(o)
    left, lengths, right = torch.linalg.svd(m.double(), full_matrices=False)
    assert lengths[-1] > 1e-5 * lengths[0]
    polar = left @ right
    whole = min(a, b)
    gram = o @ o.T if a <= b else o.T @ o
    error = (gram - torch.eye(whole, dtype=gram.dtype)).norm() / whole**0.5
    levels = torch.tensor([0, 0.1, 0.5, 0.9, 1], dtype=torch.float64)
    cosine = (o * polar).sum() / o.norm() / polar.norm()
    return {"error": error.item(), "cosine": cosine.item(), "singular_values": s.quantile(levels).tolist()}


def on_meshes(world: World) -> dict[str, Any]:
    """Return the records of every mesh, and of a plain model."""
    found: dict[str, Any] = {}
    for dtype in ("float32", "float64"):
        found[f"plain {dtype}"] = train_placed(world, plain, dtype, reference=True)
    for wrap in WRAPS:
        found[wrap] = train_placed(world, WRAPS[wrap], "float32")
    return found | {"plain tensors": plain_tensors(world)}


def plain_tensors(world: World) -> Record:
    """Let every rank train a layer of its own, as it would under DDP."""
    layer = nn.Linear(3, 2, bias=False)
    optimizer = Muon(layer.parameters())
    with Metrics(optimizer, every=1) as metrics:
        layer(torch.full((1, 3), float(world.rank + 1))).sum().backward()
        optimizer.step()
        return metrics.latest


def alone(world: World) -> dict[str, Any]:
    """Return what one process observes on the same gradients."""
    return {way: train_flat(Grid.alone(), **WAYS[way]) for way in WAYS if way != "blockwise"}
