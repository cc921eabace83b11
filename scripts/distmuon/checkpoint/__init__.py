"""Checkpoints that any grid may load: whole tensors in named boxes, checked before they are believed."""

from distmuon.checkpoint.folders import load, save
from distmuon.checkpoint.storage import CheckpointError

__all__ = ["CheckpointError", "load", "save"]
