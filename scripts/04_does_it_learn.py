"""Chapter 4: race Muon, AdamW and SGD on real data and on a language with a known limit, everybody tuned alike.

python scripts/04_does_it_learn.py --task digits --quick
python scripts/04_does_it_learn.py --task language --json book/results/race_language.json
python scripts/04_does_it_learn.py --task language --optimizer muon --lr 0.03 --seeds 1 --steps 100
python scripts/04_does_it_learn.py --task mnist --fetch

Without --lr every optimizer is tuned on a grid of learning rates, weight decays and its own option, and the best
settings race on fresh seeds. The language takes some 15 minutes on two cores, digits one.
"""

from pathlib import Path

from distmuon import launch

# torch, and what needs it, is imported inside the functions: a wrong argument is answered at once.

TASKS = ("digits", "language", "fashion", "mnist", "cifar10")
OPTIMIZERS = ("sgd", "adamw", "muon")
PATIENCE = 6 * 3600.0  # seconds: ranks that have done their runs wait for those that have not


def work(world, arguments):
    """Tune and race; print; return what is stored."""
    from distmuon.learning import race_tables, races, sweep

    task = chosen_task(arguments, world.device)
    tuning = sweep.TUNING_SEEDS[:1] if arguments.quick else sweep.TUNING_SEEDS
    race = races.stored_race(world, task, arguments.optimizer, tuning, range(arguments.seeds))
    for lines in (race_tables.result_lines(race), race_tables.verdict_lines(race)):
        world.say("\n".join(lines))
    return race


def chosen_task(arguments, device):
    """Return the task with what the command line changes of it."""
    from dataclasses import replace

    from distmuon.learning import sweep, tasks

    task = replace(sweep.with_dtype(tasks.TASKS[arguments.task], arguments.dtype), device=device)
    return task if arguments.steps is None else task.shorter(arguments.steps)


def parse():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("--task", default="digits", metavar=launch.choices(TASKS), help="what to learn (default: %(default)s)")
    add(
        "--optimizer",
        nargs="+",
        default=list(OPTIMIZERS),
        metavar="NAME",
        help="some of sgd, adamw, muon (default: all)",
    )
    add("--seeds", type=int, default=8, metavar="N", help="fresh seeds to race on (default: %(default)s)")
    add("--steps", type=int, metavar="N", help="of every run (default: the task's)")
    add("--dtype", default="float32", metavar="{float32,float64}", help="of the training (default: %(default)s)")
    add("--quick", action="store_true", help="tune on one seed instead of three")
    add("--ranks", type=int, default=2, metavar="N", help="processes that share the runs (default: %(default)s)")
    add("--backend", default="gloo", metavar="{gloo,nccl}", help="nccl: on GPUs, one per rank (default: %(default)s)")
    add("--json", metavar="FILE", help="write everything that was found here")
    return parser.parse_args()


def main():
    arguments = parse()
    launch.check_writable("--json", arguments.json)
    world = {"dp": arguments.ranks, "backend": arguments.backend, "timeout": PATIENCE}
    race = launch.run(work, (arguments,), **world)[0]
    if arguments.json:
        from distmuon.measured import results

        Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
        results.write(arguments.json, race)
    return 0


if __name__ == "__main__":
    launch.command(main)
