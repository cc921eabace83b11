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
from muonbook.ch04 import puzzle as fair_race
from muonbook.ch04.options import FETCHED, on_grid, parse
from muonbook.puzzles import handle

# torch, and what needs it, is imported inside the functions: a wrong argument is answered at once.

PATIENCE = 6 * 3600.0  # seconds: a rank that has done its runs waits for those that have not


# ---- What ranks do ----------------------------------------------------------------------------------------


def race(world, arguments):
    """Tune and race; print; return what is stored."""
    from muonbook.ch04 import race_tables, races, sweep

    task, tuning = chosen_task(arguments, world.device), sweep.TUNING_SEEDS[: arguments.tuning_seeds]
    found = races.stored_race(world, task, arguments.optimizer, tuning, range(arguments.seeds))
    world.say("\n".join(race_tables.result_lines(found) + race_tables.verdict_lines(found)))
    return found


def train(world, arguments):
    """Run every optimizer named at --lr, without tuning; print the held-out losses along the way."""
    from muonbook.ch04 import race_tables, sweep

    task = chosen_task(arguments, world.device)
    run, settings = sweep.runner(world, task), [chosen_setting(arguments, name) for name in arguments.optimizer]
    outcomes = run([(setting, seed) for setting in settings for seed in range(arguments.seeds)])
    found = race_tables.stored_runs(task, outcomes)
    world.say("\n".join(race_tables.run_lines(found)))
    return found


def compare(world, arguments):
    """Train on the grid and in one process; print both curves."""
    from muonbook.ch04 import on_grid

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
    from muonbook.ch04 import ablation_tables, ablations, race_tables

    found = ablations.measure(world, race_tables.stored_settings("language"), arguments.quick)
    for name, lines in ablation_tables.LINES.items():
        world.say("\n".join([f"\n{name}", *lines(found[name])]))
    return found


def repeat_originals(world, arguments):
    """Run a public tutorial's recipe as written, and tuned."""
    from muonbook.ch04 import originals, originals_tables

    found = originals.study(world, arguments.task, range(5), arguments.quick)
    world.say("\n".join(originals_tables.lines(found)))
    return found


def time_steps(world, arguments):
    """Time a step of every optimizer against AdamW's, on the tasks whose race is stored."""
    from muonbook.ch04 import race_tables, races, tasks

    found = {}
    for name, stored in race_tables.stored_races().items():
        if missing := missing_data([name]):
            world.say(missing)
            continue
        found[name] = races.times(tasks.TASKS[name], race_tables.stored_settings(name))
        world.say("\n".join(race_tables.price_lines(stored, found[name])))
    return found


def sum_up(world, arguments):
    """Draw the numbers that the claims page quotes from what is stored."""
    from muonbook.ch04 import summary

    return summary.summarize()


# ---- What the command line chooses ------------------------------------------------------------------------


def chosen_task(arguments, device):
    """Return the task with what the command line changes of it."""
    from dataclasses import replace

    from muonbook.ch04 import sweep, tasks

    task = replace(sweep.with_dtype(tasks.TASKS[arguments.task[0]], arguments.dtype), device=device)
    return task if arguments.steps is None else task.shorter(arguments.steps)


def chosen_setting(arguments, name):
    """Return the setting of --lr, --weight-decay and --option, the last two by default the racer's own."""
    from muonbook.ch04.baselines import RACERS, Setting

    racer, lr = RACERS[name], arguments.lr[min(len(arguments.lr) - 1, arguments.optimizer.index(name))]
    decay = racer.weight_decays[-1] if arguments.weight_decay is None else arguments.weight_decay
    return Setting(name, lr, decay, racer.options[0] if arguments.option is None else arguments.option)


def fetch(tasks):
    """Download what is missing of the tasks' data."""
    from muonbook.ch04 import datasets

    for task in tasks:
        if task not in FETCHED:
            raise launch.UsageError(f"--fetch --task {task}: it needs no download; run it.")
        datasets.fetch_all(task)


def missing_data(tasks):
    """Return the sentence that says which data is not here, or None if that of any of the tasks is."""
    if set(tasks) - set(FETCHED):
        return None
    from muonbook.ch04 import datasets

    missing = [datasets.missing(task) for task in tasks]
    return missing[0] if all(missing) else None


def main():
    arguments = parse(__doc__)
    if (code := handle(arguments, fair_race.PUZZLE)) is not None:
        return code
    if launch.speaks():
        launch.check_writable("--json", arguments.json)
    if arguments.fetch:
        fetch(arguments.task)
        return 0
    if missing := missing_data(arguments.task):
        if not arguments.if_here:
            raise launch.UsageError(missing)
        print(missing)
        return 0
    found = started(arguments)
    if arguments.json and launch.speaks():
        from muonbook.measure import results

        results.write(arguments.json, found)
    return 0


def started(arguments):
    """Run what was asked for in a world of its own; return what rank 0 found."""
    asked = {
        see: arguments.sights,
        repeat_originals: arguments.recipe is not None,
        time_steps: arguments.times,
        sum_up: arguments.summary,
        compare: on_grid(arguments),
        train: bool(arguments.lr),
        race: True,
    }
    worker = next(worker for worker, wanted in asked.items() if wanted)
    options = launch.options(arguments)
    if worker is compare:
        from muonbook.ch04 import on_grid as grid_runs

        task, setting = chosen_task(arguments, "cpu"), chosen_setting(arguments, arguments.optimizer[0])
        grid_runs.check(task, setting, arguments.dp, arguments.tp)
    elif worker in (see, time_steps, sum_up):
        from muonbook.ch04 import race_tables

        race_tables.stored_settings("language")  # raises UsageError, before anything is started
    if worker is not compare:
        alone = worker in (time_steps, sum_up)
        options |= {"dp": 1 if alone else arguments.ranks, "timeout": max(PATIENCE, arguments.timeout)}
    return launch.run(worker, (arguments,), **options)[0]


if __name__ == "__main__":
    launch.command(main)
