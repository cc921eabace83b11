"""Checkpoints that any grid may load: whole tensors in named boxes, checked before they are believed."""

from distmuon.extras.checkpoint.files import CheckpointError
from distmuon.extras.checkpoint.folders import async_save, load, notes, save, to_torch, weights
from distmuon.extras.checkpoint.runs import at_step, claim, load_newest, prune, saved_steps

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
