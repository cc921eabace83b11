"""The virtual map: where every element of every parameter lives, on any rank, before any rank exists.

A *buffer* is one flat storage per (parameter dtype, gradient dtype). It is cut into *buckets*, contiguous runs of
whole parameters, each padded to a multiple of D. A bucket is cut into D equal *shards*, one per DP rank. (`ownership`
pads every shard instead of the end, so that none cuts a matrix.) Nothing here imports torch: a laptop can plan a
thousand ranks, and any process can compute the view of any other.

    buffer   |<-------- bucket 0 -------->|<------ bucket 1 ------>|
    params   [  W1   |    W2    | b ]ppp   [     W3      |  W4  ]p     p = padding
    shards   |  rank 0  |  rank 1  | ...   |  rank 0 |  rank 1 | ...

All ranges are half-open and counted in elements. Source: ZeRO-1 (Rajbhandari et al. 2020, section 5.1); the
names `dist_meta`, `global_range` and `local_range` follow the proof of concept of Moonlight (Liu et al. 2025).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from distmuon.sharding.matrices import Matrices, MatrixBlock, MatrixLayout, globalize, is_tp_aligned, parts

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

DEFAULT_BUCKET_SIZE = 25_000_000  # elements: 100 MB of fp32, past the knee of every link's bandwidth curve
FLAT = 2**62  # a bucket size that no model reaches: one bucket for each buffer


class Range(NamedTuple):
    """Half-open run of elements `[start, end)`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def intersect(self, other: Range) -> Range:
        """Return the common part; where there is none, an empty range inside `self`."""
        start = min(max(self.start, other.start), self.end)
        return Range(start, max(start, min(self.end, other.end)))

    def relative_to(self, origin: int) -> Range:
        """Return the same run counted from `origin`: what pack and unpack are made of."""
        return Range(self.start - origin, self.end - origin)

    @property
    def as_slice(self) -> slice:
        return slice(self.start, self.end)


class ParamSpec(NamedTuple):
    """What the map needs to know of one parameter.

    name: unique; appears in tables and errors.
    shape: TP-local, that is, what this rank's layer holds.
    dtype: "float64", "float32", "bfloat16" or "float16".
    tp_split_dim: the dimension cut over TP, or None where every TP rank holds the whole.
    matrices: which of them are in it, for Muon; TP-local as `shape` is. See `matrices`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tp_split_dim: int | None = None
    matrices: Matrices = "whole"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def tp_gather_dim(self) -> int | None:
        """The dimension along which TP blocks make whole matrices; None where every TP rank holds whole ones."""
        return None if self.tp_split_dim is None or self.tp_local_matrices else self.tp_split_dim

    @property
    def tp_local_matrices(self) -> bool:
        """Whether TP cuts between the matrices: each rank holds others, whole."""
        return self.tp_split_dim is not None and is_tp_aligned(self.matrices, self.tp_split_dim)

    def full_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape of the whole parameter on a grid with T = `tp`."""
        if self.tp_split_dim is None:
            return self.shape
        return tuple(n * tp if dim == self.tp_split_dim else n for dim, n in enumerate(self.shape))

    def division(self, shape: Sequence[int], tp: int) -> MatrixLayout:
        """Return how a tensor of it falls into matrices: a TP-local one, or one put together from `tp` of them."""
        if tuple(shape) == self.shape:
            return MatrixLayout(self.matrices)
        return MatrixLayout(globalize(self.matrices, self.tp_split_dim, tp), tp if self.tp_split_dim == 0 else 1)

    @property
    def local_parts(self) -> list[MatrixBlock]:
        """The matrices in the TP-local parameter, whole ones or blocks."""
        return parts(self.matrices, self.shape)

    def whole_parts(self, tp: int) -> list[MatrixBlock]:
        """Return the matrices in the whole parameter."""
        return parts(globalize(self.matrices, self.tp_split_dim, tp), self.full_shape(tp))

    def seen_parts(self, tp: int) -> list[MatrixBlock]:
        """Return the matrices that a rank sees whole: all of them, or where TP cuts between them, its own."""
        return self.local_parts if self.tp_local_matrices else self.whole_parts(tp)

    def runs(self, tp: int) -> Iterator[tuple[Range, tuple[int, int], tuple[int, int]]]:
        """Yield (run of elements of the TP-local parameter, shape of its matrices here, and of them whole)."""
        start = 0
        for here, whole in zip(self.local_parts, self.whole_parts(tp), strict=True):
            end = start + here.rows * self.numel // self.shape[0]
            yield Range(start, end), here.shape, whole.shape
            start = end


class DistMeta(NamedTuple):
    """One parameter as one DP rank sees it. Ranges are in elements of the buffer `buffer_idx`.

    global_range: the whole (TP-local) parameter.
    local_range: the part inside this rank's shard; empty where the rank owns nothing of it.
    """

    buffer_idx: int
    bucket_idx: int
    shape: tuple[int, ...]
    tp_split_dim: int | None
    global_range: Range
    local_range: Range

    @property
    def owned(self) -> bool:
        return self.local_range.start < self.local_range.end

    @property
    def range_in_param(self) -> Range:
        """The owned part, counted from the first element of the parameter."""
        return self.local_range.relative_to(self.global_range.start)


@dataclass(frozen=True)
class Bucket:
    """A contiguous run of whole parameters, padded so that D ranks get equal shards.

    params: indices into `Layout.specs`, in storage order.
    starts: where each of them begins, in elements counted from `offset`.
    offset, padded: where it starts in its buffer and how long it is with padding, in elements.
    numel: length without padding.
    """

    buffer_idx: int
    bucket_idx: int
    params: tuple[int, ...]
    starts: tuple[int, ...]
    offset: int
    numel: int
    padded: int
    dp: int

    @property
    def range(self) -> Range:
        return Range(self.offset, self.offset + self.padded)

    @property
    def shard_size(self) -> int:
        """Elements in a shard."""
        return self.padded // self.dp

    @property
    def label(self) -> str:
        """Name of this bucket in ledgers and tables."""
        return f"buffer {self.buffer_idx} bucket {self.bucket_idx}"

    def shard(self, dp_rank: int) -> Range:
        """Return the run of the buffer that DP rank `dp_rank` owns."""
        start = self.offset + dp_rank * self.shard_size
        return Range(start, start + self.shard_size)


@dataclass(frozen=True)
class Buffer:
    """One flat storage: all buckets of one (parameter dtype, gradient dtype)."""

    param_dtype: str
    buckets: tuple[Bucket, ...]

    @property
    def grad_dtype(self) -> str:
        return gradient_dtype(self.param_dtype)

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].range.end


def gradient_dtype(param_dtype: str) -> str:
    """Return the dtype in which gradients are accumulated and reduced: float32, or wider if the model is."""
    return "float64" if param_dtype == "float64" else "float32"


@dataclass(frozen=True)
class Layout:
    """The map of all parameters on all DP ranks. Made by `plan`."""

    specs: tuple[ParamSpec, ...]
    dp: int
    buffers: tuple[Buffer, ...]

    @cached_property
    def global_ranges(self) -> tuple[Range, ...]:
        """Where each parameter lies in its buffer, in the order of `specs`."""
        ranges = [Range(0, 0)] * len(self.specs)
        for bucket in self.buckets:
            for index, start in zip(bucket.params, bucket.starts, strict=True):
                begin = bucket.offset + start
                ranges[index] = Range(begin, begin + self.specs[index].numel)
        return tuple(ranges)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets of all buffers, in the order of the map."""
        return tuple(bucket for buffer in self.buffers for bucket in buffer.buckets)

    @property
    def padding(self) -> float:
        """Padding, as a share of the parameters."""
        filled = sum(bucket.numel for bucket in self.buckets)
        return sum(bucket.padded for bucket in self.buckets) / filled - 1 if filled else 0.0

    @property
    def global_buffer_size(self) -> list[list[tuple[int, int]]]:
        """Per buffer, per bucket: (padded length, offset)."""
        return [[(b.padded, b.offset) for b in buffer.buckets] for buffer in self.buffers]

    def meta(self, bucket: Bucket, index: int, dp_rank: int) -> DistMeta:
        """Return `dist_meta` of parameter `index`, of `bucket`, as `dp_rank` sees it."""
        spec, where = self.specs[index], self.global_ranges[index]
        return DistMeta(bucket.buffer_idx, bucket.bucket_idx, spec.shape, spec.tp_split_dim,
                        where, where.intersect(bucket.shard(dp_rank)))  # fmt: skip

    def view(self, dp_rank: int) -> list[DistMeta]:
        """Return every parameter's `dist_meta` for one DP rank, in the order of `specs`."""
        if not 0 <= dp_rank < self.dp:
            raise ValueError(f"dp_rank is {dp_rank}, but this layout has DP ranks 0 to {self.dp - 1}.")
        metas = {index: self.meta(bucket, index, dp_rank) for bucket in self.buckets for index in bucket.params}
        return [metas[index] for index in range(len(self.specs))]

    def owners(self, bucket: Bucket, index: int) -> range:
        """Return the DP ranks that own at least one element of parameter `index`, which lives in `bucket`."""
        where = self.global_ranges[index].relative_to(bucket.offset)
        if where.size == 0:
            return range(0)
        return range(where.start // bucket.shard_size, (where.end - 1) // bucket.shard_size + 1)

    def owned(self, bucket: Bucket, dp_rank: int) -> tuple[int, ...]:
        """Return the parameters of this bucket of which a DP rank owns at least one element, in storage order."""
        return self._owned[bucket.buffer_idx, bucket.bucket_idx][dp_rank]

    @cached_property
    def _owned(self) -> dict[tuple[int, int], list[tuple[int, ...]]]:
        """All of `owned` at once: to ask each parameter once is quicker than each rank about each."""
        found = {}
        for bucket in self.buckets:
            of_rank: list[list[int]] = [[] for _ in range(self.dp)]
            for index in bucket.params:
                for dp_rank in self.owners(bucket, index):
                    of_rank[dp_rank].append(index)
            found[bucket.buffer_idx, bucket.bucket_idx] = [tuple(indices) for indices in of_rank]
        return found

    def table(self, dp_rank: int) -> str:
        """Return the map as aligned text, one line per parameter, as `dp_rank` sees it."""
        rows = [("parameter", "TP-local shape", "tp_split_dim", "buffer", "bucket", "global_range", "local_range")]
        for spec, meta in zip(self.specs, self.view(dp_rank), strict=True):
            local = f"{meta.local_range.start}:{meta.local_range.end}" if meta.owned else "-"
            rows.append((spec.name, "x".join(map(str, spec.shape)) or "scalar", str(spec.tp_split_dim),
                         str(meta.buffer_idx), str(meta.bucket_idx),
                         f"{meta.global_range.start}:{meta.global_range.end}", local))  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def plan(specs: Iterable[ParamSpec], dp: int, bucket_size: int = DEFAULT_BUCKET_SIZE) -> Layout:
    """Lay parameters out in buffers, buckets and shards.

    Parameters keep their order. A bucket is closed as soon as it holds `bucket_size` elements or more, so it
    always holds whole parameters and at least one. Every process that plans the same specs gets the same map.

    specs: TP-local. bucket_size: elements. Raises ValueError for D or a bucket size below 1, an unknown dtype or a
    repeated name.
    """
    specs = tuple(specs)
    buffers = tuple(
        Buffer(dtype, tuple(zero1_buckets(specs, indices, dp, bucket_size, idx)))
        for idx, (dtype, indices) in enumerate(by_dtype(specs, dp, bucket_size).items())
    )
    return Layout(specs, dp, buffers)


def check_bucket_size(bucket_size: float) -> None:
    """Raise ValueError unless this is a number of elements: a whole one, or infinity."""
    is_number = isinstance(bucket_size, int | float) and not isinstance(bucket_size, bool)
    if not is_number or not bucket_size >= 1 or bucket_size % 1 > 0:
        raise ValueError(f"bucket_size is {bucket_size!r}; give a whole number of elements, 1 or more.")


def by_dtype(specs: Sequence[ParamSpec], dp: int, bucket_size: int) -> dict[str, list[int]]:
    """Return the parameters of each buffer, {dtype: indices}; raise ValueError for what cannot be laid out."""
    if dp < 1:
        raise ValueError(f"dp must be at least 1, got dp={dp}.")
    check_bucket_size(bucket_size)
    families: dict[str, list[int]] = {}
    names: set[str] = set()
    for index, spec in enumerate(specs):
        if spec.dtype not in ITEM_BYTES:
            raise ValueError(f"parameter {spec.name!r} has dtype {spec.dtype!r}; buffers hold {', '.join(ITEM_BYTES)}.")
        if spec.name in names:
            raise ValueError(f"two parameters are named {spec.name!r}; names must be unique.")
        names.add(spec.name)
        families.setdefault(spec.dtype, []).append(index)
    return families


def zero1_buckets(
    specs: Sequence[ParamSpec],
    indices: Sequence[int],
    dp: int,
    bucket_size: int,
    buffer_idx: int,
    before: Sequence[Bucket] = (),  # of the same buffer
) -> list[Bucket]:
    """Return buckets of the parameters `indices`, in this order, behind those that are there."""
    buckets = list(before)
    run: list[int] = []
    offset, filled = buckets[-1].range.end if buckets else 0, 0
    for index in indices:
        run.append(index)
        filled += specs[index].numel
        if filled >= bucket_size or index == indices[-1]:
            padded = -(-filled // dp) * dp
            ends = [0, *itertools.accumulate(specs[member].numel for member in run)]
            place = buffer_idx, len(buckets)
            buckets.append(Bucket(*place, tuple(run), tuple(ends[:-1]), offset, filled, padded, dp))
            run, offset, filled = [], offset + padded, 0
    return buckets
