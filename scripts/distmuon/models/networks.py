"""The one MLP and the one transformer of the project, cut over TP by the layers of `tensor_parallel`.

Both are built on any grid from the same whole weights: `initial_weights` draws them once per seed, on every
rank alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distmuon.sharding.collectives import Group
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mark_replicated

ALONE = Group("tp")  # T = 1: the layers are then plain linear layers


class MLP(nn.Module):
    """Linear layers with an activation between: ReLU, or another that works element by element.

    widths: features per layer, for instance (64, 256, 128, 128, 10). Hidden layers are cut over TP in pairs, column
    then row parallel; an odd one left over, and the head, are replicated.
    """

    def __init__(
        self, widths: Sequence[int], tp: Group = ALONE, activation: Callable[[Tensor], Tensor] = F.relu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.layers = nn.ModuleList()
        hidden = list(itertools.pairwise(widths[:-1]))
        for position, (inputs, outputs) in enumerate(hidden):
            name = f"layers.{position}"
            if position % 2 == 1:
                self.layers.append(RowParallelLinear(inputs, outputs, tp, name=name))
            elif position + 1 < len(hidden):
                self.layers.append(ColumnParallelLinear(inputs, outputs, tp, name=name))
            else:
                self.layers.append(nn.Linear(inputs, outputs))
        self.head = nn.Linear(widths[-2], widths[-1])
        mark_replicated(self)

    def forward(
        self,
        x: Tensor,  # [rows, widths[0]]
    ) -> Tensor:  # [rows, widths[-1]]
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.head(x)

    def predict_activations(self, ledger: Ledger, rows: int, item_bytes: int, tp: int) -> None:
        """Add the TP collectives of one forward and backward pass over `rows` rows: see `tensor_parallel`."""
        for layer in self.layers:
            if isinstance(layer, RowParallelLinear):
                ledger.record("all_reduce", "tp", tp, rows * layer.weight.shape[0] * item_bytes, layer.name)
            elif isinstance(layer, ColumnParallelLinear) and layer is not self.layers[0]:
                ledger.record("all_reduce", "tp", tp, rows * layer.weight.shape[1] * item_bytes, layer.name)


class Block(nn.Module):
    """One transformer block: causal self-attention and an MLP, each column then row parallel, pre-normalized.

    Query, key and value are separate matrices, each cut by whole heads. A fused one, gathered over TP, would come back
    with its rows in another order (harmless to Newton–Schulz, but not to a reader).

    watch: called with the queries and keys of every forward pass, each [batch, heads / T, length, head width]; None for
        nobody. `QKClip` watches the logits there.
    """

    watch: Callable[[Tensor, Tensor], None] | None = None

    def __init__(self, width: int, heads: int, tp: Group, name: str) -> None:
        super().__init__()
        if heads % tp.size:
            raise ValueError(f"{name}: {heads} heads cannot be split evenly over {tp.size} TP ranks.")
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (
            ColumnParallelLinear(width, width, tp, bias=False, name=f"{name}.{which}")
            for which in ("query", "key", "value")
        )
        self.out = RowParallelLinear(width, width, tp, bias=False, name=f"{name}.out")
        self.up = ColumnParallelLinear(width, 4 * width, tp, bias=False, name=f"{name}.up")
        self.down = RowParallelLinear(4 * width, width, tp, bias=False, name=f"{name}.down")

    def forward(
        self,
        x: Tensor,  # [batch, length, width]
    ) -> Tensor:  # [batch, length, width]
        y = self.query.copy_in(self.norm1(x))
        q, k, v = (  # each [batch, heads / T, length, head width], whoever has cut the layers
            layer(y, copied=True).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.watch is not None:
            self.watch(q, k)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A small decoder-only transformer.

    Embeddings, norms and head are replicated over TP, blocks are cut. The head is not tied to the embedding.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int, tp: Group = ALONE) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, tp, f"blocks.{i}") for i in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        mark_replicated(self)

    def forward(
        self,
        ids: Tensor,  # [batch, length], tokens
    ) -> Tensor:  # [batch, length, vocabulary], logits
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def predict_activations(self, ledger: Ledger, rows: int, item_bytes: int, tp: int) -> None:
        """Add the TP collectives of one forward and backward pass over `rows` tokens: all of [rows, width]."""
        payload = rows * self.positions.weight.shape[1] * item_bytes
        for block in self.blocks:
            assert isinstance(block, Block)
            for layer in (block.query, block.out, block.up, block.down):  # key and value share query's copy
                ledger.record("all_reduce", "tp", tp, payload, layer.name)


def initial_weights(model: nn.Module, seed: int) -> dict[str, Tensor]:  # name -> W[I, J], float64
    """Return whole weights for `model`, built with T = 1: the same for one seed on every rank.

    Matrices are normal with variance 1 / inputs (2 / inputs would suit ReLU better, but serves GELU worse), embeddings
    have standard deviation 0.02 (GPT-2), norms start at 1 and biases at 0.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Embedding):
            weights[name] = 0.02 * noise
        elif parameter.ndim == 2:
            weights[name] = noise / parameter.shape[1] ** 0.5
        else:
            weights[name] = torch.full_like(noise, float(isinstance(module, nn.LayerNorm) and name.endswith("weight")))
    return weights
