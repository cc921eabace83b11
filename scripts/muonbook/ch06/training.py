"""ZeRO-1 AdamW, trained and certified; what it keeps and sends is counted and predicted."""

from __future__ import annotations

from distmuon.launch import World
from distmuon.models.recipe import Recipe
from distmuon.sharding.grid import Grid
from distmuon.verify.certificate import backward, synthetic_gradients
from distmuon.verify.model_states import KINDS, ModelStates, count, predict_shards
from distmuon.verify.training import plan_run
from muonbook import certified
from muonbook.certified import CertifiedRun
from muonbook.measure.baselines import Trainer

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
