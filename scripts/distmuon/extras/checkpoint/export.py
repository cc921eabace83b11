"""Take the weights out of a checkpoint: python -m distmuon.checkpoint FOLDER FILE, and torch.load reads the file."""

import argparse
import sys

from distmuon.extras.checkpoint.files import CheckpointError
from distmuon.extras.checkpoint.save_and_load import to_torch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m distmuon.checkpoint", description=__doc__)
    parser.add_argument("folder", help="of one checkpoint, such as runs/a/step-000100")
    parser.add_argument("file", help="for torch.save, such as weights.pt")
    arguments = parser.parse_args()
    try:
        to_torch(arguments.folder, arguments.file)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
