"""Checkpoints that any grid may load: whole tensors in named boxes, checked before they are believed."""

from distmuon.checkpoint.folders import async_save, load, save
from distmuon.checkpoint.runs import at_step, keep_newest, load_newest, saved_steps
from distmuon.checkpoint.storage import CheckpointError

__all__ = ["CheckpointError", "async_save", "at_step", "keep_newest", "load", "load_newest", "save", "saved_steps"]
