"""What chapter 4's worker can be asked, and what it cannot: answered in a sentence, before torch is imported."""

from __future__ import annotations

import argparse

from distmuon import launch
from muonbook.puzzles import add_arguments

TASKS = ("digits", "language", "fashion", "mnist", "cifar10")
FETCHED = TASKS[2:]
OPTIMIZERS = ("sgd", "adamw", "muon")
QUICK_STEPS, QUICK_SEEDS = 20, 5


def parse(doc: str | None) -> argparse.Namespace:
    """Return the checked arguments of the worker whose docstring this is."""
    parser = launch.parser(doc)
    add_arguments(parser)
    launch.add_arguments(parser, dp=1, tp=1)
    add = parser.add_argument
    add("--task", nargs="+", default=["digits"], metavar="TASK", help=f"one of {', '.join(TASKS)} (default: digits)")
    add("--optimizer", nargs="+", default=list(OPTIMIZERS), metavar="NAME", help="some of sgd, adamw, muon")
    add("--lr", nargs="+", type=float, metavar="LR", help="do not tune: one for all, or one for each optimizer")
    add("--weight-decay", type=float, metavar="X", help="with --lr (default: the larger of the optimizer's grid)")
    add("--option", type=float, metavar="X", help="with --lr: momentum of sgd and muon, second beta of adamw")
    add("--seeds", type=int, metavar="N", help="fresh seeds to race on (default: 8)")
    add("--tuning-seeds", type=int, metavar="N", help="seeds to tune on, 1 to 3 (default: 3)")
    add("--steps", type=int, metavar="N", help="of every run (default: the task's)")
    add("--dtype", default="float32", metavar=launch.choices(("float32", "float64")), help="(default: %(default)s)")
    add("--ranks", type=int, default=2, metavar="N", help="processes that share the runs (default: %(default)s)")
    add("--recipe", metavar="original", help="a public tutorial's own recipe, as written and tuned")
    add("--sights", action="store_true", help="the studies beside the race: spectra, RMS, decay, batch and others")
    add("--times", action="store_true", help="what a step costs in time, where a race is stored")
    add("--summary", action="store_true", help="what the claims page quotes, from the stored studies")
    add("--quick", action="store_true", help="a first impression: few steps, few seeds")
    add("--fetch", action="store_true", help="download the task's data into data/, and check every byte")
    add("--if-here", action="store_true", help="where the task's data is missing, say so and do nothing")
    add("--json", metavar="FILE", help="write everything that was found here")
    return checked(parser.parse_args())


def checked(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments, or raise UsageError for those that cannot be; nothing heavy is imported for it."""
    arguments.lr = arguments.lr or []
    quick = {"steps": QUICK_STEPS, "seeds": QUICK_SEEDS, "tuning_seeds": 1} if arguments.quick else {}
    for name, default in ({"seeds": 8, "tuning_seeds": 3} | quick).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    for option, names, known in (
        ("--task", arguments.task, TASKS),
        ("--optimizer", arguments.optimizer, OPTIMIZERS),
        ("--dtype", [arguments.dtype], ("float32", "float64")),
        ("--recipe", [arguments.recipe or "original"], ("original",)),
    ):
        if unknown := [name for name in names if name not in known]:
            raise launch.UsageError(f"{option} {unknown[0]} is unknown; choose from {', '.join(known)}.")
        if len(set(names)) < len(names):
            raise launch.UsageError(f"{option} {' '.join(names)}: name each once.")
    for option, value, least, most in (
        ("--seeds", arguments.seeds, 1, 999),
        ("--tuning-seeds", arguments.tuning_seeds, 1, 3),
        ("--steps", 1 if arguments.steps is None else arguments.steps, 1, 10**7),
        ("--ranks", arguments.ranks, 1, 999),
        ("--weight-decay", arguments.weight_decay or 0, 0, 100),
        ("--option", 0.5 if arguments.option is None else arguments.option, 0.01, 0.99999),
    ):
        if not least <= value <= most:
            raise launch.UsageError(f"{option} {value:g}: must be from {least:g} to {most:g}.")
    modes = [name for name in ("recipe", "sights", "times", "summary") if getattr(arguments, name)]
    if len(modes) > 1:
        raise launch.UsageError(f"--{modes[0]} and --{modes[1]} are two jobs; choose one.")
    if arguments.recipe is not None and (others := [task for task in arguments.task if task not in FETCHED]):
        raise launch.UsageError(f"--recipe original --task {others[0]}: it is one for {', '.join(FETCHED)}.")
    if len(arguments.task) > 1 and not arguments.fetch and arguments.recipe is None:
        raise launch.UsageError(f"--task {' '.join(arguments.task)}: one race at a time; give one task.")
    if len(arguments.lr) not in (0, 1, len(arguments.optimizer)) or not all(0 < lr < 1e9 for lr in arguments.lr):
        given = " ".join(f"{lr:g}" for lr in arguments.lr)
        raise launch.UsageError(f"--lr {given}: give one positive number, or one for each optimizer.")
    if on_grid(arguments) and (not arguments.lr or len(arguments.optimizer) != 1):
        raise launch.UsageError(
            "--dp and --tp compare one training with one process; name one --optimizer and its --lr."
        )
    if launch.under_torchrun() and not on_grid(arguments):
        raise launch.UsageError("races start processes of their own; run without torchrun, with --ranks N.")
    if modes and modes != ["recipe"] and (arguments.backend != "gloo" or arguments.device == "cuda"):
        raise launch.UsageError(f"--{modes[0]} runs on the CPU; drop --backend and --device.")
    return arguments


def on_grid(arguments: argparse.Namespace) -> bool:
    """Say whether one training is to be cut over a grid."""
    return (arguments.dp, arguments.tp) != (1, 1)
