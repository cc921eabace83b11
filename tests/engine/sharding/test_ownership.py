"""One owner per matrix: dealt out fairly, the same everywhere, and a map that cuts none of them."""

import itertools

import pytest
from helpers_math import quick
from hypothesis import given
from hypothesis import strategies as st

from distmuon.sharding.layout import FLAT, ParamSpec, Range, plan
from distmuon.sharding.ownership import Owner, balance, owners, plan_unsplit

COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=7)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[ParamSpec], dict[int, float], int, int, int]:
    """Draw parameters of two dtypes, Muon's and others', and a grid."""
    specs: list[ParamSpec] = []
    costs: dict[int, float] = {}
    tp = draw(st.sampled_from([1, 2, 3]))
    for index in range(draw(st.integers(1, 12))):
        is_muon = draw(st.booleans())
        shape = (draw(st.integers(1, 9)), draw(st.integers(1, 9))) if is_muon else (draw(st.integers(0, 30)),)
        specs.append(ParamSpec(f"p{index}", shape, draw(st.sampled_from(["float32", "bfloat16"])), None))
        if is_muon:
            costs[index] = float(draw(st.integers(1, 100)))
    return specs, costs, draw(st.integers(1, 6)), tp, draw(st.sampled_from([1, 20, 100, FLAT]))


def test_the_costliest_comes_first_and_goes_where_least_is_so_far() -> None:
    assert balance({0: 3, 1: 5, 2: 4, 3: 3, 4: 3}, 2) == {1: 0, 2: 1, 0: 1, 3: 0, 4: 1}
    assert balance({7: 2, 3: 2, 5: 2}, 3) == {3: 0, 5: 1, 7: 2}  # ties: in the order of items and ranks
    assert balance({}, 4) == {}


@given(COSTS, st.integers(1, 4))
@quick(60)
def test_no_rank_has_more_than_four_thirds_of_the_best_possible(given_costs: list[int], ranks: int) -> None:
    costs = dict(enumerate(map(float, given_costs)))
    dealt = balance(costs, ranks)
    assert dealt.keys() == costs.keys()

    def heaviest(places: tuple[int, ...]) -> float:
        return max(sum(costs[i] for i, place in enumerate(places) if place == rank) for rank in range(ranks))

    best = min(heaviest(places) for places in itertools.product(range(ranks), repeat=len(costs)))
    assert heaviest(tuple(dealt[i] for i in costs)) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_equal_matrices_fill_the_rows_of_the_grid_before_its_second_column() -> None:
    dealt = owners(dict.fromkeys(range(8), 1.0), dp=3, tp=2)
    assert [dealt[i] for i in range(6)] == [
        Owner(0, 0),
        Owner(1, 0),
        Owner(2, 0),
        Owner(0, 1),
        Owner(1, 1),
        Owner(2, 1),
    ]


@given(worlds())
@quick(150)
def test_no_matrix_is_cut_and_every_element_has_one_owner(drawn: tuple) -> None:
    specs, costs, dp, tp, bucket_size = drawn
    layout, dealt = plan_unsplit(specs, costs, dp, tp, bucket_size), owners(costs, dp, tp)
    for bucket in layout.buckets:
        shards = [bucket.shard(rank) for rank in range(dp)]
        assert [shards[0].start, *(shard.end for shard in shards)] == [
            *(shard.start for shard in shards),
            bucket.range.end,
        ]
        muon = [index for index in bucket.params if index in costs]
        assert muon in ([], list(bucket.params))  # no bucket mixes them
        if muon:
            assert bucket.padded == bucket.numel
            assert bucket.lengths == [shard.size for shard in shards]
        for index in muon:
            assert layout.owners(bucket, index) == range(dealt[index].dp, dealt[index].dp + 1)
    pieces: dict[int, list[Range]] = {index: [] for index in range(len(specs))}
    for rank in range(dp):
        for index, meta in enumerate(layout.view(rank)):
            pieces[index] += [meta.range_in_param] if meta.owned else []
    for index, spec in enumerate(specs):
        assert sum(piece.size for piece in pieces[index]) == spec.numel
        assert len(pieces[index]) == 1 or index not in costs


@given(worlds())
@quick(60)
def test_buffers_are_filled_without_a_gap(drawn: tuple) -> None:
    specs, costs, dp, tp, bucket_size = drawn
    layout = plan_unsplit(specs, costs, dp, tp, bucket_size)
    for buffer in layout.buffers:
        end = 0
        for bucket in buffer.buckets:
            assert bucket.offset == end
            start = bucket.offset
            for index in bucket.params:
                assert layout.global_ranges[index].start == start
                start = layout.global_ranges[index].end
            assert start == bucket.offset + bucket.numel
            end = bucket.range.end
    assert sorted(i for bucket in layout.buckets for i in bucket.params) == list(range(len(specs)))


def test_a_model_without_matrices_gets_the_ordinary_map() -> None:
    specs = [ParamSpec("a", (5,), "float32"), ParamSpec("b", (7,), "bfloat16")]
    assert plan_unsplit(specs, {}, 3, 2, 4) == plan(specs, 3, 4)


def test_every_owner_works_on_every_bucket() -> None:
    """With buckets of a quarter of the model, each owner's work is cut into four about equal parts."""
    specs = [ParamSpec(f"w{i}", (8, 8), "float32") for i in range(16)]
    layout = plan_unsplit(specs, dict.fromkeys(range(16), 1.0), 2, 1, 16 * 64 // 4)
    assert len(layout.buckets) == 4
    assert [bucket.lengths for bucket in layout.buckets] == [[128, 128]] * 4


@pytest.mark.parametrize(("dp", "bucket_size"), [(0, 5), (2, 0)])
def test_what_cannot_be_laid_out_is_refused_as_ever(dp: int, bucket_size: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        plan_unsplit([ParamSpec("b", (2,), "float32")], {}, dp, 1, bucket_size)
