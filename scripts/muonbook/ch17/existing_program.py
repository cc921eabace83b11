"""The program that a reader already has: torch's layers, FSDP2, tensor parallelism, real data. Nothing in it is ours,
but for how the images are read: to import scikit-learn takes every rank a second.

An image of 8 x 8 pixels is read row by row by a small transformer, which says what digit it is.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from distmuon.models.digits import scanned

HEAD = 16  # width of an attention head
CUTS = {
    **dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel),
    **dict.fromkeys(("out", "down"), RowwiseParallel),
}


class Layer(nn.Module):
    """Attention and an MLP, six matrices: four [w, w], one [4w, w], one [w, 4w]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width], twice
        y = self.norm1(x)
        heads = [layer(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class DigitReader(nn.Module):
    """A transformer over the rows of an image."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.rows, self.places = nn.Linear(8, width), nn.Embedding(8, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:  # [batch, 8, 8] -> [batch, 10]
        x = self.rows(images) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.mean(1)))


def wrap(model: DigitReader, mesh: DeviceMesh) -> None:
    """Cut every layer over "tp", if the mesh has that, and shard everything over the rest of it."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names and mesh["tp"].size() > 1:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {name: cut() for name, cut in CUTS.items()})
    over = mesh["dp"] if "dp" in names else mesh  # one dimension, or two: (replicate, shard)
    for layer in model.layers:
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)


@functools.cache  # or every step would read the file
def digits() -> tuple[Tensor, Tensor]:  # [n, 8, 8], 0 to 1, and [n]
    """Return all images, with what they show."""
    table = scanned()
    return table[:, :-1].view(-1, 8, 8).float() / 16, table[:, -1].long()


def batch(step: int, size: int, part: int, parts: int, device: str) -> tuple[Tensor, Tensor]:  # [n, 8, 8], [n]
    """Return one of several equal parts of the step's images, with what they show."""
    images, shown = digits()
    rows = torch.randperm(len(shown), generator=torch.Generator().manual_seed(step))[:size]
    mine = rows.chunk(parts)[part]
    return images[mine].to(device), shown[mine].to(device)
