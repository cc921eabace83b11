"""Chapter 4: race Muon, AdamW and SGD on real data and on a language with a known limit, all tuned alike.

python scripts/04_does_it_learn.py --task digits
python scripts/04_does_it_learn.py --task language --json book/results/race_language.json
python scripts/04_does_it_learn.py --task language --optimizer muon adamw --tune lr --steps 100
python scripts/04_does_it_learn.py --task language --variants --tune lr --steps 1000
python scripts/04_does_it_learn.py --task mnist --fetch
python scripts/04_does_it_learn.py --recipe original --task mnist --json out/originals.json
python scripts/04_does_it_learn.py --study rms decay --json out/sights.json
python scripts/04_does_it_learn.py --blocks --json out/blocks.json
python scripts/04_does_it_learn.py --writing --quick --json out/writing.json

We tune every optimizer on a grid of learning rates, ratios between those of hidden matrices and of all else, momenta
and weight decays, and the best settings race on fresh seeds. With --tune lr we tune the learning rate alone, and the
digits take a minute; with all, some minutes, and the language an hour on two cores. The studies, blocks and writing
begin with the settings that the stored race tuned on the language.
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch04.puzzle import PUZZLE
from muonbook.jobs import check_json, check_measurement
from muonbook.measure import results

# Named here as well as in muonbook.ch04, which needs torch: a wrong argument is answered at once.
TASKS = ("digits", "language", "mnist", "fashion")
FETCHED = TASKS[2:]
OPTIMIZERS = ("sgd", "adamw", "muon")
VARIANTS = ("polar_express", "cans", "deepseek_v4", "cubic5", "muoneq", "muon_plus", "normuon", "cautious")  # of muon
STUDIES = ("rms", "decay", "routing", "batch")
CHOICES = {
    "task": TASKS,
    "optimizer": OPTIMIZERS + VARIANTS,
    "study": STUDIES,
    "recipe": ("original",),
    "tune": ("all", "lr"),
    "dtype": ("float32", "float64"),
}
QUICK = {"steps": 20, "seeds": 5, "tuning_seeds": 1}
MANY = ("ranks", "threads", "quick", "json")  # runs, shared out
STUDY = (*MANY, "steps", "seeds", "tuning_seeds")
TAKES = {  # job -> its options
    "": (*STUDY, "task", "if_here", "optimizer", "variants", "dtype", "device", "tune"),
    "--recipe": (*MANY, "task", "if_here", "device"),
    "--study": STUDY,
    "--blocks": STUDY,
    "--writing": (*MANY, "steps", "seeds"),
    "--times": ("threads", "json"),
    "--summary": ("json",),
    "--fetch": ("task",),
}
FUNCTIONS = {  # of muonbook.ch04.jobs
    "": "race",
    "--recipe": "repeat_originals",
    "--study": "study",
    "--blocks": "compare_blocks",
    "--writing": "let_write",
    "--times": "time_steps",
    "--summary": "sum_up",
}
STORED = ("--study", "--blocks", "--writing", "--times", "--summary")  # jobs that begin with what is stored
ALONE = ("--times", "--summary")  # jobs of one process
PATIENCE = 6 * 3600.0  # seconds: a rank that has done its runs waits for those that have not


def parse():
    parser = launch.parser(__doc__)
    puzzles.add_arguments(parser)
    add = parser.add_argument
    add("--task", nargs="+", default=["digits"], metavar="TASK", help=f"one of {', '.join(TASKS)} (default: digits)")
    add("--optimizer", nargs="+", default=list(OPTIMIZERS), metavar="NAME", help="of sgd, adamw, muon and its variants")
    add("--variants", action="store_true", help=f"in place of --optimizer: muon {' '.join(VARIANTS)}")
    add("--tune", default="all", metavar="all|lr", help="lr: everything else as usual (default: all)")
    add("--seeds", type=int, metavar="N", help="fresh seeds to race on (default: 8, with --study 5)")
    add("--tuning-seeds", type=int, metavar="N", help="seeds to tune on, 1 to 3 (default: 3, with --study 2)")
    add("--steps", type=int, metavar="N", help="of every run (default: the task's)")
    add("--dtype", default="float32", metavar="float32|float64", help="(default: %(default)s)")
    add("--ranks", type=int, default=2, metavar="N", help="processes that share the runs (default: %(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="CPU threads per rank (default: %(default)s)")
    add("--device", metavar=launch.choices(("cpu", "cuda")), help="where tensors live (default: cpu)")
    add("--recipe", metavar="original", help="a public tutorial's own recipe, as written and tuned")
    add("--study", nargs="+", default=[], metavar="NAME", help=f"one change to Muon at a time: {', '.join(STUDIES)}")
    add("--blocks", action="store_true", help="what it costs to orthogonalize the blocks that TP ranks hold")
    add("--writing", action="store_true", help="what the race's three models write of the language on their way")
    add("--times", action="store_true", help="what a step costs in time, where a race is stored")
    add("--summary", action="store_true", help="what the claims page quotes, from the stored studies")
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
    usual = {"seeds": 5, "tuning_seeds": 2} if arguments.study else {"seeds": 8, "tuning_seeds": 3}
    for name, default in (usual | (QUICK if arguments.quick else {})).items():
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
    if job in STORED:
        check_measurement(arguments, job)
    if set(arguments.task) <= set(FETCHED) or job in STORED:
        from muonbook.ch04 import jobs  # and torch: only data, models and stored races tell whether this can be done

        if arguments.fetch:
            jobs.fetch(arguments.task)
            return 0
        if missing := jobs.missing_data(arguments.task):
            if not arguments.if_here:
                raise launch.UsageError(missing)
            print(missing)
            return 0
        if job in STORED:
            jobs.check()
    ranks = 1 if job in ALONE else arguments.ranks
    options = launch.options(arguments) | {"dp": ranks, "timeout": PATIENCE}
    found = launch.run(f"muonbook.ch04.jobs:{FUNCTIONS[job]}", (arguments,), **options)[0]
    if arguments.json and launch.is_main_process():
        results.write(arguments.json, found)
    return 0


if __name__ == "__main__":
    launch.command(main)
