"""Chapter 3: train the digits with Muon and AdamW side by side, and measure what each line of the step does.

python scripts/03_muon.py
python scripts/03_muon.py --rms --json out/rms.json
python scripts/03_muon.py --decay --json out/decay.json
python scripts/03_muon.py --embedding --json out/embedding.json
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch03.puzzle import PUZZLE
from muonbook.jobs import check_json, write_json

SHOWS = {  # what muonbook.ch03.experiments can show besides a training
    "rms": "Train with AdamW alone and with Muon at two scales; print the RMS of one matrix's updates.",
    "decay": "Train at several strengths of weight decay; print the spectral norm of one matrix and its ceiling.",
    "embedding": "Follow rows of a transformer's embedding under AdamW and under Muon, without decay.",
}
TAKES = dict.fromkeys(("", *(f"--{name}" for name in SHOWS)), ("json",))  # job -> its options


def parse():
    parser = launch.parser(__doc__)
    which = parser.add_mutually_exclusive_group()
    for name, what in SHOWS.items():
        which.add_argument(f"--{name}", action="store_true", help=what)
    parser.add_argument("--json", metavar="FILE", help="write the curves behind the page here")
    puzzles.add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, PUZZLE)) is not None:
        return code
    job = launch.chosen_job(arguments, TAKES)
    check_json(arguments)
    curves = launch.run("muonbook.ch03.experiments:show", (job.removeprefix("--") or "training",))[0]
    if arguments.json:
        write_json(arguments.json, curves)
    return 0


if __name__ == "__main__":
    launch.command(main)
