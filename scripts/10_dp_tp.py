"""Chapter 10: train the digits with distributed Muon over DP x TP, and certify the result, byte by byte.

python scripts/10_dp_tp.py --dp 4 --tp 2
python scripts/10_dp_tp.py --dp 2 --tp 2 --dtype bfloat16 --json out/run.json --figure out/run.png
python scripts/10_dp_tp.py --strategy owner --overlap pipelined --publish updates
python scripts/10_dp_tp.py --strategy periodic --whole-every 5
python scripts/10_dp_tp.py --strategy my_strategy.py
python scripts/10_dp_tp.py --mutants --dp 2 --tp 2
torchrun --nproc-per-node 8 scripts/10_dp_tp.py --dp 4 --tp 2 --backend nccl
"""

from pathlib import Path

from distmuon import launch
from distmuon.models.recipe import Recipe
from distmuon.optim import strategies
from muonbook import puzzles
from muonbook.ch10 import puzzle as global_norm
from muonbook.jobs import check_json, run_job
from muonbook.recipe_arguments import add_arguments, recipe_of

OF_MUON = ("strategy", "whole_every", "overlap", "publish")
TRAINING = ("steps", "batch", "micro_batches", "optimizer", *OF_MUON, "dtype", "lr", "seed")
TAKES = {"": (*launch.WORLD, *TRAINING, "json", "figure", "quiet"), "--mutants": (*launch.WORLD, "json")}


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=2)
    puzzles.add_arguments(parser)

    words = "put the certificate on trial: optimizers with one small mistake each, all or those named"
    parser.add_argument_group("the job").add_argument("--mutants", nargs="*", metavar="NAME", help=words)
    training, default = parser.add_argument_group("the training"), Recipe().strategy
    add_arguments(training, "steps", "batch", "micro_batches", "optimizer")
    words = f"how Muon sees whole matrices; or a .py file with moves of your own (default: {default})"
    training.add_argument(
        "--strategy", metavar=launch.choices((*strategies.names(), "FILE")), default=default, help=words
    )
    add_arguments(training, "whole_every", "overlap", "publish", "dtype", "lr", "seed")

    output = parser.add_argument_group("the output")
    output.add_argument("--json", metavar="FILE", help="write all results here")
    output.add_argument("--figure", metavar="FILE", help="draw the map, the losses and the bytes here (.png or .svg)")
    output.add_argument("--quiet", action="store_true", help="print the verdict alone")
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, global_norm.PUZZLE)) is not None:
        return code
    launch.chosen_job(arguments, TAKES)
    if arguments.mutants is not None:
        return try_certificate(arguments)
    for option in OF_MUON:
        if option in arguments.given and arguments.optimizer == "adamw":
            option = option.replace("_", "-")
            raise launch.UsageError(f"--{option} does nothing with --optimizer adamw; leave one of the two out.")
    if "whole_every" in arguments.given and arguments.strategy != "periodic":
        raise launch.UsageError(
            f"--whole-every does nothing with --strategy {arguments.strategy}; take periodic, or leave it out."
        )
    recipe = recipe_of(arguments).check(arguments.dp, arguments.tp)
    launch.check_range(arguments, steps=(1, 10**7), lr=(1e-30, 10**9))
    if arguments.figure is not None and Path(arguments.figure).suffix not in (".png", ".svg"):
        raise launch.UsageError(f"--figure {arguments.figure}: figures are saved as .png or .svg; choose such a name.")
    check_json(arguments)
    if launch.is_main_process():
        launch.check_writable("--figure", arguments.figure)
    return run_job(arguments, "muonbook.ch10.main_job:work", (recipe,), recipe, arguments)


def try_certificate(arguments):
    dp, tp = arguments.dp, arguments.tp
    if min(dp, tp) < 2:
        raise launch.UsageError(
            f"--mutants --dp {dp} --tp {tp}: most mistakes need both cuts; choose 2 or more of each."
        )
    recipe = Recipe(steps=4, batch=64).shared_by(dp).check(dp, tp)
    check_json(arguments)
    from muonbook.ch10.mutants import MUTANTS  # imports torch: only now

    for name in arguments.mutants:
        if name not in MUTANTS:
            raise launch.UsageError(
                f"--mutants {name!r}: there is no such mistake; choose one of {', '.join(MUTANTS)}."
            )
    names = arguments.mutants or list(MUTANTS)
    return run_job(arguments, "muonbook.ch10.mutant_trial:work", (recipe, names), recipe, dp, tp, arguments.threads)


if __name__ == "__main__":
    launch.command(main)
