"""The public name of `distmuon.extras.checkpoint`; and a command, python -m distmuon.checkpoint FOLDER FILE."""

import sys

from distmuon.extras.checkpoint import (
    CheckpointError,
    async_save,
    at_step,
    claim,
    load,
    load_newest,
    notes,
    prune,
    save,
    saved_steps,
    to_torch,
    weights,
)
from distmuon.extras.checkpoint.export import main

__all__ = [
    "CheckpointError", "async_save", "at_step", "claim", "load", "load_newest", "notes", "prune", "save", "saved_steps",
    "to_torch", "weights",
]  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
