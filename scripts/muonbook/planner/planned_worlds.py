"""Layouts of worlds too large to start, really planned: every matrix, bucket and DP rank, and what a step sends there.

The strategy's own planner makes the map and `prediction.predict_step` the ledger, as for a run. What differs from rank
to rank is found for all ranks at once, in arrays over ranks: a rank owns a run of consecutive matrices in a bucket.
Nothing is sampled. `owned_worlds` has the strategy in which a matrix has one owner, `priced_worlds` all that say what
they cost, `every_rank` what all ranks hold and send.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from distmuon.optim import strategies
from distmuon.optim.newton_schulz import flops
from distmuon.optim.strategies.costs import PlannedRank, WholeMatrices
from distmuon.optim.strategies.gather_cut import gather_cut_bound, gather_cut_waves
from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE, FLAT, ITEM_BYTES, Bucket, Buffer, Layout, ParamSpec
from distmuon.sharding.ledger import Ledger, ring_bytes
from distmuon.verify.prediction import predict_step
from muonbook.planner.cost_model import hops
from muonbook.planner.model_shapes import Shape

# Elements per bucket. Megatron-LM: megatron/core/distributed/distributed_data_parallel_config.py, `bucket_size`.
BUCKET_RULES: dict[str, Callable[[int], int]] = {
    "ours": lambda dp: DEFAULT_BUCKET_SIZE,
    "megatron": lambda dp: max(40_000_000, 1_000_000 * dp),
    "flat": lambda dp: FLAT,
}
MOMENTUM_BYTES = ITEM_BYTES["bfloat16"]  # per element that is gathered
COMPUTE_BYTES = ITEM_BYTES["bfloat16"]  # per element in Newton–Schulz


class Load(NamedTuple):
    """What one rank does with its matrices of a bucket: moves over TP, bytes it sends in them, operations."""

    calls: int
    sent_bytes: int
    flops: int


class Matrix(NamedTuple):
    """A matrix of Muon's: its place in the map, TP-local elements, the DP ranks that own a part, what it costs each."""

    place: int
    numel: int
    owners: range
    load: Load

    @property
    def slice(self) -> slice:
        """Its owners among all DP ranks."""
        return slice(self.owners.start, self.owners.stop)


@dataclass(frozen=True)
class PlannedWorld:
    """Parameters on one DP x TP grid under one bucket rule. muon: indices of Muon's matrices in `layout.specs`.

    strategy: "gather_all" or "gather_cut" here; `owned_worlds` has "owner", and `priced_worlds` any.
    Raises ValueError where T is more than 1 and no parameter is cut: those are the specs of one rank, or unmarked.
    """

    dp: int
    tp: int
    layout: Layout
    muon: frozenset[int]
    strategy: str = "gather_all"

    def __post_init__(self) -> None:
        if self.tp > 1 and all(spec.tp_split_dim is None for spec in self.layout.specs):
            raise ValueError(
                f"tp is {self.tp}, but no parameter says that it is cut over TP, so every rank of a row would hold all "
                "of them; give TP-local specs with their tp_split_dim, as `Shape.specs(tp)` does, or tp 1."
            )

    @property
    def has_owners(self) -> bool:
        """Whether over TP blocks are sent straight to who orthogonalizes them."""
        return False

    @cached_property
    def matrices(self) -> list[tuple[Bucket, list[Matrix]]]:
        """Muon's matrices, by bucket, in storage order."""
        loads: dict[tuple, Load] = {}
        found = []
        for bucket in self.layout.buckets:
            rows = []
            for index in bucket.params:
                if index in self.muon:
                    spec = self.layout.specs[index]
                    kind = spec[1:]  # all but its name
                    if kind not in loads:
                        loads[kind] = self._load(spec)
                    rows.append(Matrix(index, spec.numel, self.layout.owners(bucket, index), loads[kind]))
            if rows:
                found.append((bucket, rows))
        return found

    def _load(self, spec: ParamSpec) -> Load:
        whole = spec.full_shape(self.tp)
        gathered = spec.tp_split_dim is not None and self.tp > 1
        sent = ring_bytes("all_gather", math.prod(whole) * MOMENTUM_BYTES, self.tp) if gathered else 0
        return Load(int(gathered), sent, flops(whole))

    @cached_property
    def loads(self) -> list[np.ndarray]:
        """`Load` of every rank, by bucket: [3, D] int64, for TP ranks are alike; [3, D x T] where they are not."""
        found = []
        for _, rows in self.matrices:
            columns = np.zeros((len(Load._fields), self.dp), np.int64)
            for row in rows:
                columns[:, row.slice] += np.array(row.load)[:, None]
            found.append(columns)
        return found

    @cached_property
    def bucket_groups(self) -> Mapping[tuple[Load, ...], float]:
        """Buckets by their busiest ranks. A bucket's parameters are gathered when its slowest rank is ready, so only
        those ranks matter of which no other does as much in every respect. Equal buckets are counted together."""
        return Counter(tuple(map(Load._make, undominated(columns))) for columns in self.loads)

    def rank_loads(self) -> np.ndarray:
        """Return `Load` of every rank in a whole step, its ranks as in `loads`."""
        return np.sum(self.loads, axis=0) if self.loads else np.zeros((len(Load._fields), self.dp), np.int64)

    def momentum_sent(self) -> list[np.ndarray]:
        """Return what every DP rank sends to make TP-local matrices whole, [D] int64 bytes, bucket by bucket."""
        if self.strategy == "gather_cut":
            return [self._cut_sent(bucket, rows) for bucket, rows in self.matrices]
        sizes = [ring_bytes("all_gather", bucket.padded * MOMENTUM_BYTES, self.dp) for bucket, _ in self.matrices]
        return [np.full(self.dp, size, np.int64) for size in sizes]

    def momentum_hops(self) -> float:
        """Return how many messages that takes, one after the other."""
        rows = [(entry, row) for entry, row in self.ledger() if entry.group == "dp"]
        return sum(row.calls * hops(entry.op, self.dp) for entry, row in rows if entry.label.startswith("momentum"))

    def _cut_sent(self, bucket: Bucket, rows: Sequence[Matrix]) -> np.ndarray:
        """Return what pieces of cut matrices weigh on the way to all their other owners, [D] bytes."""
        sent = np.zeros(self.dp, np.int64)
        for row in (row for row in rows if len(row.owners) > 1):
            sent[row.slice] += MOMENTUM_BYTES * (len(row.owners) - 1) * self._pieces(bucket, row)
        return sent

    def _pieces(self, bucket: Bucket, row: Matrix) -> np.ndarray:
        """Return how many elements of a matrix each of its owners has, [owners]."""
        where = self.layout.global_ranges[row.place].relative_to(bucket.offset)
        ends = bucket.shard_size * np.arange(row.owners.start, row.owners.stop + 1, dtype=np.int64)
        return np.diff(np.clip(ends, where.start, where.end))

    def ledger(self, dp_rank: int = 0, muon: bool = True, tp_rank: int = 0) -> Ledger:
        """Return what the rank (`dp_rank`, `tp_rank`) sends in one step, with Muon or with AdamW for everything."""
        return predict_step(self.layout, self.tp, dp_rank, self.muon if muon else (), self.strategy, tp_rank=tp_rank)

    # ---- In one number -------------------------------------------------------------------------------------

    @property
    def redundancy(self) -> float:
        """How many ranks orthogonalize the same matrix, in the mean weighted by operations."""
        rows = [row for _, rows in self.matrices for row in rows]
        work = sum(row.load.flops for row in rows)
        return self.tp * sum(len(row.owners) * row.load.flops for row in rows) / work

    @property
    def transient_bytes(self) -> int:
        """Bound of what a step allocates besides, on the worst rank, with bf16 arithmetic: see the strategy's own."""
        if self.strategy == "gather_cut":
            return max((self._cut_bytes(bucket, rows) for bucket, rows in self.matrices), default=0)
        worst, allocates = 0, strategies.costs_of("gather_all").allocates
        for bucket, rows in self.matrices:
            sizes = self._whole_sizes(rows)
            ranks = {tuple(size): rank for rank, size in enumerate(sizes.T.tolist())}
            alone = _alone(self.layout, bucket)
            for size in undominated(sizes):
                at = PlannedRank(alone, self.muon, self.tp, ranks[size], compute_bytes=COMPUTE_BYTES)
                worst = max(worst, allocates(at))
        return worst

    def _whole_sizes(self, rows: Iterable[Matrix]) -> np.ndarray:
        """Return `WholeMatrices` of what every DP rank owns of these, [4, D]."""
        return whole_sizes(
            self.dp, ((row.slice, WholeMatrices.of_one(self.layout.specs[row.place], self.tp)) for row in rows)
        )

    def _cut_bytes(self, bucket: Bucket, rows: Sequence[Matrix]) -> int:
        """Return gather_cut's bound for one bucket, on the rank and in the wave for which it is largest."""
        by_place = {row.place: row for row in rows}
        cut, small, large = gather_cut_waves(self.layout, bucket, list(by_place), self.tp)
        waves = self._wave_sizes(bucket, [by_place[place] for place in cut], travels=True)
        waves |= self._wave_sizes(bucket, [by_place[place] for place in small], travels=False)
        for place in large:
            spec = self.layout.specs[place]
            waves.add((spec.numel, 0, 0, *WholeMatrices.of_one(spec, self.tp)))
        sizes = PlannedRank(self.layout, self.muon).momentum_bytes(bucket)
        return max(
            gather_cut_bound(pieces, packed, joined, WholeMatrices(*whole), sizes, COMPUTE_BYTES)
            for pieces, packed, joined, *whole in waves
        )

    def _wave_sizes(self, bucket: Bucket, rows: Sequence[Matrix], travels: bool) -> set[tuple[int, ...]]:
        """Return what `gather_cut_bound` asks of a wave, for all ranks. travels: whether these are the cut ones."""
        pieces, joined = np.zeros((2, self.dp), np.int64)
        for row in rows:
            pieces[row.slice] += self._pieces(bucket, row)
            joined[row.slice] += row.numel * travels
        packed = self._cut_sent(bucket, rows) // MOMENTUM_BYTES
        columns = np.stack([pieces, packed, joined, *self._whole_sizes(rows)])
        return set(map(tuple, np.unique(columns, axis=1).T.tolist()))


@lru_cache(maxsize=64)
def specs_of(shape: Shape, tp: int) -> tuple[tuple[ParamSpec, ...], frozenset[int]]:
    """Return a model's TP-local parameters, and which of them are Muon's; raises ValueError as `Shape.specs` does."""
    specs, muon = shape.specs(tp)
    return tuple(specs), frozenset(muon)


def grids(shape: Shape, ranks: int) -> list[tuple[int, int]]:
    """Return the (D, T) of a world of `ranks`, T = 1, 2, 4, ..., that the model's heads permit; D is 2 or more."""
    powers = [1 << n for n in range(ranks.bit_length()) if ranks % (1 << n) == 0]
    return [(ranks // tp, tp) for tp in powers if shape.permits(tp) and ranks // tp > 1]


def whole_sizes(ranks: int, parts: Iterable[tuple[slice, WholeMatrices]]) -> np.ndarray:
    """Return `WholeMatrices` of so many ranks, [4, ranks], of parts of which some of them own each."""
    total, largest, small, several = found = np.zeros((4, ranks), np.int64)
    for mine, whole in parts:
        total[mine] += whole.total
        largest[mine] = np.maximum(largest[mine], whole.largest)
        small[mine] += whole.small
        several[mine] += whole.several
    return found


def undominated(columns: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Return the columns, each once, that no other one equals or exceeds in every row; largest first."""
    kept: list[tuple[int, ...]] = []
    for column in sorted(set(map(tuple, columns.T.tolist())), reverse=True):
        if not any(all(a >= b for a, b in zip(other, column, strict=True)) for other in kept):
            kept.append(column)
    return tuple(kept)


def _alone(layout: Layout, bucket: Bucket) -> Layout:
    """Return the map of one bucket, as if there were no other."""
    buffer = layout.buffers[bucket.buffer_idx]
    alone = Bucket(0, 0, bucket.params, bucket.starts, bucket.offset, bucket.numel, bucket.padded, bucket.dp)
    return Layout(layout.specs, layout.dp, (Buffer(buffer.param_dtype, (alone,)),))
