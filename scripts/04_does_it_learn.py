"""Chapter 4: race Muon, AdamW and SGD on real data and on a language with a known limit, everybody tuned alike.

python scripts/04_does_it_learn.py --task digits
python scripts/04_does_it_learn.py --task language --json book/results/race_language.json
python scripts/04_does_it_learn.py --task language --optimizer muon --lr 0.032 --seeds 1 --steps 100
python scripts/04_does_it_learn.py --task language --optimizer muon --lr 0.032 --dp 2 --tp 2 --dtype float64
python scripts/04_does_it_learn.py --task mnist --fetch
python scripts/04_does_it_learn.py --recipe original --task mnist --json out/originals.json

Without --lr every optimizer is tuned on a grid of learning rates, weight decays and its own option, and the best
settings race on fresh seeds. On two quiet cores the digits take a minute or two, the language about ten.
"""

from distmuon import launch
from distmuon.puzzles import add_arguments, fair_race, handle

# torch, and what needs it, is imported inside the functions: a wrong argument is answered at once.

TASKS = ("digits", "language", "fashion", "mnist", "cifar10")
FETCHED = TASKS[2:]
OPTIMIZERS = ("sgd", "adamw", "muon")
PATIENCE = 6 * 3600.0  # seconds: a rank that has done its runs waits for those that have not
QUICK_STEPS, QUICK_SEEDS = 20, 5


# ---- What ranks do ----------------------------------------------------------------------------------------


def race(world, arguments):
    """Tune and race; print; return what is stored."""
    from distmuon.learning import race_tables, races, sweep

    task, tuning = chosen_task(arguments, world.device), sweep.TUNING_SEEDS[: arguments.tuning_seeds]
    found = races.stored_race(world, task, arguments.optimizer, tuning, range(arguments.seeds))
    world.say("\n".join(race_tables.result_lines(found) + race_tables.verdict_lines(found)))
    return found


def train(world, arguments):
    """Run every optimizer named at --lr, without tuning; print the held-out losses along the way."""
    from distmuon.learning import race_tables, sweep

    task = chosen_task(arguments, world.device)
    run, settings = sweep.runner(world, task), [chosen_setting(arguments, name) for name in arguments.optimizer]
    outcomes = run([(setting, seed) for setting in settings for seed in range(arguments.seeds)])
    found = race_tables.stored_runs(task, outcomes)
    world.say("\n".join(race_tables.run_lines(found)))
    return found


def compare(world, arguments):
    """Train on the grid and in one process; print both curves."""
    from distmuon.learning import on_grid

    task, setting = chosen_task(arguments, world.device), chosen_setting(arguments, arguments.optimizer[0])
    found = on_grid.compare(world, task, setting, seed=0)
    if found is None:
        return None
    words = f"no loss differs by more than {on_grid.BOUND:g} of the movement: {found.difference <= on_grid.BOUND}"
    if arguments.dtype != "float64":  # rounding is not the same on every machine
        words = (
            f"the largest difference is {found.difference:.0e} of the movement; --dtype float64 tells rounding apart"
        )
    world.say("\n".join([*found.lines(), words]))
    return {"on_grid": found.on_grid.stored(), "alone": found.alone.stored(), "difference": found.difference}


def see(world, arguments):
    """Take the studies beside the race, from the settings that the stored race tuned."""
    from distmuon.learning import sight_tables, sights
    from distmuon.learning.racers import Setting
    from distmuon.measured import results

    racers = results.load("race_language")["racers"]
    found = sights.measure(world, {name: Setting(**racer["best"]) for name, racer in racers.items()}, arguments.quick)
    for name, lines in sight_tables.LINES.items():
        world.say("\n".join([f"\n{name}", *lines(found[name])]))
    return found


def repeat_originals(world, arguments):
    """Run a public tutorial's recipe as written, and tuned."""
    from distmuon.learning import originals, originals_tables

    found = originals.study(world, arguments.task, range(5), arguments.quick)
    world.say("\n".join(originals_tables.lines(found)))
    return found


def time_steps(world, arguments):
    """Time a step of every optimizer against AdamW's, on the tasks whose race is stored."""
    from distmuon.learning import race_tables, races
    from distmuon.learning.racers import Setting
    from distmuon.learning.tasks import TASKS as tasks

    found = {}
    for name, stored in race_tables.stored_races().items():
        best = {racer: Setting(**its["best"]) for racer, its in stored["racers"].items()}
        found[name] = races.times(tasks[name], best)
        world.say("\n".join(race_tables.price_lines(stored, found[name])))
    return found


def sum_up(world, arguments):
    """Draw the numbers that the claims page quotes from what is stored."""
    from distmuon.learning import summary

    return summary.summarize()


# ---- What the command line chooses ------------------------------------------------------------------------


def chosen_task(arguments, device):
    """Return the task with what the command line changes of it."""
    from dataclasses import replace

    from distmuon.learning import sweep, tasks

    task = replace(sweep.with_dtype(tasks.TASKS[arguments.task[0]], arguments.dtype), device=device)
    return task if arguments.steps is None else task.shorter(arguments.steps)


def chosen_setting(arguments, name):
    """Return the setting of --lr, --weight-decay and --option, the last two by default the racer's own."""
    from distmuon.learning.racers import RACERS, Setting

    racer, lr = RACERS[name], arguments.lr[min(len(arguments.lr) - 1, arguments.optimizer.index(name))]
    decay = racer.weight_decays[-1] if arguments.weight_decay is None else arguments.weight_decay
    return Setting(name, lr, decay, racer.options[0] if arguments.option is None else arguments.option)


def parse():
    parser = launch.parser(__doc__)
    add_arguments(parser)
    launch.add_arguments(parser, dp=1, tp=1)
    add = parser.add_argument
    add("--task", nargs="+", default=["digits"], metavar="TASK", help=f"one of {', '.join(TASKS)} (default: digits)")
    add("--optimizer", nargs="+", default=list(OPTIMIZERS), metavar="NAME", help="some of sgd, adamw, muon")
    add("--lr", nargs="+", type=float, metavar="LR", help="do not tune: one for all, or one for each optimizer")
    add("--weight-decay", type=float, metavar="X", help="with --lr (default: the larger of the optimizer's grid)")
    add("--option", type=float, metavar="X", help="with --lr: momentum of sgd and muon, second beta of adamw")
    add("--seeds", type=int, default=8, metavar="N", help="fresh seeds to race on (default: %(default)s)")
    add("--tuning-seeds", type=int, default=3, metavar="N", help="seeds to tune on, 1 to 3 (default: %(default)s)")
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


def checked(arguments):
    """Return the arguments, or raise UsageError for those that cannot be; nothing heavy is imported for it."""
    arguments.lr = arguments.lr or []
    for option, names, known in (
        ("--task", arguments.task, TASKS),
        ("--optimizer", arguments.optimizer, OPTIMIZERS),
        ("--dtype", [arguments.dtype], ("float32", "float64")),
        ("--recipe", [arguments.recipe or "original"], ("original",)),
    ):
        if unknown := [name for name in names if name not in known]:
            raise launch.UsageError(f"{option} {unknown[0]} is unknown; choose from {', '.join(known)}.")
    for option, value, most in (
        ("--seeds", arguments.seeds, 999),
        ("--tuning-seeds", arguments.tuning_seeds, 3),
        ("--steps", 1 if arguments.steps is None else arguments.steps, 10**7),
        ("--ranks", arguments.ranks, 999),
    ):
        if not 1 <= value <= most:
            raise launch.UsageError(f"{option} {value}: must be from 1 to {most}.")
    if arguments.recipe is not None and (others := [task for task in arguments.task if task not in FETCHED]):
        raise launch.UsageError(f"--recipe original --task {others[0]}: it is one for {', '.join(FETCHED)}.")
    if len(arguments.task) > 1 and arguments.recipe is None:
        raise launch.UsageError(f"--task {' '.join(arguments.task)}: one race at a time; give one task.")
    if len(arguments.lr) not in (0, 1, len(arguments.optimizer)) or not all(0 < lr < 1e9 for lr in arguments.lr):
        given = " ".join(f"{lr:g}" for lr in arguments.lr)
        raise launch.UsageError(f"--lr {given}: give one positive number, or one for each optimizer.")
    if (arguments.dp, arguments.tp) != (1, 1) and (not arguments.lr or len(arguments.optimizer) != 1):
        raise launch.UsageError(
            "--dp and --tp compare one training with one process; name one --optimizer and its --lr."
        )
    if arguments.quick:
        arguments.steps = QUICK_STEPS if arguments.steps is None else arguments.steps
        arguments.tuning_seeds, arguments.seeds = 1, QUICK_SEEDS
    return arguments


def fetch(tasks):
    """Download what is missing of the tasks' data."""
    from distmuon.learning import datasets

    for task in tasks:
        if task not in FETCHED:
            raise launch.UsageError(f"--fetch --task {task}: it needs no download; run it.")
        datasets.fetch_all(task)


def missing_data(tasks):
    """Return the sentence that says which task's data is not here, or None."""
    if not set(tasks) & set(FETCHED):
        return None
    from distmuon.learning import datasets

    return next(filter(None, (datasets.missing(task) for task in tasks if task in FETCHED)), None)


def main():
    arguments = parse()
    if (code := handle(arguments, fair_race.PUZZLE)) is not None:
        return code
    launch.check_writable("--json", arguments.json)
    if arguments.fetch:
        fetch(arguments.task)
        return 0
    if arguments.recipe is None and (missing := missing_data(arguments.task)):
        if not arguments.if_here:
            raise launch.UsageError(missing)
        print(missing)
        return 0
    found = started(arguments)
    if arguments.json:
        from distmuon.measured import results

        results.write(arguments.json, found)
    return 0


def started(arguments):
    """Run what was asked for in a world of its own; return what rank 0 found."""
    grid = (arguments.dp, arguments.tp) != (1, 1)
    options = launch.options(arguments) | ({} if grid else {"dp": arguments.ranks, "timeout": PATIENCE})
    asked = {
        see: arguments.sights,
        repeat_originals: arguments.recipe is not None,
        time_steps: arguments.times,
        sum_up: arguments.summary,
        compare: grid,
        train: bool(arguments.lr),
        race: True,
    }
    worker = next(worker for worker, wanted in asked.items() if wanted)
    if worker in (time_steps, sum_up):
        options["dp"] = 1
    if worker is compare:
        from distmuon.learning import on_grid

        task, setting = chosen_task(arguments, "cpu"), chosen_setting(arguments, arguments.optimizer[0])
        on_grid.check(task, setting, arguments.dp, arguments.tp)
    return launch.run(worker, (arguments,), **options)[0]


if __name__ == "__main__":
    launch.command(main)
