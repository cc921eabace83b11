"""Chapter 10: train the digits with distributed Muon over DP x TP, and certify the result, byte by byte.

python scripts/10_dp_tp.py --dp 4 --tp 2
python scripts/10_dp_tp.py --dp 2 --tp 2 --dtype bfloat16 --json out/run.json --figure out/run.png
torchrun --nproc-per-node 8 scripts/10_dp_tp.py --dp 4 --tp 2 --backend nccl
"""

import copy
from pathlib import Path

from distmuon import launch
from distmuon.models.recipe import DTYPES, OPTIMIZERS, STRATEGIES, Recipe
from muonbook.ch10 import puzzle as global_norm
from muonbook.puzzles import add_arguments, handle

# torch is imported inside the functions: a wrong argument is answered at once, and ranks start while nobody waits.


def work(world, recipe):
    """Run on every rank: train, keep the ledger, and hand over what the certificate needs."""
    import torch

    from distmuon.models.digits import digits
    from distmuon.sharding.grid import Grid
    from distmuon.verify.certificate import gather_evidence
    from distmuon.verify.training import train_on_grid
    from muonbook.report import progress

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
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=2)
    add_arguments(parser)

    training = parser.add_argument_group("the training")
    for name, kind, metavar, words in (
        ("steps", int, "N", "training steps"),
        ("batch", int, "ROWS", "digits per step, over all ranks; a multiple of --micro-batches"),
        ("micro_batches", int, "N", "pieces of a batch, over all ranks; a multiple of --dp"),
        ("optimizer", str, launch.choices(OPTIMIZERS), "for the hidden matrices; the rest always goes to AdamW"),
        ("strategy", str, launch.choices(STRATEGIES), "how Muon sees whole matrices"),
        ("dtype", str, launch.choices(DTYPES), "of the model; master weights are float32 or wider"),
        ("lr", float, "RATE", "learning rate, for Muon and AdamW alike"),
        ("seed", int, "N", "of weights, batches and made-up gradients"),
    ):
        option, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        training.add_argument(option, type=kind, metavar=metavar, default=default, help=f"{words} (default: {default})")

    output = parser.add_argument_group("the output")
    output.add_argument("--json", metavar="FILE", help="write all results here")
    output.add_argument("--figure", metavar="FILE", help="draw the map, the losses and the bytes here (.png or .svg)")
    output.add_argument("--quiet", action="store_true", help="print the verdict alone")
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := handle(arguments, global_norm.PUZZLE)) is not None:
        return code
    chosen = {name: value for name, value in vars(arguments).items() if name in Recipe.__dataclass_fields__}
    recipe = Recipe(**chosen).check(arguments.dp, arguments.tp)
    if arguments.figure is not None and Path(arguments.figure).suffix not in (".png", ".svg"):
        raise launch.UsageError(f"--figure {arguments.figure}: figures are saved as .png or .svg; choose such a name.")
    if launch.speaks():
        launch.check_writable("--json", arguments.json)
        launch.check_writable("--figure", arguments.figure)
    handed_over = launch.run(work, (recipe,), **launch.options(arguments))[0]
    if not launch.speaks():
        return 0

    from distmuon.verify import training
    from muonbook import report
    from muonbook.ch10 import figure_run, main_job
    from muonbook.figures import style

    layout, _, _ = training.plan_run(recipe, arguments.dp, arguments.tp)
    result, judged = main_job.summarize(recipe, handed_over, arguments.threads)
    if not arguments.quiet:
        print("\n".join(main_job.page(recipe, result, judged, layout)))
    if arguments.json:
        report.write_json(arguments.json, result)
    if arguments.figure:
        Path(arguments.figure).parent.mkdir(parents=True, exist_ok=True)
        picture = figure_run.draw_run(result, layout, arguments.tp)
        style.save(picture, arguments.figure, figure_run.describe_run(result))
        print(f"Picture: {arguments.figure}")
    verdict = "Verified: the sharded run is the single-process run."
    print(verdict if result["passed"] else "NOT verified: see FAIL above, or run again without --quiet.")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    launch.command(main)
