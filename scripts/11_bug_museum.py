"""Chapter 11: run distributed Muon with one thing broken, and see which alarms go off, and which do not.

python scripts/11_bug_museum.py --exhibit "block-wise Newton–Schulz"
python scripts/11_bug_museum.py
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch11 import puzzle as update_alarm
from muonbook.jobs import check_json, run_job


def exhibit_name(wanted, names):
    """Return the exhibit that is meant: letters decide, not case, hyphens or the dash in Newton–Schulz."""

    def letters(name):
        return "".join(letter for letter in name.lower() if letter.isalnum())

    for name in names:
        if letters(name) == letters(wanted):
            return name
    raise launch.UsageError(f"--exhibit {wanted!r} is not in the museum; choose one of {', '.join(names)}.")


def parse():
    parser = launch.parser(__doc__)
    parser.add_argument(
        "--exhibit", metavar="NAME", help="which one to run; without it, all, and a table of the alarms that go off"
    )
    parser.add_argument("--json", metavar="FILE", help="write what every exhibit shows here")
    parser.set_defaults(dp=2, tp=2)  # the museum's grid
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="per collective")
    puzzles.add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, update_alarm.PUZZLE)) is not None:
        return code
    check_json(arguments)
    from muonbook.ch11.museum import EXHIBITS  # imports torch: only now

    names = [None, *EXHIBITS]
    if arguments.exhibit is not None:
        chosen = exhibit_name(arguments.exhibit, ["healthy", *EXHIBITS])
        names = [None if chosen == "healthy" else chosen]
    return run_job(arguments, "muonbook.ch11.experiments:tour", (names,), names)


if __name__ == "__main__":
    launch.command(main)
