"""Checkpoints that any grid may load: whole tensors in named boxes, checked before they are believed."""
