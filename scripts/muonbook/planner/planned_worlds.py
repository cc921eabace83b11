"""Layouts of worlds too large to start, really planned: every matrix, bucket and DP rank, and what a step sends there.

The strategy's own planner makes the map and `prediction.predict_step` the ledger, as for a run. What differs from rank
to rank is found for all DP ranks at once: where shards are equal, a rank owns a run of consecutive matrices in a
bucket, so thousands of ranks fall into a few classes. Nothing is sampled. `owned_worlds` has the strategies in which a
matrix has one owner, `every_rank` what all ranks hold and send.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import ClassVar, NamedTuple

import numpy as np

from distmuon.optim import strategies
from distmuon.optim.newton_schulz import flops
from distmuon.optim.strategies.costs import PlannedRank, WholeMatrices
from distmuon.optim.strategies.gather_cut import gather_cut_bound, gather_cut_waves
from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE, FLAT, ITEM_BYTES, Bucket, Buffer, Layout, ParamSpec, plan
from distmuon.sharding.ledger import Ledger, ring_bytes
from distmuon.verify.prediction import predict_step
from muonbook.measure.formulas import mean_owners
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
    """What one DP rank does with its matrices of a bucket: TP gathers, bytes it sends for them, operations."""

    calls: float
    sent_bytes: float
    flops: float

    def plus(self, other: Load, times: int = 1) -> Load:
        return Load(self[0] + times * other[0], self[1] + times * other[1], self[2] + times * other[2])


IDLE = Load(0, 0, 0)


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
    """One model on one DP x TP grid under one bucket rule. muon: indices of Muon's matrices in `layout.specs`.

    shape: None for a part of a model, or loose matrices, which can be counted but not timed by themselves.
    strategy: "gather_all" or "gather_cut" here; `owned_worlds` has the others.
    """

    shape: Shape | None
    dp: int
    tp: int
    layout: Layout
    muon: frozenset[int]
    strategy: str = "gather_all"
    has_owners: ClassVar[bool] = False  # to whom, over TP, blocks are sent straight

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
    def bucket_groups(self) -> Counter[tuple[Load, ...]]:
        """Buckets by their busiest ranks. A bucket's parameters are gathered when its slowest rank is ready, so only
        those ranks matter of which no other does as much in every respect. Equal buckets are counted together."""
        found: Counter[tuple[Load, ...]] = Counter()
        for _, rows in self.matrices:
            sums = list(accumulate((row.load for row in rows), Load.plus, initial=IDLE))
            loads = {sums[high].plus(sums[low], -1) for _, low, high in _runs(rows)}
            found[undominated(loads)] += 1
        return found

    def rank_loads(self) -> list[list[float]]:
        """Return calls, bytes sent and operations of a whole step, each a list over DP ranks; TP ranks are alike."""
        steps: list[list[float]] = [[0] * (self.dp + 1) for _ in Load._fields]
        for _, rows in self.matrices:
            for row in rows:
                for column, amount in zip(steps, row.load, strict=True):
                    column[row.owners.start] += amount
                    column[row.owners.stop] -= amount
        return [list(accumulate(column[:-1])) for column in steps]

    def total_load(self) -> tuple[Load, Load]:
        """Return (mean over ranks, largest of each over ranks) of a whole step."""
        ranks = self.rank_loads()
        return Load(*(sum(column) / len(column) for column in ranks)), Load(*map(max, ranks))

    def momentum_sent(self) -> list[np.ndarray]:
        """Return what every DP rank sends to make TP-local matrices whole, [D] int64 bytes, bucket by bucket."""
        if self.strategy == "gather_cut":
            return [self._cut_sent(bucket, rows) for bucket, rows in self.matrices]
        sizes = [ring_bytes("all_gather", bucket.padded * MOMENTUM_BYTES, self.dp) for bucket, _ in self.matrices]
        return [np.full(self.dp, size, np.int64) for size in sizes]

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
    def redundancy(self) -> tuple[float, int]:
        """Return how many ranks orthogonalize the same matrix: (mean weighted by operations, most)."""
        rows = [row for _, rows in self.matrices for row in rows]
        work = sum(row.load.flops for row in rows)
        most = max(len(row.owners) for row in rows)
        return self.tp * sum(len(row.owners) * row.load.flops for row in rows) / work, self.tp * most

    @property
    def spread(self) -> float:
        """s: the mean number of DP ranks that own a part of a matrix, weighted by its size."""
        return float(mean_owners(self.layout, self.muon))

    @property
    def gather_cut_bytes(self) -> float:
        """What gathering momentum over DP would send, mean over ranks, if only matrices that a shard boundary cuts
        travelled, among their owners: each piece to the k - 1 others. Chapter 16 has the strategy."""
        extra = sum((len(row.owners) - 1) * row.numel for _, rows in self.matrices for row in rows)
        return MOMENTUM_BYTES * extra / self.dp

    @property
    def state_bytes(self) -> int:
        """Bytes that stay on a rank, mean over DP ranks: parameters, gradients, 1/D of master weights and states."""
        return round(self.adamw_state_bytes - 4 * self._in_muon / self.dp)  # one momentum where AdamW has two

    @property
    def adamw_state_bytes(self) -> float:
        """The same for AdamW."""
        total = 0.0
        for bucket in self.layout.buckets:
            buffer = self.layout.buffers[bucket.buffer_idx]
            w, g = ITEM_BYTES[buffer.param_dtype], ITEM_BYTES[buffer.grad_dtype]
            total += (w + g) * bucket.padded + g * (bucket.padded + 2 * bucket.numel) / self.dp
        return total

    @property
    def _in_muon(self) -> int:
        return sum(row.numel for _, rows in self.matrices for row in rows)

    @property
    def transient_bytes(self) -> int:
        """Bound of what a step allocates besides, on the worst rank, with bf16 arithmetic: see the strategy's own."""
        if self.strategy == "gather_cut":
            return max((self._cut_bytes(bucket, rows) for bucket, rows in self.matrices), default=0)
        worst, allocates = 0, strategies.costs_of("gather_all").allocates
        for bucket, rows in self.matrices:
            specs = [self.layout.specs[row.place] for row in rows]
            sizes = {WholeMatrices.of(specs[low:high], self.tp): rank for rank, low, high in _runs(rows)}
            alone = _alone(self.layout, bucket)
            for size in undominated(sizes):
                at = PlannedRank(alone, self.muon, self.tp, sizes[size], compute_bytes=COMPUTE_BYTES)
                worst = max(worst, allocates(at))
        return worst

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
        pieces, joined, total, largest, small, several = np.zeros((6, self.dp), np.int64)
        for row in rows:
            spec, mine = self.layout.specs[row.place], row.slice
            pieces[mine] += self._pieces(bucket, row)
            joined[mine] += spec.numel * travels
            whole = WholeMatrices.of_one(spec, self.tp)
            total[mine] += whole.total
            largest[mine] = np.maximum(largest[mine], whole.largest)
            small[mine] += whole.small
            several[mine] += whole.several
        packed = self._cut_sent(bucket, rows) // MOMENTUM_BYTES
        columns = np.stack([pieces, packed, joined, total, largest, small, several])
        return set(map(tuple, np.unique(columns, axis=1).T.tolist()))


def plan_world(shape: Shape, dp: int, tp: int, bucket_size: int) -> PlannedWorld:
    """Lay `shape` out on a dp x tp grid, in bf16 with float32 gradients. Raises ValueError for a T it cannot take."""
    specs, muon = specs_of(shape, tp)
    return PlannedWorld(shape, dp, tp, plan(specs, dp, bucket_size), muon)


@lru_cache(maxsize=64)
def specs_of(shape: Shape, tp: int) -> tuple[tuple[ParamSpec, ...], frozenset[int]]:
    """Return a model's TP-local parameters, and which of them are Muon's; raises ValueError as `Shape.specs` does."""
    specs, muon = shape.specs(tp)
    return tuple(specs), frozenset(muon)


def grids(shape: Shape, ranks: int) -> list[tuple[int, int]]:
    """Return the (D, T) of a world of `ranks`, T = 1, 2, 4, ..., that the model's heads permit; D is 2 or more."""
    powers = [1 << n for n in range(ranks.bit_length()) if ranks % (1 << n) == 0]
    return [(ranks // tp, tp) for tp in powers if shape.permits(tp) and ranks // tp > 1]


def _runs(rows: Sequence[Matrix]) -> Iterator[tuple[int, int, int]]:
    """Yield (DP rank, low, high): rank owns a part of rows[low:high], for ranks on which some matrix begins.

    Owners of consecutive matrices begin and end in order. A rank on which none begins owns no more than one before it.
    """
    low = 0
    for high, row in enumerate(rows, 1):
        first = row.owners.start
        if high < len(rows) and rows[high].owners.start == first:
            continue  # the next one begins on this rank too
        while rows[low].owners.stop <= first:
            low += 1
        yield first, low, high


def undominated(rows: Iterable[tuple]) -> tuple:
    """Return the rows, each once, that no other row equals or exceeds in every column; largest first."""
    kept: list[tuple] = []
    for row in sorted(set(rows), reverse=True):
        if not any(all(a >= b for a, b in zip(other, row, strict=True)) for other in kept):
            kept.append(row)
    return tuple(kept)


def _alone(layout: Layout, bucket: Bucket) -> Layout:
    """Return the map of one bucket, as if there were no other."""
    buffer = layout.buffers[bucket.buffer_idx]
    alone = Bucket(0, 0, bucket.params, bucket.starts, bucket.offset, bucket.numel, bucket.padded, bucket.dp)
    return Layout(layout.specs, layout.dp, (Buffer(buffer.param_dtype, (alone,)),))
