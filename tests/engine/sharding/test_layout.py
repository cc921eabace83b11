"""The virtual map: ranges, buckets, shards, pack and unpack, without torch and without a process."""

from collections.abc import Callable

import numpy as np
import pytest
from helpers_math import message, quick
from hypothesis import given
from hypothesis import strategies as st

from distmuon.sharding.layout import ITEM_BYTES, Bucket, Layout, ParamSpec, Range, gradient_dtype, plan

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
families = st.sampled_from(["float32", "bfloat16"])
specs_lists = st.lists(st.tuples(shapes, families), min_size=1, max_size=12).map(
    lambda rows: [ParamSpec(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(rows)]
)
ranks = st.integers(1, 9)
bucket_sizes = st.integers(1, 120)
layouts = st.builds(plan, specs_lists, ranks, bucket_sizes)
ranges = st.tuples(st.integers(0, 12), st.integers(0, 8)).map(lambda pair: Range(pair[0], pair[0] + pair[1]))


def small() -> Layout:
    """Two buckets over four ranks, small enough to check by hand: W1 W2 pp | b p."""
    return plan(
        [ParamSpec("W1", (2, 3), "float32", 0), ParamSpec("W2", (2, 2), "float32"), ParamSpec("b", (3,), "float32")],
        dp=4,
        bucket_size=10,
    )


def home(layout: Layout) -> dict[int, Bucket]:
    """Return the bucket of each parameter."""
    return {index: bucket for bucket in layout.buckets for index in bucket.params}


def values_of(layout: Layout) -> list[np.ndarray]:
    """Return numbered values: no two elements of the model are equal."""
    sizes = [spec.numel for spec in layout.specs]
    starts = np.cumsum([0, *sizes])
    return [
        np.arange(start, start + spec.numel, dtype=float).reshape(spec.shape)
        for spec, start in zip(layout.specs, starts, strict=False)
    ]


def fill(layout: Layout, bucket: Bucket, values: list[np.ndarray], padding: float) -> np.ndarray:
    """Return the bucket as one flat array."""
    flat = np.full(bucket.padded, padding)
    for index in bucket.params:
        flat[layout.global_ranges[index].relative_to(bucket.offset).as_slice] = values[index].ravel()
    return flat


def shard_and_reassemble(
    layout: Layout, values: list[np.ndarray], padding: float, f: Callable[[np.ndarray], np.ndarray] = np.copy
) -> list[np.ndarray]:
    """Cut every bucket into shards, apply `f` to each shard alone, and rebuild every parameter from the pieces."""
    whole = [np.full(spec.numel, -1.0) for spec in layout.specs]
    for bucket in layout.buckets:
        flat = fill(layout, bucket, values, padding)
        for rank in range(layout.dp):
            mine = bucket.shard(rank)
            shard = f(flat[mine.relative_to(bucket.offset).as_slice])
            for index in bucket.params:
                meta = layout.meta(bucket, index, rank)
                piece = shard[meta.local_range.relative_to(mine.start).as_slice] if meta.owned else shard[:0]
                whole[index][meta.range_in_param.as_slice] = piece
    return [flat.reshape(spec.shape) for flat, spec in zip(whole, layout.specs, strict=True)]


@quick(300)
@given(ranges, ranges)
def test_an_intersection_holds_exactly_the_common_elements_and_lies_inside(a: Range, b: Range) -> None:
    common = a.intersect(b)
    assert set(range(*common)) == set(range(*a)) & set(range(*b))
    assert a.start <= common.start <= common.end <= a.end


# ---- The map ----------------------------------------------------------------------------------------------


def test_a_small_map_is_what_one_draws_by_hand() -> None:
    layout = small()
    assert layout.global_ranges == (Range(0, 6), Range(6, 10), Range(12, 15))
    assert layout.global_buffer_size == [[(12, 0), (4, 12)]]
    assert [bucket.label for bucket in layout.buckets] == ["buffer 0 bucket 0", "buffer 0 bucket 1"]
    pieces = {
        rank: [tuple(meta.local_range) if meta.owned else None for meta in layout.view(rank)] for rank in range(4)
    }
    assert pieces == {
        0: [(0, 3), None, (12, 13)],
        1: [(3, 6), None, (13, 14)],
        2: [None, (6, 9), (14, 15)],
        3: [None, (9, 10), None],
    }
    w2 = layout.view(3)[1]
    assert w2.range_in_param == Range(3, 4)
    assert (w2.buffer_idx, w2.bucket_idx, w2.shape, w2.tp_split_dim) == (0, 0, (2, 2), None)
    assert layout.view(3)[0].tp_split_dim == 0


@quick(150)
@given(layouts)
def test_every_element_is_owned_exactly_once(layout: Layout) -> None:
    owned = [np.zeros(spec.numel, dtype=int) for spec in layout.specs]
    for rank in range(layout.dp):
        for count, meta in zip(owned, layout.view(rank), strict=True):
            count[meta.range_in_param.as_slice] += 1
    assert all((count == 1).all() for count in owned)


@quick(150)
@given(layouts)
def test_padding_lies_only_at_bucket_ends_and_is_shorter_than_the_dp_group(layout: Layout) -> None:
    for bucket in layout.buckets:
        ones = [np.ones(spec.shape) for spec in layout.specs]
        flat = fill(layout, bucket, ones, padding=0.0)
        assert flat.tolist() == [1.0] * bucket.numel + [0.0] * (bucket.padded - bucket.numel)
        assert 0 <= bucket.padded - bucket.numel < layout.dp
        assert bucket.shard_size * layout.dp == bucket.padded


@quick(150)
@given(specs_lists, ranks, bucket_sizes)
def test_buckets_hold_whole_parameters_in_order_without_gaps(specs: list[ParamSpec], dp: int, bucket_size: int) -> None:
    layout = plan(specs, dp, bucket_size)
    for buffer in layout.buffers:
        stored = [index for bucket in buffer.buckets for index in bucket.params]
        assert stored == [i for i, spec in enumerate(specs) if spec.dtype == buffer.param_dtype]
        end = 0
        for bucket in buffer.buckets:
            assert bucket.offset == end  # buckets tile the buffer
            for index in bucket.params:
                assert layout.global_ranges[index] == Range(end, end + specs[index].numel)
                end += specs[index].numel
            end = bucket.range.end
        assert buffer.size == end


@quick(150)
@given(specs_lists, ranks, bucket_sizes)
def test_a_bucket_closes_as_soon_as_it_is_full(specs: list[ParamSpec], dp: int, bucket_size: int) -> None:
    for buffer in plan(specs, dp, bucket_size).buffers:
        for bucket in buffer.buckets:
            assert bucket.params
            assert bucket.numel - specs[bucket.params[-1]].numel < bucket_size
            assert bucket.numel >= bucket_size or bucket is buffer.buckets[-1]


@quick(150)
@given(layouts)
def test_buffers_are_split_by_dtype_in_order_of_appearance(layout: Layout) -> None:
    assert [b.param_dtype for b in layout.buffers] == list(dict.fromkeys(spec.dtype for spec in layout.specs))
    for buffer_idx, buffer in enumerate(layout.buffers):
        assert buffer.grad_dtype == gradient_dtype(buffer.param_dtype)
        for bucket_idx, bucket in enumerate(buffer.buckets):
            assert (bucket.buffer_idx, bucket.bucket_idx, bucket.dp) == (buffer_idx, bucket_idx, layout.dp)
            assert {layout.specs[index].dtype for index in bucket.params} == {buffer.param_dtype}
    assert sorted(home(layout)) == list(range(len(layout.specs)))


def test_gradients_are_float32_or_wider() -> None:
    assert {dtype: gradient_dtype(dtype) for dtype in ITEM_BYTES} == {
        "float64": "float64",
        "float32": "float32",
        "bfloat16": "float32",
        "float16": "float32",
    }


@quick(100)
@given(layouts, ranks, bucket_sizes, st.sampled_from([0.0, np.nan, np.inf]))
def test_an_elementwise_step_gives_the_same_for_any_ranks_bucket_size_and_padding(
    layout: Layout, dp: int, bucket_size: int, padding: float
) -> None:
    def step(shard: np.ndarray) -> np.ndarray:
        return 0.9 * shard + 1.0

    values = values_of(layout)
    here = shard_and_reassemble(layout, values, 0.0, step)
    there = shard_and_reassemble(plan(layout.specs, dp, bucket_size), values, padding, step)
    for a, b, value in zip(here, there, values, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, 0.9 * value + 1.0)


@quick(150)
@given(layouts)
def test_owners_are_the_ranks_whose_local_range_is_not_empty(layout: Layout) -> None:
    views = [layout.view(rank) for rank in range(layout.dp)]
    for index, bucket in home(layout).items():
        owned_by = [rank for rank, view in enumerate(views) if view[index].owned]
        assert list(layout.owners(bucket, index)) == owned_by


def test_the_full_shape_multiplies_the_split_dimension_only() -> None:
    assert ParamSpec("column", (4, 6), "float32", 0).full_shape(2) == (8, 6)
    assert ParamSpec("row", (4, 6), "float32", 1).full_shape(3) == (4, 18)
    assert ParamSpec("whole", (4, 6), "float32").full_shape(3) == (4, 6)


# ---- Corners ----------------------------------------------------------------------------------------------


def test_scalars_and_empty_parameters_have_their_place() -> None:
    layout = plan(
        [ParamSpec("scalar", (), "float32"), ParamSpec("empty", (0, 5), "float32"), ParamSpec("w", (2,), "float32")], 2
    )
    assert layout.global_ranges == (Range(0, 1), Range(1, 1), Range(1, 3))
    (bucket,) = layout.buckets
    assert [list(layout.owners(bucket, i)) for i in range(3)] == [[0], [], [0, 1]]
    assert not any(layout.view(rank)[1].owned for rank in range(2))


def test_a_model_of_empty_parameters_or_of_none_makes_an_empty_buffer_or_none() -> None:
    only_empty = plan([ParamSpec("empty", (0, 5), "float32")], 3)
    assert only_empty.global_buffer_size == [[(0, 0)]]
    assert list(only_empty.owners(only_empty.buckets[0], 0)) == []
    assert plan([], 3).view(2) == []


def test_the_table_has_a_heading_and_one_line_per_parameter() -> None:
    lines = small().table(dp_rank=3).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["W1", "2x3", "0", "0", "0", "0:6", "-"],
        ["W2", "2x2", "None", "0", "0", "6:10", "9:10"],
        ["b", "3", "None", "0", "1", "12:15", "-"],
    ]
    assert lines[0].split()[0] == "parameter"
    assert "scalar" in plan([ParamSpec("s", (), "float32")], 1).table(0)


@pytest.mark.parametrize(
    ("specs", "dp", "bucket_size", "names"),
    [
        ([], 0, 10, "dp=0"),
        ([], 2, 0, "bucket_size is 0"),
        ([ParamSpec("w", (2,), "int8")], 2, 10, "'int8'"),
        ([ParamSpec("w", (2,), "float32"), ParamSpec("w", (3,), "bfloat16")], 2, 10, "'w'"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_sentence(specs: list[ParamSpec], dp: int, bucket_size: int, names: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        plan(specs, dp, bucket_size)
    assert names in message(error)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_group_is_refused_in_one_sentence(rank: int) -> None:
    with pytest.raises(ValueError, match=f"dp_rank is {rank}, .* 0 to 3") as error:
        small().view(rank)
    message(error)
