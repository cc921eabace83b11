"""Chapter 16: beyond the blueprint. How near a step of ours comes to its floor, and how near everybody else's.

python scripts/16_beyond.py --measure --json book/results/step.json
python scripts/16_beyond.py --measure --quick --json out/step.json

--measure takes about ten minutes on two cores, and needs the machine to itself; --quick one. Other implementations run
where they are: clone github.com/microsoft/dion and github.com/KellerJordan/Muon into a folder and name it.
"""

import os
from pathlib import Path

from distmuon import launch

TAKES = {"--measure": ("quick", "json", "peers")}  # job -> its options


def measure(arguments):
    """Take this chapter's measurements and write them."""
    from muonbook.ch16 import step_race
    from muonbook.measure import results

    found = step_race.measure(arguments.quick, arguments.peers)
    results.write(arguments.json, found)
    print(f"{step_race.table(found)}\nResults: {arguments.json}")


def parse():
    parser = launch.parser(__doc__)
    parser.add_argument("--measure", action="store_true", help="race everybody's step, and write --json")
    parser.add_argument("--quick", action="store_true", help="with --measure: a few rounds, for a first impression")
    parser.add_argument("--json", metavar="FILE", help="with --measure: write what was measured here")
    parser.add_argument(
        "--peers",
        metavar="FOLDER",
        default=os.environ.get("PEERS"),
        help="with --measure: where clones of other implementations are (default: the environment variable PEERS)",
    )
    return parser.parse_args()


def main():
    arguments = parse()
    if not arguments.measure:
        raise launch.UsageError("choose what to do: --measure.")
    launch.chosen_job(arguments, TAKES)
    if arguments.json is None:
        raise launch.UsageError("--measure writes a file; add --json FILE.")
    if launch.under_torchrun():
        raise launch.UsageError("--measure starts worlds of its own; run it without torchrun.")
    if arguments.peers and not Path(arguments.peers).is_dir():
        raise launch.UsageError(f"--peers {arguments.peers}: there is no such folder; clone the others into one.")
    launch.check_writable("--json", arguments.json)
    measure(arguments)
    return 0


if __name__ == "__main__":
    launch.command(main)
