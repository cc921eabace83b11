"""Chapter 4: race Muon, AdamW and SGD on real data and on a language with a known limit, everybody tuned alike.

python scripts/04_does_it_learn.py --task digits
python scripts/04_does_it_learn.py --task language --json book/results/race_language.json
python scripts/04_does_it_learn.py --task language --optimizer muon --lr 0.032 --seeds 1 --steps 100
python scripts/04_does_it_learn.py --task language --optimizer muon --lr 0.032 --dp 2 --tp 2 --dtype float64
python scripts/04_does_it_learn.py --task language --variants --tune lr --steps 1000
python scripts/04_does_it_learn.py --task mnist --fetch
python scripts/04_does_it_learn.py --recipe original --task mnist --json out/originals.json

Without --lr every optimizer is tuned on a grid of learning rates, ratios between those of hidden matrices and of all
else, momenta and weight decays, and the best settings race on fresh seeds. With --tune lr only the learning rate is
tuned, and the digits take a minute; with all, some minutes, and the language an hour on two cores.
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch04.puzzle import PUZZLE
from muonbook.jobs import check_json
from muonbook.measure import results

# Named here as well as in muonbook.ch04, which needs torch: a wrong argument is answered at once.
TASKS = ("digits", "language", "fashion", "mnist", "cifar10")
FETCHED = TASKS[2:]
OPTIMIZERS = ("sgd", "adamw", "muon")
VARIANTS = ("polar_express", "cans", "deepseek_v4", "cubic5", "muoneq", "muon_plus", "normuon", "cautious")  # of muon
GRIDS = ("all", "lr")
QUICK_STEPS, QUICK_SEEDS = 20, 5
MANY = ("ranks", "threads", "quick", "json")  # runs, shared out
TRAINING = ("task", "if_here", "optimizer", "variants", "steps", "dtype", "backend", "device")
TUNED = ("lr", "weight_decay", "momentum", "others", "second_beta")
GRID = "--dp and --tp"
TAKES = {  # job -> its options
    "": (*MANY, *TRAINING, "seeds", "tuning_seeds", "tune"),
    "--lr": (*MANY, *TRAINING, *TUNED, "seeds"),
    GRID: (*launch.WORLD, *TRAINING, *TUNED, "quick", "json"),
    "--recipe": (*MANY, "task", "if_here", "backend", "device"),
    "--times": ("threads", "json"),
    "--summary": ("json",),
    "--fetch": ("task",),
}
FUNCTIONS = {  # of muonbook.ch04.jobs
    "": "race",
    "--lr": "train",
    GRID: "compare",
    "--recipe": "repeat_originals",
    "--times": "time_steps",
    "--summary": "sum_up",
}
STORED = ("--times", "--summary")  # jobs that begin with what is stored
PATIENCE = 6 * 3600.0  # seconds: a rank that has done its runs waits for those that have not


def parse():
    parser = launch.parser(__doc__)
    puzzles.add_arguments(parser)
    launch.add_arguments(parser, dp=1, tp=1)
    add = parser.add_argument
    add("--task", nargs="+", default=["digits"], metavar="TASK", help=f"one of {', '.join(TASKS)} (default: digits)")
    add("--optimizer", nargs="+", default=list(OPTIMIZERS), metavar="NAME", help="of sgd, adamw, muon and its variants")
    add("--variants", action="store_true", help=f"in place of --optimizer: muon {' '.join(VARIANTS)}")
    add("--lr", nargs="+", type=float, metavar="LR", help="do not tune: one for all, or one for each optimizer")
    add("--weight-decay", type=float, metavar="X", help="with --lr (default: the larger of the optimizer's grid)")
    add(
        "--momentum",
        type=float,
        metavar="X",
        help="with --lr: of sgd and muon, first beta of adamw (default: as usual)",
    )
    add("--others", type=float, metavar="X", help="with --lr: rate of what is no hidden matrix, over --lr (default: 1)")
    add("--second-beta", type=float, metavar="X", help="with --lr: of adamw (default: 0.95)")
    add("--tune", default="all", metavar=launch.choices(GRIDS), help="lr: everything else as usual (default: all)")
    add("--seeds", type=int, metavar="N", help="fresh seeds to race on (default: 8)")
    add("--tuning-seeds", type=int, metavar="N", help="seeds to tune on, 1 to 3 (default: 3)")
    add("--steps", type=int, metavar="N", help="of every run (default: the task's)")
    add("--dtype", default="float32", metavar=launch.choices(("float32", "float64")), help="(default: %(default)s)")
    add("--ranks", type=int, default=2, metavar="N", help="processes that share the runs (default: %(default)s)")
    add("--recipe", metavar="original", help="a public tutorial's own recipe, as written and tuned")
    add("--times", action="store_true", help="what a step costs in time, where a race is stored")
    add("--summary", action="store_true", help="what the claims page quotes, from the stored studies")
    add("--quick", action="store_true", help="a first impression: few steps, few seeds")
    add("--fetch", action="store_true", help="download the task's data into data/, and check every byte")
    add("--if-here", action="store_true", help="where the task's data is missing, say so and do nothing")
    add("--json", metavar="FILE", help="write everything that was found here")
    return parser.parse_args()


def checked(arguments):
    """Return the job, the arguments complete; raise UsageError for those that cannot be. Imports nothing heavy."""
    job = launch.chosen_job(arguments, TAKES, job_of(arguments))
    arguments.lr = arguments.lr or []
    if arguments.variants:
        arguments.optimizer = ["muon", *VARIANTS]
    quick = {"steps": QUICK_STEPS, "seeds": QUICK_SEEDS, "tuning_seeds": 1} if arguments.quick else {}
    for name, default in ({"seeds": 8, "tuning_seeds": 3} | quick).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    for option, names, known in (
        ("--task", arguments.task, TASKS),
        ("--optimizer", arguments.optimizer, OPTIMIZERS + VARIANTS),
        ("--dtype", [arguments.dtype], ("float32", "float64")),
        ("--recipe", [arguments.recipe or "original"], ("original",)),
        ("--tune", [arguments.tune], GRIDS),
    ):
        if unknown := [name for name in names if name not in known]:
            raise launch.UsageError(f"{option} {unknown[0]} is unknown; choose from {', '.join(known)}.")
        if len(set(names)) < len(names):
            raise launch.UsageError(f"{option} {' '.join(names)}: name each once.")
    launch.check_range(arguments, seeds=(1, 999), tuning_seeds=(1, 3), steps=(1, 10**7), ranks=(1, 256))
    launch.check_range(arguments, weight_decay=(0, 100), others=(0.0001, 10_000))
    launch.check_range(arguments, momentum=(0.01, 0.99999), second_beta=(0.01, 0.99999))
    if arguments.fetch and (others := [task for task in arguments.task if task not in FETCHED]):
        raise launch.UsageError(f"--fetch --task {others[0]}: it needs no download; run it.")
    if arguments.if_here and not set(arguments.task) & set(FETCHED):
        raise launch.UsageError(f"--if-here --task {arguments.task[0]}: its data is always here; leave --if-here out.")
    if arguments.recipe is not None and (others := [task for task in arguments.task if task not in FETCHED]):
        raise launch.UsageError(f"--recipe original --task {others[0]}: it is one for {', '.join(FETCHED)}.")
    if len(arguments.task) > 1 and not arguments.fetch and arguments.recipe is None:
        raise launch.UsageError(f"--task {' '.join(arguments.task)}: one race at a time; give one task.")
    if len(arguments.lr) not in (0, 1, len(arguments.optimizer)) or not all(0 < lr < 1e9 for lr in arguments.lr):
        given = " ".join(f"{lr:g}" for lr in arguments.lr)
        raise launch.UsageError(f"--lr {given}: give one positive number, or one for each optimizer.")
    if job == GRID and (not arguments.lr or len(arguments.optimizer) != 1):
        raise launch.UsageError(
            "--dp and --tp compare one training with one process; name one --optimizer and its --lr."
        )
    if launch.under_torchrun() and job != GRID:
        raise launch.UsageError("races start processes of their own; run without torchrun, with --ranks N.")
    return job


def job_of(arguments):
    """Return what was asked for, a key of TAKES."""
    alone = ("fetch", "recipe", "times", "summary")
    if chosen := next((name for name in alone if getattr(arguments, name)), None):
        return f"--{chosen}"
    return GRID if (arguments.dp, arguments.tp) != (1, 1) else "--lr" if arguments.lr else ""


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, PUZZLE)) is not None:
        return code
    job = checked(arguments)
    check_json(arguments)
    if set(arguments.task) <= set(FETCHED) or job in (GRID, *STORED):
        from muonbook.ch04 import jobs  # and torch: only data, models and stored races tell whether this can be done

        if arguments.fetch:
            jobs.fetch(arguments.task)
            return 0
        if missing := jobs.missing_data(arguments.task):
            if not arguments.if_here:
                raise launch.UsageError(missing)
            print(missing)
            return 0
        jobs.check(arguments, FUNCTIONS[job])
    options = launch.options(arguments)
    if job != GRID:
        options |= {"dp": 1 if job in ("--times", "--summary") else arguments.ranks, "timeout": PATIENCE}
    found = launch.run(f"muonbook.ch04.jobs:{FUNCTIONS[job]}", (arguments,), **options)[0]
    if arguments.json and launch.is_main_process():
        results.write(arguments.json, found)
    return 0


if __name__ == "__main__":
    launch.command(main)
