"""What to watch while an optimizer trains a matrix: its update, that update's size, how far the matrix stretches."""

from __future__ import annotations

import torch
from torch import Tensor


def update_of(before: Tensor, after: Tensor, lr: float, weight_decay: float) -> Tensor:
    """Return the update of one step of a matrix [A, B]: decay and learning rate are taken out again."""
    return ((1 - lr * weight_decay) * before - after) / lr


def rms(update: Tensor) -> float:
    """Return the root of the mean of all squares."""
    return update.square().mean().sqrt().item()


def spectral_norm(weight: Tensor) -> float:
    """Return the largest factor by which `weight` [A, B] stretches any input."""
    return torch.linalg.matrix_norm(weight, ord=2).item()
