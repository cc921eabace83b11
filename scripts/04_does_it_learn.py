"""Chapter 4: race Muon, AdamW and SGD on real data and on a language with a known limit, all tuned alike.

python scripts/04_does_it_learn.py --task digits
python scripts/04_does_it_learn.py --task language --json book/results/race_language.json
python scripts/04_does_it_learn.py --task language --optimizer muon adamw --tune lr --steps 100
python scripts/04_does_it_learn.py --task language --variants --tune lr --steps 1000
python scripts/04_does_it_learn.py --task mnist --fetch
python scripts/04_does_it_learn.py --recipe original --task mnist --json out/originals.json

We tune every optimizer on a grid of learning rates, ratios between those of hidden matrices and of all else, momenta
and weight decays, and the best settings race on fresh seeds. With --tune lr we tune the learning rate alone, and the
digits take a minute; with all, some minutes, and the language an hour on two cores.
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch04.puzzle import PUZZLE
from muonbook.jobs import check_json
from muonbook.measure import results

# Named here as well as in muonbook.ch04, which needs torch: a wrong argument is answered at once.
TASKS = ("digits", "language", "mnist", "fashion")
FETCHED = TASKS[2:]
OPTIMIZERS = ("sgd", "adamw", "muon")
VARIANTS = ("polar_express", "cans", "deepseek_v4", "cubic5", "muoneq", "muon_plus", "normuon", "cautious")  # of muon
CHOICES = {
    "task": TASKS,
    "optimizer": OPTIMIZERS + VARIANTS,
    "recipe": ("original",),
    "tune": ("all", "lr"),
    "dtype": ("float32", "float64"),
}
QUICK = {"steps": 20, "seeds": 5, "tuning_seeds": 1}
MANY = ("ranks", "threads", "quick", "json", "task", "if_here", "device")  # runs, shared out
TAKES = {  # job -> its options
    "": (*MANY, "steps", "seeds", "tuning_seeds", "optimizer", "variants", "dtype", "tune"),
    "--recipe": MANY,
    "--fetch": ("task",),
}
PATIENCE = 6 * 3600.0  # seconds: a rank that has done its runs waits for those that have not


def parse():
    parser = launch.parser(__doc__)
    puzzles.add_arguments(parser)
    add = parser.add_argument
    add("--task", nargs="+", default=["digits"], metavar="TASK", help=f"one of {', '.join(TASKS)} (default: digits)")
    add("--optimizer", nargs="+", default=list(OPTIMIZERS), metavar="NAME", help="of sgd, adamw, muon and its variants")
    add("--variants", action="store_true", help=f"in place of --optimizer: muon {' '.join(VARIANTS)}")
    add("--tune", default="all", metavar="all|lr", help="lr: everything else as usual (default: all)")
    add("--seeds", type=int, metavar="N", help="fresh seeds to race on (default: 8)")
    add("--tuning-seeds", type=int, metavar="N", help="seeds to tune on, 1 to 3 (default: 3)")
    add("--steps", type=int, metavar="N", help="of every run (default: the task's)")
    add("--dtype", default="float32", metavar="float32|float64", help="(default: %(default)s)")
    add("--ranks", type=int, default=2, metavar="N", help="processes that share the runs (default: %(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="CPU threads per rank (default: %(default)s)")
    add("--device", metavar=launch.choices(("cpu", "cuda")), help="where tensors live (default: cpu)")
    add("--recipe", metavar="original", help="a public tutorial's own recipe, as written and tuned")
    add("--quick", action="store_true", help="a first impression: few steps, few seeds")
    add("--fetch", action="store_true", help="download the task's data into data/, and check every byte")
    add("--if-here", action="store_true", help="where the task's data is missing, say so and do nothing")
    add("--json", metavar="FILE", help="write everything that was found here")
    return parser.parse_args()


def checked(arguments):
    """Return the job, the arguments complete; raise UsageError for those that cannot be. Imports nothing heavy."""
    job = launch.chosen_job(arguments, TAKES)
    if arguments.variants:
        arguments.optimizer = ["muon", *VARIANTS]
    for name, default in ({"seeds": 8, "tuning_seeds": 3} | (QUICK if arguments.quick else {})).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    for name, known in CHOICES.items():
        given = getattr(arguments, name) or []
        given = [given] if isinstance(given, str) else given
        if unknown := [one for one in given if one not in known]:
            raise launch.UsageError(f"--{name} {unknown[0]} is unknown; choose from {', '.join(known)}.")
        if len(set(given)) < len(given):
            raise launch.UsageError(f"--{name} {' '.join(given)}: name each once.")
    launch.check_range(arguments, seeds=(1, 999), tuning_seeds=(1, 3), steps=(1, 10**7), ranks=(1, 256))
    first = arguments.task[0]
    here = [task for task in arguments.task if task not in FETCHED]
    if arguments.fetch and here:
        raise launch.UsageError(f"--fetch --task {here[0]}: it needs no download; run it.")
    if arguments.if_here and len(here) == len(arguments.task):
        raise launch.UsageError(f"--if-here --task {first}: its data is always here; leave --if-here out.")
    if arguments.recipe is not None and here:
        raise launch.UsageError(f"--recipe original --task {here[0]}: it is one for {', '.join(FETCHED)}.")
    if len(arguments.task) > 1 and job == "":
        raise launch.UsageError(f"--task {' '.join(arguments.task)}: one race at a time; give one task.")
    if launch.under_torchrun():
        raise launch.UsageError("races start processes of their own; run without torchrun, with --ranks N.")
    return job


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, PUZZLE)) is not None:
        return code
    job = checked(arguments)
    check_json(arguments)
    if set(arguments.task) <= set(FETCHED):
        from muonbook.ch04 import jobs  # and torch: only the data tell whether this can be done

        if arguments.fetch:
            jobs.fetch(arguments.task)
            return 0
        if missing := jobs.missing_data(arguments.task):
            if not arguments.if_here:
                raise launch.UsageError(missing)
            print(missing)
            return 0
    options = launch.options(arguments) | {"dp": arguments.ranks, "timeout": PATIENCE}
    work = "repeat_originals" if job == "--recipe" else "race"
    found = launch.run(f"muonbook.ch04.jobs:{work}", (arguments,), **options)[0]
    if arguments.json and launch.is_main_process():
        results.write(arguments.json, found)
    return 0


if __name__ == "__main__":
    launch.command(main)
