"""Chapter 16: from the published layout to one owner per matrix, in five ways, counted; and the race.

python scripts/16_owner.py --dp 4 --tp 2
python scripts/16_owner.py --measure --json book/results/step.json
python scripts/16_owner.py --measure --quick --json out/step.json

--measure races every optimizer's step. It takes about ten minutes on two cores and needs the machine to itself; with
--quick it takes one. Other implementations run where they are: clone github.com/microsoft/dion and
github.com/KellerJordan/Muon into a folder and name it.
"""

import os
from pathlib import Path

from distmuon import launch
from muonbook.ch16 import puzzle as dealing
from muonbook.jobs import check_measurement, run_job
from muonbook.puzzles import add_arguments, handle

HEADS = 8  # of the transformer, which TP divides
TAKES = {"": launch.WORLD, "--measure": ("quick", "json", "peers")}  # job -> its options


def measure(arguments):
    """Take this chapter's measurements and write them."""
    from muonbook.ch16.race import step_race
    from muonbook.measure import results

    results.write(arguments.json, step_race.measure(arguments.quick, arguments.peers))


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=2)
    job = parser.add_argument_group("the job")
    job.add_argument("--measure", action="store_true", help="race every optimizer's step, and write --json")
    parser.add_argument("--quick", action="store_true", help="with --measure: a few rounds, for a first impression")
    parser.add_argument("--json", metavar="FILE", help="with --measure: write what was measured here")
    parser.add_argument(
        "--peers",
        metavar="FOLDER",
        default=os.environ.get("PEERS"),
        help="with --measure: where clones of other implementations are (default: the environment variable PEERS)",
    )
    add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := handle(arguments, dealing.PUZZLE)) is not None:
        return code
    launch.chosen_job(arguments, TAKES)
    if not arguments.measure:
        if arguments.tp >= 1 and HEADS % arguments.tp:
            raise launch.UsageError(
                f"--tp {arguments.tp} does not divide the model's {HEADS} heads; choose 1, 2, 4 or 8."
            )
        return run_job(arguments, "muonbook.ch16.experiments:take_steps")
    if arguments.peers and not Path(arguments.peers).is_dir():
        raise launch.UsageError(f"--peers {arguments.peers}: there is no such folder; clone the others into one.")
    check_measurement(arguments, "--measure")
    measure(arguments)
    return 0


if __name__ == "__main__":
    launch.command(main)
