"""One attention layer as QK-Clip sees it: which rows of which parameters make which head, and which are here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distmuon.optim.param_groups import refuse_meta
from distmuon.sharding.collectives import Group
from distmuon.sharding.layout import Range
from distmuon.sharding.local_views import local
from distmuon.sharding.meshes import own_box
from distmuon.sharding.precision import widest
from distmuon.sharding.tensor_parallel import tp_split_dim

SCALED = ("weight", "bias")  # what a projection may consist of: its output is linear in both, row by row


class AttentionHeads(NamedTuple):
    """The projections of one attention layer.

    query, key: modules with a weight [rows, inputs] and perhaps a bias [rows], of d rows for each head, one head after
        the other. The same module twice is a fused one, with the rows of query, key and value in this order. Where TP
        cuts a fused one, a rank holds its part of each.
    heads: of the query, in the whole layer.
    key_heads: of the key, where several query heads share one; None: as many.
    """

    query: nn.Module
    key: nn.Module
    heads: int
    key_heads: int | None = None

    @property
    def keys(self) -> int:
        """How many key heads there are."""
        return self.heads if self.key_heads is None else self.key_heads

    @property
    def fused(self) -> bool:
        return self.query is self.key


class PlacedHeads:
    """A layer on this rank. tp: over whose ranks plain tensors with the mark `tp_split_dim` are cut.

    The parameters are those of this moment: FSDP2 puts others into the modules while they run.
    Raises ValueError, naming the layer and the remedy, for what cannot be scaled head by head.
    """

    def __init__(self, name: str, attention: AttentionHeads, tp: Group) -> None:
        self.name, self.attention, self.tp = name, attention, tp
        heads, keys = attention.heads, attention.keys
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (heads, keys)):
            raise ValueError(f"{name!r} has heads={heads!r}, key_heads={keys!r}; give numbers from 1.")
        if heads % keys:
            raise ValueError(f"{name!r} has {heads} heads and {keys} key heads; give a number that divides {heads}.")
        if attention.fused:
            projections = [("fused projection", attention.query, heads + 2 * keys)]
        else:
            projections = [("query", attention.query, heads), ("key", attention.key, keys)]
        self.parameters = {which: self._scaled(which, module) for which, module, _ in projections}
        self.weights = {f"the {which} of {name!r}": held["weight"] for which, held in self.parameters.items()}
        for which, _, number in projections:
            for leaf, p in self.parameters[which].items():
                refuse_meta(f"{name}, {which}, {leaf}", p)
                self._check_rows(f"the {leaf} of the {which} of {name!r}", p, number)
        first, _, number = projections[0]
        self._weight = self.parameters[first]["weight"]
        self.width = self._weight.shape[0] * self._cuts(self._weight) // number  # d

    def heads_of(
        self,
        query: Tensor,  # [batch, heads here, length, d]
        key: Tensor,  # [batch, key heads here, key length, d]
    ) -> Range:
        """Return which heads of the whole layer these are; raise ValueError for tensors that cannot be this layer's."""
        name, attention, weight = self.name, self.attention, self._weight
        if isinstance(query, DTensor) or isinstance(key, DTensor):
            raise ValueError(f"queries or keys of {name!r} are DTensors; record their local tensors (to_local()).")
        cuts, place = self._cuts(weight), self.tp.rank
        if isinstance(weight, DTensor) and query.ndim == 4 and query.shape[1] != attention.heads:
            last = weight.device_mesh.ndim - 1  # FSDP2 leaves TP the last dimension of the mesh
            cuts, place = weight.device_mesh.shape[last], weight.device_mesh.get_local_rank(last)
        heads, keys = attention.heads // cuts, attention.keys // cuts
        expected = [[heads, self.width], [keys, self.width]]
        if [[t.shape[1], t.shape[3]] if t.ndim == 4 else [] for t in (query, key)] != expected:
            raise ValueError(
                f"queries and keys of {name!r} have shapes {list(query.shape)} and {list(key.shape)}; expected "
                f"[batch, {heads}, length, {self.width}] and [batch, {keys}, length, {self.width}], as "
                "scaled_dot_product_attention takes them."
            )
        if isinstance(weight, DTensor) and cuts > 1 and attention.fused:
            raise ValueError(
                f"{name!r} is fused and cut over TP as one DTensor, which does not say whose rows are whose; give "
                "query and key modules of their own."
            )
        first = heads * place if cuts > 1 else 0
        return Range(first, first + heads)

    def factors(
        self,
        gammas: Sequence[float],  # of all heads of the layer
        alpha: float,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (parameter, factors of its rows on this rank): gamma^alpha for queries, gamma^(1 - alpha) for keys.

        A key head that several query heads share stays: each of them takes its whole gamma, and none moves another's
        logits. Source: Kimi K2, section 2.1, which treats the key part that all heads share (k^R) so.
        """
        keys = self.attention.keys
        shared = keys < self.attention.heads
        query = [gamma if shared else gamma**alpha for gamma in gammas]
        key = [1.0] * keys if shared else [gamma ** (1 - alpha) for gamma in gammas]
        of_projections = [[query, key, [1.0] * keys]] if self.attention.fused else [[query], [key]]
        for (which, held), parts in zip(self.parameters.items(), of_projections, strict=True):
            for leaf, p in held.items():
                device = local(p).device
                wide = [torch.tensor(part, dtype=widest(device), device=device) for part in parts]
                rows = [part.repeat_interleave(self.width) for part in wide]
                if isinstance(p, DTensor):
                    yield p, torch.cat(rows)[own_box(f"{self.name}, {which}, {leaf}", p)[0].as_slice]
                else:
                    cuts = self._cuts(p)
                    yield p, torch.cat([part.chunk(cuts)[self.tp.rank if cuts > 1 else 0] for part in rows])

    def _scaled(self, which: str, module: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of a projection."""
        found: dict[str, Tensor] = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
        if "weight" not in found or found.keys() - set(SCALED) or found["weight"].ndim != 2:
            shapes = ", ".join(f"{leaf} {list(p.shape)}" for leaf, p in found.items()) or "no parameters"
            raise ValueError(
                f"the {which} of {self.name!r} has {shapes}; the clip scales rows of a weight [rows, inputs] and of a "
                "bias. Give such a module, or bound these logits by a norm on queries and keys."
            )
        return found

    def _cuts(self, p: Tensor) -> int:
        """Return into how many parts TP has cut a plain tensor's rows."""
        return self.tp.size if not isinstance(p, DTensor) and tp_split_dim(p) == 0 else 1

    def _check_rows(self, where: str, p: Tensor, number: int) -> None:
        cuts, attention = self._cuts(p), self.attention
        if not isinstance(p, DTensor) and self.tp.size > 1 and tp_split_dim(p) not in (0, None):
            raise ValueError(f"{where} is cut over TP along its inputs, through all heads; cut it along its rows.")
        if (rows := p.shape[0] * cuts) % number:
            raise ValueError(f"{where} has {rows} rows, which are no {number} heads; give the layer's number of heads.")
        if attention.heads % cuts or attention.keys % cuts:
            raise ValueError(
                f"{where} is cut over {cuts} TP ranks, which cannot hold {attention.heads} heads and {attention.keys} "
                "key heads in equal parts; choose a T that divides both."
            )
