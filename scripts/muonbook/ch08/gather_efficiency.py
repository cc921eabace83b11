"""What a gather brings to a rank, and what of it the rank can use: from the map alone, for any number of ranks.

`gather_all` brings every bucket with a matrix in it whole. A smarter gather would bring only what a boundary cuts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from distmuon.optim.newton_schulz import flops
from distmuon.sharding.layout import Layout, ParamSpec


class Freight(NamedTuple):
    """Shares of what `gather_all` brings to a rank.

    cut: of matrices that it owns in part. mine: of matrices that it owns whole. others: of matrices of which it owns
    nothing. dead: AdamW's elements and padding, which travel as zeros.
    """

    cut: float
    mine: float
    others: float
    dead: float


def transformer(blocks: int = 24, d: int = 1024, vocabulary: int = 32_768, dtype: str = "float32") -> list[ParamSpec]:
    """Return a GPT-like model: four matrices per block for Muon, then an embedding and the norms for AdamW."""
    shapes = {"qkv": (3 * d, d), "out": (d, d), "up": (4 * d, d), "down": (d, 4 * d)}
    matrices = [ParamSpec(f"{b}.{name}", shape, dtype) for b in range(blocks) for name, shape in shapes.items()]
    norms = [ParamSpec(f"norm {n}", (d,), dtype) for n in range(2 * blocks)]
    return [*matrices, ParamSpec("embedding", (vocabulary, d), dtype), *norms]


def freight_of(layout: Layout, muon: Collection[int], rank: int) -> Freight:
    """Sort the elements of all gathered buckets, as one rank sees them. muon: indices of Muon's matrices."""
    cut = mine = others = dead = 0
    for bucket in layout.buckets:
        if not set(muon) & set(bucket.params):
            continue  # not gathered
        dead += bucket.padded - bucket.numel
        for index in bucket.params:
            owners, numel = layout.owners(bucket, index), layout.specs[index].numel
            if index not in muon:
                dead += numel
            elif rank not in owners:
                others += numel
            elif len(owners) == 1:
                mine += numel
            else:
                cut += numel
    total = cut + mine + others + dead
    return Freight(cut / total, mine / total, others / total, dead / total)


def mean_freight(layout: Layout, muon: Collection[int]) -> Freight:
    """Return the mean of `freight_of` over all ranks."""
    every = [freight_of(layout, muon, rank) for rank in range(layout.dp)]
    return Freight(*(sum(shares) / layout.dp for shares in zip(*every, strict=True)))


def _owners(layout: Layout, muon: Collection[int]) -> Iterator[tuple[int, ParamSpec]]:
    for bucket in layout.buckets:
        for index in set(muon) & set(bucket.params):
            yield len(layout.owners(bucket, index)), layout.specs[index]


def only_cut_ratio(layout: Layout, muon: Sequence[int], g: int = 4, w: int = 4, m: int = 2) -> float:
    """Return bytes over ZeRO-1 AdamW's if only cut matrices travelled, among their owners: mean over ranks.

    g, w, m: bytes per element of gradients, parameters and momentum on the wire. Counts matrices alone.
    """
    found = list(_owners(layout, muon))
    momentum = m * sum((owners - 1) * spec.numel for owners, spec in found) / layout.dp
    return 1 + momentum / ((g + w) * (layout.dp - 1) / layout.dp * sum(spec.numel for _, spec in found))


def repeated_flops(layout: Layout, muon: Collection[int]) -> float:
    """Return owners of a matrix, mean over matrices weighted by the FLOPs of Newton–Schulz: how often it is repeated.

    `formulas.mean_owners` weights them by size.
    """
    found = list(_owners(layout, muon))
    return sum(owners * flops(spec.shape) for owners, spec in found) / sum(flops(spec.shape) for _, spec in found)
