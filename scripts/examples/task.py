"""What the examples train: a small transformer on Alice in Wonderland.

Your model and your data go here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(
    str(Path(__file__).resolve().parents[1])
)  # this clone's distmuon, if none is installed

from distmuon.models.corpus import corpus
from distmuon.models.networks import ALONE, Transformer, initial_weights
from distmuon.sharding.collectives import Group
from distmuon.sharding.tensor_parallel import load_slices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = int(os.environ.get("STEPS", "200"))
STOP = int(
    os.environ.get("STOP", STEPS)
)  # the step before which a job is over, to be resumed
BATCH, CONTEXT = 16, 64  # windows in a batch, tokens in a window


def make_model(tp: Group = ALONE, seed: int = 0) -> nn.Module:
    """Return the same model on every rank, with layers cut over the ranks of `tp`."""
    shape = (
        corpus("alice").vocabulary,
        64,
        2,
        4,
        CONTEXT,
    )  # vocabulary, width, layers, heads, context
    model = Transformer(*shape, tp=tp)
    load_slices(model, initial_weights(Transformer(*shape), seed), tp)
    return model.to(DEVICE)


def batches(
    rank: int = 0, ranks: int = 1, first: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, next tokens), [n, length] each: this rank's part of each batch."""
    for step in range(first, STOP):
        windows = corpus("alice").batch(step, BATCH, CONTEXT, 0, rank, ranks)
        yield windows[0].to(DEVICE), windows[1].to(DEVICE)


def loss_of(model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per token."""
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
