"""Checkpoints that any grid may load: whole tensors in named boxes, checked before they are believed."""

from distmuon.checkpoint.files import CheckpointError
from distmuon.checkpoint.folders import async_save, load, notes, save, to_torch, weights
from distmuon.checkpoint.runs import at_step, claim, keep_newest, load_newest, saved_steps

__all__ = [
    "CheckpointError",
    "async_save",
    "at_step",
    "claim",
    "keep_newest",
    "load",
    "load_newest",
    "notes",
    "save",
    "saved_steps",
    "to_torch",
    "weights",
]
