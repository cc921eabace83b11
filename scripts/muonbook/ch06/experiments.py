"""Chapter 6's experiments: ZeRO-1 AdamW, trained and certified, and other ways to be data parallel on one model.

DDP and FSDP2 are torch's own, ZeRO-1 is ours. Kept are bytes of storages that really exist, found by walking
parameters, gradients and the optimizer's state; sent are those of the collectives that torch's dispatcher saw, by the
ring formula. Predictions come from shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from distmuon.launch import World
from distmuon.models.networks import MLP
from distmuon.models.recipe import Recipe
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ITEM_BYTES
from distmuon.sharding.ledger import ring_bytes
from distmuon.verify.certificate import backward, synthetic_gradients
from distmuon.verify.counter import CollectiveCounter
from distmuon.verify.model_states import KINDS, ModelStates, count, predict_replicas, predict_rows, predict_shards
from distmuon.verify.prediction import predict_step
from distmuon.verify.training import initial_parameters, network, optimizer_of, plan_run
from muonbook import certified
from muonbook.certified import CertifiedRun
from muonbook.measure.trainers import Trainer, data_parallel, shard_by_rows

# ---- ZeRO-1, certified ------------------------------------------------------------------------------------

PURPOSES = {
    ("reduce_scatter", "dp"): "gradients",
    ("all_reduce", "world"): "gradient summary",
    ("all_gather", "dp"): "parameters",
    ("all_reduce", "dp"): "loss, to print",
}
SHOWN = [kind for kind in KINDS if kind not in ("momentum", "counters")]  # nothing is Muon; a few bytes


def train(world: World, recipe: Recipe) -> tuple[CertifiedRun, list[ModelStates]] | None:
    """Train under certificate; then take one step on made-up gradients, and count what every rank keeps."""
    grid = Grid.of(world)
    run = certified.train(world, recipe, grid)
    problem = certified.on_digits(recipe, grid)
    model, _, optimizer = problem.on_grid(grid)
    backward(model, synthetic_gradients(problem, 0, grid.dp.rank))
    optimizer.step()
    states = world.gather(count(Trainer(model, [optimizer]).tensors()))
    return None if run is None or states is None else (run, states)


def report(found: tuple[CertifiedRun, list[ModelStates]], recipe: Recipe, dp: int, threads: int) -> tuple[bool, None]:
    """Judge the run; print verdicts and bytes."""
    run, states = found
    verdict, layout = certified.judge(run, recipe, dp, 1, threads), plan_run(recipe, dp, 1)[0]
    print(f"ZeRO-1 AdamW on {dp} DP ranks, {recipe.dtype}: loss {run.losses[0]:.2f} -> {run.losses[-1]:.2f}.")
    print(f"Same gradients, sharded and in torch.optim.AdamW alone, bitwise equal: {verdict.exact}.")
    print(f"Trained in float32, {verdict.measured}: {verdict.unrounded}.")
    print(f"Every rank ends with the same parameters: {run.replicas_agree}.\n")
    print("Bytes kept by" + "".join(f"{kind:>11}" for kind in SHOWN))
    for number, rank in enumerate(states):
        print(f"  DP rank {number}  " + "".join(f"{rank[kind]:>11,}" for kind in SHOWN))
    title = f"DP rank 0 sends per step ({recipe.micro_batches // dp} micro-batches)"
    print(f"\n{title:<44}calls     counted   predicted")
    predicted = verdict.predicted[0].by_collective()
    for (op, group), traffic in run.ledgers[0].by_collective().items():
        calls, counted = traffic.calls // recipe.steps, traffic.sent_bytes // recipe.steps
        foretold = predicted[op, group].sent_bytes // recipe.steps
        print(f"  {op:<16}{group:<8}{PURPOSES[op, group]:<16}{calls:>7}{counted:>12,}{foretold:>12,}")
    as_predicted = verdict.as_predicted and states == [predict_shards(layout, rank) for rank in range(dp)]
    print(f"Every rank, kind and collective, counted = predicted: {as_predicted}.")
    return verdict.exact and verdict.unrounded and run.replicas_agree and as_predicted, None


# ---- What a baseline keeps and sends ------------------------------------------------------------------------


class Cost(NamedTuple):
    """What one rank keeps between steps, bytes per kind, and the bytes it sends in one step over the DP group."""

    states: ModelStates
    sent: int


Costs = dict[tuple[str, str], tuple[Cost, Cost]]  # (dtype, baseline) -> counted, predicted

# ---- Baselines: each returns (counted, predicted) ------------------------------------------------------


def zero1(recipe: Recipe, grid: Grid) -> tuple[Cost, Cost]:
    """ZeRO-1 AdamW: gradients are reduced in float32, parameters gathered in the model's dtype."""
    model = _model(recipe, grid)
    optimizer = optimizer_of(recipe, model, grid)
    layout, rank = plan_run(recipe, grid.dp.size, 1)[0], grid.dp.rank
    sent = predict_step(layout, 1, rank).total(group="dp").sent_bytes
    return _count(Trainer(model, [optimizer]), recipe, grid), Cost(predict_shards(layout, rank), sent)


def plain(recipe: Recipe, grid: Grid) -> tuple[Cost, Cost]:
    """The same gradients and masters, and nothing cut: one all-reduce in float32, then the optimizer works alone."""
    model = _model(recipe, grid)
    optimizer = Zero1AdamW(model.named_parameters(), Grid.alone(str(grid.device)))

    def average() -> None:
        for flat in optimizer.buffers.flat_gradients:
            grid.dp.all_reduce(flat, "gradients").div_(grid.dp.size)

    layout = optimizer.buffers.layout  # a map for D = 1
    sent = sum(ring_bytes("all_reduce", b.size * ITEM_BYTES[b.grad_dtype], grid.dp.size) for b in layout.buffers)
    return _count(Trainer(model, [optimizer]), recipe, grid, average), Cost(predict_shards(layout, 0), sent)


def ddp(recipe: Recipe, grid: Grid) -> tuple[Cost, Cost]:
    """torch's DistributedDataParallel and AdamW: everything whole, and everything in the model's dtype."""
    model = _model(recipe, grid)
    trainer = Trainer(data_parallel(model, grid), [torch.optim.AdamW(model.parameters())])
    states = predict_replicas(plan_run(recipe, grid.dp.size, 1)[0])
    return _count(trainer, recipe, grid), Cost(states, ring_bytes("all_reduce", states["gradients"], grid.dp.size))


def fsdp2(recipe: Recipe, grid: Grid) -> tuple[Cost, Cost]:
    """torch's FSDP2, layer by layer: float32 shards that are cast to the model's dtype when they are gathered.

    A layer is gathered twice, its gradients are reduced once.
    """
    model, size, item = _model(recipe, grid).float(), grid.dp.size, recipe.torch_dtype.itemsize
    policy = MixedPrecisionPolicy(param_dtype=recipe.torch_dtype, reduce_dtype=torch.float32)
    shard_by_rows([*model.layers, model.head, model], grid, mp_policy=policy)
    counted = _count(Trainer(model, [torch.optim.AdamW(model.parameters())]), recipe, grid)
    states = predict_rows(plan_run(replace(recipe, dtype="float32"), size, 1)[0], grid.dp.rank)
    padded = size * states["parameters"] // 4  # elements
    sent = 2 * ring_bytes("all_gather", padded * item, size) + ring_bytes("reduce_scatter", padded * 4, size)
    costs = counted, Cost(states, sent)
    if recipe.dtype != "float32":  # the float32 shards are the masters of what is gathered
        for cost in costs:
            cost.states.update(parameters=0, masters=cost.states["parameters"])
    return costs


BASELINES: dict[tuple[str, str], Callable[[Recipe, Grid], tuple[Cost, Cost]]] = {
    ("float32", "DDP"): ddp,
    ("float32", "ZeRO-1"): zero1,
    ("float32", "FSDP2"): fsdp2,
    ("bfloat16", "DDP, no masters"): ddp,
    ("bfloat16", "plain, masters"): plain,
    ("bfloat16", "ZeRO-1"): zero1,
    ("bfloat16", "FSDP2"): fsdp2,
}


def compare(world: World, recipe: Recipe) -> list[Costs] | None:
    """Train a little in each baseline; return, on rank 0, what every rank counted, and what was predicted."""
    grid = Grid.of(world)
    return world.gather({
        (dtype, name): baseline(replace(recipe, dtype=dtype), grid) for (dtype, name), baseline in BASELINES.items()
    })  # fmt: skip


def report_baselines(ranks: list[Costs], recipe: Recipe) -> tuple[bool, list[dict[str, Any]]]:
    """Print bytes per parameter of every baseline; return whether all that was counted was predicted, and rank 0's."""
    parameters = sum(spec.numel for spec in plan_run(recipe, 1, 1)[0].specs)
    rows: list[dict[str, Any]] = []
    for (dtype, baseline), (counted, _) in ranks[0].items():
        kept = {k: size / parameters for k, size in counted.states.items() if k not in ("momentum", "counters")}
        rows.append({"dtype": dtype, "baseline": baseline, "kept": kept, "sent": counted.sent / parameters})
    print(f"Bytes per parameter on rank 0 of {len(ranks)}")
    print(f"{'':<26}params   grads masters   m, v    kept    sent")
    for row in rows:
        weights, gradients, masters, *moments = row["kept"].values()
        columns = (weights, gradients, masters, sum(moments), sum(row["kept"].values()), row["sent"])
        print(f"{row['dtype']:<9} {row['baseline']:<15}" + "".join(f"{value:>7.2f} " for value in columns).rstrip())
    right = all(counted == predicted for rank in ranks for counted, predicted in rank.values())
    print(f"Every rank, baseline and kind, counted = predicted to the byte: {right}.")
    return right, rows


def _model(recipe: Recipe, grid: Grid) -> MLP:
    model = network(recipe).to(grid.device)
    model.load_state_dict(initial_parameters(recipe))
    return model


def _count(trainer: Trainer, recipe: Recipe, grid: Grid, before_update: Callable[[], object] = lambda: None) -> Cost:
    """Take three steps on made-up data; return the cost of the last, for DDP arranges itself in the first two."""
    states: ModelStates = {}

    def look() -> None:
        before_update()
        states.update(count(trainer.tensors()))

    labels = torch.zeros(8, dtype=torch.int64, device=grid.device)
    for number in range(3):
        x = torch.randn(len(labels), recipe.widths[0], generator=torch.Generator().manual_seed(number))
        with CollectiveCounter() as counter:
            trainer.step((x.to(grid.device, recipe.torch_dtype), labels), look)
    return Cost(states, counter.ledger.total(group="dp").sent_bytes)
