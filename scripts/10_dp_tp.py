"""Chapter 10: train the digits with distributed Muon over DP x TP, and certify the result, byte by byte.

python scripts/10_dp_tp.py --dp 4 --tp 2
torchrun --nproc-per-node 8 scripts/10_dp_tp.py --dp 4 --tp 2 --backend nccl
"""

import argparse
import copy
import os
from pathlib import Path

from distmuon import launch
from distmuon.recipe import Recipe

# torch is imported inside the functions: a wrong argument is answered at once, and ranks start while nobody waits.


def work(world, recipe):
    """Run on every rank: train, keep the ledger, and hand over what the certificate needs."""
    import torch

    from distmuon.certificate import gather_evidence
    from distmuon.data import digits
    from distmuon.grid import Grid
    from distmuon.report import progress
    from distmuon.training import train_on_grid

    grid = Grid.of(world)
    grid.world.all_reduce(torch.zeros(1, device=grid.device), "first collective")
    start_seconds = launch.seconds_since(world.started)
    data, _ = digits(grid, recipe.seed)
    grid.ledger.clear()
    with progress(recipe.steps, world.rank) as tick:
        run = train_on_grid(recipe, grid, data, tick)
    ledgers = world.gather(copy.deepcopy(grid.ledger))
    evidence = gather_evidence(recipe, grid, data, run)
    if world.rank != 0:
        return None
    return {"evidence": evidence, "ledgers": ledgers, "start_seconds": start_seconds, "world": world}


def parse():
    defaults = Recipe()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    launch.add_arguments(parser, dp=4, tp=2)
    parser.add_argument("--steps", type=int, default=defaults.steps, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=defaults.batch, help="rows per step, over all ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=defaults.micro_batches,
        help="pieces of a batch, over all ranks (default: %(default)s)",
    )
    parser.add_argument("--optimizer", default=defaults.optimizer, metavar="{muon,adamw}", help="default: %(default)s")
    parser.add_argument(
        "--strategy", default=defaults.strategy, help="how Muon sees whole matrices (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default=defaults.dtype, metavar="{float32,bfloat16,float64}", help="default: %(default)s"
    )
    parser.add_argument("--lr", type=float, default=defaults.lr, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write all results here")
    parser.add_argument("--figure", metavar="FILE", help="draw the map, the losses and the bytes here (.png or .svg)")
    parser.add_argument("--quiet", action="store_true", help="print the verdict alone")
    return parser.parse_args()


def main():
    arguments = parse()
    chosen = {name: value for name, value in vars(arguments).items() if name in Recipe.__dataclass_fields__}
    recipe = Recipe(**chosen).check(arguments.dp, arguments.tp)
    if arguments.figure and Path(arguments.figure).suffix not in (".png", ".svg"):
        raise launch.UsageError(f"--figure {arguments.figure}: figures are saved as .png or .svg; choose such a name.")
    handed_over = launch.run(work, (recipe,), **launch.options(arguments))[0]
    if int(os.environ.get("RANK", "0")):
        return 0  # under torchrun, rank 0 alone goes on

    from distmuon import figure_run, figures, main_job, report, training

    layout, _, _ = training.plan_run(recipe, arguments.dp, arguments.tp)
    result, judged = main_job.summarize(recipe, handed_over, arguments.threads)
    if not arguments.quiet:
        print("\n".join(main_job.page(recipe, result, judged, layout)))
    if arguments.json:
        report.write_json(arguments.json, result)
    if arguments.figure:
        Path(arguments.figure).parent.mkdir(parents=True, exist_ok=True)
        picture = figure_run.draw_run(result, layout, arguments.tp)
        figures.save(picture, arguments.figure, figure_run.describe_run(result))
        print(f"Picture: {arguments.figure}")
    verdict = "Verified: the sharded run is the single-process run."
    print(verdict if result["passed"] else "NOT verified: see FAIL above, or run again without --quiet.")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    launch.command(main)
