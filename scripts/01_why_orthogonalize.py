"""Chapter 1: train a small network for a moment, look at the spectra of one layer, and take one step in two directions.

python scripts/01_why_orthogonalize.py
python scripts/01_why_orthogonalize.py --save out/one_step.npz
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch01 import puzzle as steepest_step
from muonbook.jobs import run_job


def parse():
    parser = launch.parser(__doc__)
    parser.add_argument("--save", metavar="FILE", help="write the first seed's matrices and losses here (.npz)")
    puzzles.add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, steepest_step.PUZZLE)) is not None:
        return code
    if arguments.save is not None and not arguments.save.endswith(".npz"):
        raise launch.UsageError(f"--save {arguments.save}: arrays are saved as .npz; choose such a name.")
    launch.check_writable("--save", arguments.save)
    return run_job(arguments, "muonbook.ch01.experiments:work", (), arguments.save)


if __name__ == "__main__":
    launch.command(main)
