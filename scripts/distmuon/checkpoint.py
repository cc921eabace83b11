"""The public names of `distmuon.extras.checkpoint`; and a command, python -m distmuon.checkpoint FOLDER FILE."""

import sys

from distmuon.extras.checkpoint.export import main
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

if __name__ == "__main__":
    sys.exit(main())
