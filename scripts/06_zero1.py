"""Chapter 6: ZeRO-1 AdamW. Train it, certify it and count its bytes; follow one bucket; or compare with its relatives.

python scripts/06_zero1.py --dp 4
python scripts/06_zero1.py --follow --json out/follow.json
python scripts/06_zero1.py --compare --json out/compare.json
"""

from typing import Any

from distmuon import launch
from distmuon.models.recipe import DTYPES, Recipe
from muonbook.ch06 import puzzle as sharded_step
from muonbook.puzzles import add_arguments, handle

TINY = 8  # elements of the bucket to follow
PURPOSES = {
    ("reduce_scatter", "dp"): "gradients",
    ("all_reduce", "world"): "their norms",
    ("all_gather", "dp"): "parameters",
    ("all_reduce", "dp"): "loss, to print",
}

# ---- Train and certify ------------------------------------------------------------------------------------


def train(world, recipe):
    """Train on the grid with the ledger open; then make the exact certificate's run, and count what it keeps."""
    from distmuon.models.digits import digits
    from distmuon.sharding.grid import Grid
    from distmuon.verify.certificate import exact_on_grid, made_up_gradients, replicas_agree
    from distmuon.verify.training import build, train_on_grid
    from muonbook.ch06.data_parallel import held_by_zero1

    grid = Grid.of(world)
    data, _ = digits(grid, recipe.seed)
    grid.ledger.clear()
    run = train_on_grid(recipe, grid, data)
    ledger = dict(grid.ledger.by_collective())
    alike = replicas_agree(run.parameters, grid)

    model, optimizer = build(recipe, grid)
    for (_, p), gradient in zip(
        model.named_parameters(), made_up_gradients(recipe, 0, grid.dp.rank).values(), strict=True
    ):
        p.grad = gradient.to(grid.device)
    optimizer.step()
    ranks = world.gather({"kept": held_by_zero1(optimizer), "ledger": ledger})
    exact = exact_on_grid(recipe, grid)
    return ranks and {"ranks": ranks, "losses": run.losses, "exact": exact, "alike": alike, "device": grid.device}


def report_training(recipe, dp, found, threads):
    """Make the exact certificate's single-process side; print verdicts and bytes; return whether all is well."""
    from distmuon.verify.certificate import exact_verdict
    from distmuon.verify.training import plan_run, predict_run
    from muonbook.ch06.data_parallel import KINDS, predict_held

    exact = exact_verdict(found["exact"], recipe, dp, found["device"], threads)
    layout, _, _ = plan_run(recipe, dp, 1)
    predicted: list[dict[str, Any]] = [
        {"kept": predict_held(layout, rank), "ledger": predict_run(recipe, dp, 1, rank).by_collective()}
        for rank in range(dp)
    ]
    print(f"ZeRO-1 AdamW on {dp} DP ranks, {recipe.dtype}: loss {found['losses'][0]:.2f} -> {found['losses'][-1]:.2f}.")
    print(f"Same gradients, sharded and in torch.optim.AdamW alone, bitwise equal: {exact}.")
    print(f"Every rank ends with the same parameters: {found['alike']}.\n")
    print("Bytes kept by" + "".join(f"{kind:>11}" for kind in KINDS))
    for number, rank in enumerate(found["ranks"]):
        print(f"  DP rank {number}  " + "".join(f"{rank['kept'][kind]:>11,}" for kind in KINDS))
    title = f"DP rank 0 sends per step ({recipe.micro_batches // dp} micro-batches)"
    print(f"\n{title:<44}calls     counted   predicted")
    for (op, group), traffic in found["ranks"][0]["ledger"].items():
        calls, counted = traffic.calls // recipe.steps, traffic.sent_bytes // recipe.steps
        foretold = predicted[0]["ledger"][op, group].sent_bytes // recipe.steps
        print(f"  {op:<16}{group:<8}{PURPOSES[op, group]:<16}{calls:>7}{counted:>12,}{foretold:>12,}")
    as_predicted = predicted == found["ranks"]
    print(f"Every rank, kind and collective, counted = predicted: {as_predicted}.")
    return exact and found["alike"] and as_predicted


# ---- Follow one bucket ------------------------------------------------------------------------------------


def follow(world):
    """Take a bucket of eight weights through one step, move by move; return what this rank held, and whose it was."""
    import torch

    from distmuon.optim.zero1_adamw import Zero1AdamW
    from distmuon.sharding.grid import Grid
    from muonbook.provenance import with_sources

    grid = Grid.of(world)
    rank, size = grid.dp.rank, grid.dp.size
    weight = torch.nn.Parameter(10.0 * torch.arange(1, TINY + 1, device=grid.device))
    optimizer = Zero1AdamW([("weight", weight)], grid, lr=1.0, weight_decay=0.0)
    (bucket,) = optimizer.buckets
    shard = bucket.shard(rank).as_slice
    flat, gradients = optimizer.buffers.flat_parameters[0], optimizer.buffers.flat_gradients[0]
    signs = torch.tensor([1.0, -1.0]).repeat(TINY // 2)
    gradient = (signs * (torch.arange(TINY) % 3 + 2 * rank + 1)).to(grid.device)  # every rank has seen other data

    def reduce_scatter(tensor):
        gradients[:TINY] = tensor
        optimizer.reduce_scatter(bucket)
        return gradients[shard].clone()

    def all_gather(tensor):
        flat[shard] = tensor
        optimizer.all_gather(bucket)
        return flat.clone()

    mean, mean_sources = with_sources(reduce_scatter, gradient, rank, size)
    optimizer.zero_grad()
    weight.grad, old = gradient.clone(), flat[shard].tolist()
    optimizer.step()
    new = flat[shard].clone()
    whole, whole_sources = with_sources(all_gather, new, rank, size)
    return world.gather({
        "gradient": gradient.tolist(), "mean": mean, "mean_sources": mean_sources,
        "old": old, "new": new.tolist(), "whole": whole, "whole_sources": whole_sources,
    })  # fmt: skip


def report_following(ranks):
    """Print what AdamW did to each rank's shard; return whether all ranks end with the same weights."""
    for number, rank in enumerate(ranks):
        print(f"DP rank {number}   weights  " + "".join(f"{value:>5g}" for value in rank["old"]))
        print("     mean gradient  " + "".join(f"{value:>5g}" for value in rank["mean"]))
        print("       after AdamW  " + "".join(f"{value:>5g}" for value in rank["new"]))
    alike = all(rank["whole"] == ranks[0]["whole"] for rank in ranks)
    print(f"After the all-gather, every rank has the same {TINY} weights: {alike}.")
    return alike


# ---- Compare with the relatives ---------------------------------------------------------------------------


def compare(world, recipe):
    """Train a little with plain data parallelism, ZeRO-1 and FSDP2; return what every rank counted and predicted."""
    from distmuon.sharding.grid import Grid
    from muonbook.ch06 import data_parallel

    return world.gather(data_parallel.compare(recipe, Grid.of(world)))


def report_comparison(recipe, ranks):
    """Print bytes per parameter of every way; return those of rank 0, and whether everything counted was predicted."""
    from distmuon.verify.training import plan_run

    parameters = sum(spec.numel for spec in plan_run(recipe, 1, 1)[0].specs)
    rows = []
    for (dtype, way), (counted, _) in ranks[0].items():
        kept = {kind: size / parameters for kind, size in counted.kept.items() if kind != "counters"}
        rows.append({"dtype": dtype, "way": way, "kept": kept, "sent": counted.sent / parameters})
    print(f"Bytes per parameter on rank 0 of {len(ranks)}")
    print(f"{'':<26}params   grads masters   m, v    kept    sent")
    for row in rows:
        weights, gradients, masters, *moments = row["kept"].values()
        columns = (weights, gradients, masters, sum(moments), sum(row["kept"].values()), row["sent"])
        print(f"{row['dtype']:<9} {row['way']:<15}" + "".join(f"{value:>7.2f} " for value in columns).rstrip())
    right = all(counted == predicted for rank in ranks for counted, predicted in rank.values())
    print(f"Every rank, way and kind, counted = predicted to the byte: {right}.")
    return rows, right


# ---- The command ------------------------------------------------------------------------------------------


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=1)
    job = parser.add_argument_group("the job").add_mutually_exclusive_group()
    job.add_argument("--follow", action="store_true", help=f"follow one bucket of {TINY} weights through a step")
    job.add_argument("--compare", action="store_true", help="count what DDP, ZeRO-1 and FSDP2 keep and send")
    parser.add_argument("--json", metavar="FILE", help="with --follow or --compare: write what every rank reported")
    training = parser.add_argument_group("the training, without --follow and --compare")
    training.add_argument("--steps", type=int, metavar="N", default=20, help="training steps (default: 20)")
    training.add_argument("--dtype", metavar=launch.choices(DTYPES), default="float32", help="(default: float32)")
    add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := handle(arguments, sharded_step.PUZZLE)) is not None:
        return code
    if arguments.tp != 1:
        raise launch.UsageError(f"--tp {arguments.tp}: this chapter has DP ranks only; chapter 9 adds TP.")
    if (arguments.follow or arguments.compare) and arguments.dp == 1:
        raise launch.UsageError("--dp 1: one rank has nobody to share with; choose 2 or more.")
    if arguments.follow and TINY % arguments.dp:
        raise launch.UsageError(f"--follow --dp {arguments.dp}: {TINY} weights are shared by 2, 4 or 8 ranks.")
    if launch.speaks():
        launch.check_writable("--json", arguments.json if arguments.follow or arguments.compare else None)
    recipe = Recipe(optimizer="adamw", steps=arguments.steps, dtype=arguments.dtype).shared_by(arguments.dp)
    recipe = recipe.check(arguments.dp, arguments.tp)
    job, given = (follow, ()) if arguments.follow else (compare if arguments.compare else train, (recipe,))
    found = launch.run(job, given, **launch.options(arguments))[0]
    if found is None:
        return 0  # under torchrun, rank 0 alone goes on
    if job is train:
        written, well = None, report_training(recipe, arguments.dp, found, arguments.threads)
    elif job is follow:
        written, well = found, report_following(found)
    else:
        written, well = report_comparison(recipe, found)
    if arguments.json and written:
        from muonbook.report import write_json

        write_json(arguments.json, written)
    return 0 if well else 1


if __name__ == "__main__":
    launch.command(main)
