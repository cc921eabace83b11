"""Chapter 4b: what lies beside the race on the language: spectra, RMS, decay, routing, batch, fine-tuning, blocks.

python scripts/04b_for_the_curious.py --study spectra --steps 20 --seeds 1
python scripts/04b_for_the_curious.py --study rms decay
python scripts/04b_for_the_curious.py --json book/results/sights.json
python scripts/04b_for_the_curious.py --blocks --json book/results/blocks.json
python scripts/04b_for_the_curious.py --writing --json book/results/writing.json

Each study begins with the settings that chapter 4's stored race tuned, changes one thing, and tunes the learning rate
again wherever the change could ask for another. All of them take half an hour on two cores.
"""

from distmuon import launch
from muonbook.jobs import check_json
from muonbook.measure import results

# Named here as well as in muonbook.ch04, which needs torch: a wrong argument is answered at once.
STUDIES = ("spectra", "finetune", "rms", "decay", "routing", "batch")
MANY = ("ranks", "threads", "quick", "json", "steps", "seeds")  # runs, shared out
TAKES = {"": (*MANY, "study"), "--blocks": (*MANY, "tuning_seeds"), "--writing": MANY}  # job -> its options
FUNCTIONS = {"": "study", "--blocks": "compare_blocks", "--writing": "let_write"}  # of muonbook.ch04.studies.jobs
PATIENCE = 6 * 3600.0  # seconds: a rank that has done its runs waits for those that have not


def parse():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("--study", nargs="+", default=list(STUDIES), metavar="NAME", help=f"some of {', '.join(STUDIES)}")
    add("--blocks", action="store_true", help="what it costs to orthogonalize the blocks that TP ranks hold")
    add("--writing", action="store_true", help="what the race's three models write of the language on their way")
    add("--steps", type=int, metavar="N", help="of every run (default: the race's)")
    add("--seeds", type=int, metavar="N", help="fresh seeds, 1 to 8 (default: as stored)")
    add("--tuning-seeds", type=int, default=3, metavar="N", help="with --blocks: to tune on, 1 to 3 (default: 3)")
    add("--ranks", type=int, default=2, metavar="N", help="processes that share the runs (default: %(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="CPU threads per rank (default: %(default)s)")
    add("--quick", action="store_true", help="every study in seconds, which says nothing of any optimizer")
    add("--json", metavar="FILE", help="write everything that was found here")
    return parser.parse_args()


def checked(arguments):
    """Return the job; raise UsageError for arguments that cannot be. Imports nothing heavy."""
    job = launch.chosen_job(arguments, TAKES)
    launch.check_range(arguments, steps=(1, 10**7), seeds=(1, 8), tuning_seeds=(1, 3), ranks=(1, 256))
    if unknown := [name for name in arguments.study if name not in STUDIES]:
        raise launch.UsageError(f"--study {unknown[0]} is unknown; choose from {', '.join(STUDIES)}.")
    if len(set(arguments.study)) < len(arguments.study):
        raise launch.UsageError(f"--study {' '.join(arguments.study)}: name each once.")
    check_json(arguments)
    return job


def main():
    arguments = parse()
    job = checked(arguments)
    from muonbook.ch04.studies import jobs  # and torch

    jobs.check()
    options = {"dp": arguments.ranks, "threads": arguments.threads, "timeout": PATIENCE}
    found = launch.run(f"muonbook.ch04.studies.jobs:{FUNCTIONS[job]}", (arguments,), **options)[0]
    if arguments.json:
        results.write(arguments.json, found)
    return 0


if __name__ == "__main__":
    launch.command(main)
