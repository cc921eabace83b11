"""Chapter 17: MuonW in the program that you already have: counted, saved and loaded on another mesh, watched, raced.

python scripts/17_muonw.py --dp 4
python scripts/17_muonw.py --dp 2 --tp 2
python scripts/17_muonw.py --dp 4 --tp 2 --train 20 --save out/step-10 --save-at 10
python scripts/17_muonw.py --dp 2 --tp 2 --train 20 --load out/step-10
"""

from pathlib import Path

from distmuon import launch
from muonbook.ch17 import puzzle as own_pieces
from muonbook.puzzles import add_arguments, handle

COUNT, TRAIN = "muonbook.ch17.four_steps:count", "muonbook.ch17.training:train"
HEADS, WIDTH = 4, 64  # of the program's model, which TP and FSDP2 share out
ON = (*launch.WORLD, "hybrid")
TAKES = {
    "": ON,
    "--train": (*ON, "load", "save", "save_at", "watch"),
}  # job -> its options


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=1)
    parser.add_argument("--hybrid", action="store_true", help="two replicas of the shards (HSDP)")
    job = parser.add_argument_group("the job")
    job.add_argument("--train", type=int, metavar="N", help="train on digits up to step N")
    parser.add_argument("--load", metavar="FOLDER", help="with --train: go on from this checkpoint")
    parser.add_argument("--save", metavar="FOLDER", help="with --train: leave a checkpoint, in a new folder")
    parser.add_argument("--save-at", type=int, metavar="N", help="with --save: after step N (default: the last)")
    parser.add_argument("--watch", metavar="FILE", help="with --train: write what Metrics sees here, a line per step")
    add_arguments(parser)
    return parser.parse_args()


def check(arguments):
    """Raise UsageError for a mesh, or a number of steps, that cannot be."""
    if arguments.hybrid and (arguments.dp % 2 or arguments.tp > 1):
        raise launch.UsageError(
            f"--hybrid with --dp {arguments.dp} --tp {arguments.tp}: two replicas want an even --dp and --tp 1."
        )
    if arguments.tp >= 1 and HEADS % arguments.tp:
        raise launch.UsageError(f"--tp {arguments.tp} does not divide the model's {HEADS} heads; choose 1, 2 or 4.")
    if arguments.train is None and arguments.dp >= 1 and WIDTH % arguments.dp:
        raise launch.UsageError(f"--dp {arguments.dp} does not divide {WIDTH} rows, which steps 1 to 3 need; choose 4.")
    shared = (arguments.backend, arguments.device) == ("gloo", "cuda") and arguments.dp * arguments.tp > 1
    if arguments.train is None and shared:
        raise launch.UsageError(
            "--backend gloo --device cuda: torch's DTensor gathers no GPU tensors over gloo, which this job needs; "
            "take --backend nccl, --device cpu or --train."
        )
    launch.check_range(arguments, train=(1, 1000), save_at=(1, arguments.train or 1))
    launch.check_writable("--watch", arguments.watch)
    if arguments.save is not None and Path(arguments.save).exists():
        raise launch.UsageError(f"--save {arguments.save} exists already, and nothing is overwritten; name another.")


def main():
    arguments = parse()
    if (code := handle(arguments, own_pieces.PUZZLE)) is not None:
        return code
    launch.chosen_job(arguments, TAKES)
    check(arguments)
    if arguments.train is not None:
        job = (arguments.hybrid, arguments.train, arguments.load, arguments.save, arguments.save_at, arguments.watch)
        (said, refused), *_ = launch.run(TRAIN, job, **launch.options(arguments))
        if refused:
            raise launch.UsageError(refused)
    else:
        said, *_ = launch.run(COUNT, (arguments.hybrid,), **launch.options(arguments))
    if launch.is_main_process():
        print("\n".join(said))
    return 0


if __name__ == "__main__":
    launch.command(main)
