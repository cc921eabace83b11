"""Data: scikit-learn's bundled handwritten digits, 1,797 real images of 8 x 8 pixels, no download.

Source: Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distmuon.models.recipe import TRAINING_ROWS
from distmuon.sharding.grid import Grid

DIGITS_ROWS, DIGITS_PIXELS = 1797, 64


class Split(NamedTuple):
    """Images with mean 0 and variance 1 over the training rows, and their labels."""

    images: Tensor  # [rows, pixels], float64
    labels: Tensor  # [rows], int64


def scanned() -> Tensor:  # [rows, pixels + 1], float64
    """Return the images, 0 to 16 per pixel, each with its label behind it, in the order of scikit-learn's file.

    Read without importing scikit-learn, which takes a second, where its file lies as it does in 1.x; by it, elsewhere.
    Raises ModuleNotFoundError without scikit-learn.
    """
    found = importlib.util.find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            return torch.from_numpy(np.loadtxt(file, delimiter=","))
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(np.column_stack([images, labels]))


def digits(grid: Grid, seed: int) -> tuple[Split, Split]:
    """Return (training, held-out) digits in float64, shuffled by `seed`, on the grid's device. Collective.

    Rank 0 reads them and broadcasts, so that all have the same.
    """
    table = torch.zeros(DIGITS_ROWS, DIGITS_PIXELS + 1, dtype=torch.float64, device=grid.device)  # pixels, label
    if grid.world.rank == 0:
        table.copy_(scanned())
    table = grid.world.broadcast(table, "data")
    table = table[torch.randperm(DIGITS_ROWS, generator=torch.Generator().manual_seed(seed)).to(grid.device)]
    rest, train = table.split([DIGITS_ROWS - TRAINING_ROWS, TRAINING_ROWS])
    mean, std = train[:, :-1].mean(), train[:, :-1].std()
    return tuple(Split((t[:, :-1] - mean) / std, t[:, -1].long()) for t in (train, rest))  # type: ignore[return-value]


def batch_rows(step: int, batch: int, rows: int, seed: int) -> Tensor:  # [batch]
    """Return the row numbers of global batch `step`: the same on every rank and on every grid."""
    per_epoch = rows // batch
    epoch, position = divmod(step, per_epoch)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed + 1 + epoch))
    return order[position * batch : (position + 1) * batch]
