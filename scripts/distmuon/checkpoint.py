"""The public names of `distmuon.extras.checkpoint`; and a command, python -m distmuon.checkpoint FOLDER FILE."""

import argparse
import sys

from distmuon.extras.checkpoint.files import CheckpointError
from distmuon.extras.checkpoint.runs import at_step, claim, load_newest, prune, saved_steps
from distmuon.extras.checkpoint.save_and_load import async_save, load, notes, save, to_torch, weights

__all__ = [
    "CheckpointError",
    "async_save",
    "at_step",
    "claim",
    "load",
    "load_newest",
    "notes",
    "prune",
    "save",
    "saved_steps",
    "to_torch",
    "weights",
]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m distmuon.checkpoint",
        description="Take the weights out of a checkpoint: python -m distmuon.checkpoint FOLDER FILE, and torch.load "
        "reads the file.",
    )
    parser.add_argument("folder", help="of one checkpoint, such as runs/a/step-000100")
    parser.add_argument("file", help="for torch.save, such as weights.pt")
    arguments = parser.parse_args()
    try:
        to_torch(arguments.folder, arguments.file)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
