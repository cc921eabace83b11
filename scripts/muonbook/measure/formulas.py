"""Bytes in closed form: what one rank sends per optimizer step, on average over its DP group, by the ring formula
(that of a single collective is `sharding.ledger.ring_bytes`).

n    elements of the matrices that one TP rank holds
g    bytes per element of the gradients' reduce-scatter (or all-reduce)
w    of the parameters' all-gather
m    of the momentum's all-gathers
f    (D - 1) / D: the part of a gathered bucket that a ring makes every rank send
s    in [1, D]: how many DP ranks own a piece of a matrix, on average, weighted by the matrices' sizes

Sources: the ring algorithms (Patarasuk and Yuan 2009); ZeRO (Rajbhandari et al. 2020, section 7); and for Muon,
Moonlight (Liu et al. 2025, section 2.3), whose "(1, 1.25]" is `ratio` of "gather_cut" with g = w = 4, m = 2 and T = 1,
from s = 1 to s = D. The TP terms are ours: the paper leaves them out, in a footnote.

The formulas know matrices and nothing else. A real step also sends padding, the parameters that belong to AdamW, and
the norms of the gradients: `beside` counts these from the map's sizes alone, so that formula + beside = prediction,
exactly. That is why all of this is in Fractions.
"""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction

from distmuon.sharding.layout import ITEM_BYTES, Bucket, Layout

Exact = Fraction | int


def sent_share(dp: int) -> Fraction:
    """Return f = (D - 1) / D."""
    return Fraction(dp - 1, dp)


def ddp_adamw(dp: int, n: int, g: int) -> Fraction:
    """Return 2 f n g: an all-reduce is a reduce-scatter and an all-gather."""
    return 2 * sent_share(dp) * n * g


def zero1_adamw(dp: int, n: int, g: int, w: int) -> Fraction:
    """Return f n (g + w): a reduce-scatter of gradients and an all-gather of parameters."""
    return sent_share(dp) * n * (g + w)


def momentum_sent(strategy: str, dp: int, tp: int, s: Exact) -> Fraction:
    """Return how many of n elements a rank sends so that Newton–Schulz sees whole matrices, which TP cuts if T > 1.

    gather_all    (D - 1) / D      +  (T - 1) s / D       buckets over DP; over TP by all who own a piece
    gather_cut    (s - 1) / D      +  (T - 1) s / D       pieces to the matrix's other owners; over TP the same
    owner         0                +  2 (T - 1) / (T D)   blocks to one owner, and blocks of the update back
    """
    all_own = Fraction(tp - 1, dp) * s
    return {
        "gather_all": sent_share(dp) + all_own,
        "gather_cut": Fraction(s - 1) / dp + all_own,
        "owner": Fraction(2 * (tp - 1), tp * dp),
    }[strategy]


def muon(strategy: str, dp: int, tp: int, n: int, g: int, w: int, m: int, s: Exact) -> Fraction:
    """Return ZeRO-1's f n (g + w), and m n times `momentum_sent`."""
    return zero1_adamw(dp, n, g, w) + m * n * momentum_sent(strategy, dp, tp, s)


def ratio(strategy: str, dp: int, tp: int, g: int, w: int, m: int, s: Exact) -> Fraction:
    """Return Muon / ZeRO-1 AdamW, 1 + m / (f (g + w)) times `momentum_sent`; for D = 1 AdamW sends nothing."""
    return 1 + Fraction(m, g + w) * momentum_sent(strategy, dp, tp, s) / sent_share(dp)


# ---- What a real map adds ---------------------------------------------------------------------------------


def matrices_in(layout: Layout, bucket: Bucket, muon: Collection[int]) -> int:
    """Return n of one bucket."""
    return sum(layout.specs[index].numel for index in bucket.params if index in muon)


def mean_owners(layout: Layout, muon: Collection[int]) -> Fraction:
    """Return s of a map, a mean over matrices."""
    sizes = {index: layout.specs[index].numel for bucket in layout.buckets for index in bucket.params if index in muon}
    touched = sum(
        len(layout.owners(bucket, index)) * sizes[index]
        for bucket in layout.buckets
        for index in bucket.params
        if index in sizes
    )
    return Fraction(touched, sum(sizes.values()))


def beside(layout: Layout, tp: int, muon: Collection[int], m: int = 0) -> dict[str, Fraction]:
    """Return what a step sends beside the formula, by what it is, in bytes per rank: {"padding": ..., ...}.

    muon: indices of the matrices that the formula speaks of. m: bytes per element of the momentum where `gather_all`
    gathers a bucket whole, so that what else lies in it travels along as zeros; 0 for all others.
    """
    found = {"AdamW's parameters": Fraction(0), "padding": Fraction(0)}
    for bucket in layout.buckets:
        buffer = layout.buffers[bucket.buffer_idx]
        n = matrices_in(layout, bucket, muon)
        each = ITEM_BYTES[buffer.grad_dtype] + ITEM_BYTES[buffer.param_dtype] + (m if n else 0)
        found["AdamW's parameters"] += sent_share(layout.dp) * (bucket.numel - n) * each
        found["padding"] += sent_share(layout.dp) * (bucket.padded - bucket.numel) * each
    ranks = layout.dp * tp
    chunk = -(-(16 * len(layout.specs) + 24) // ranks)  # two float64 per parameter and three more, over all ranks
    return {**found, "norms of the gradients": Fraction(2 * (ranks - 1) * chunk)}
