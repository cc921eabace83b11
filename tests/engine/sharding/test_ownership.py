"""One owner per matrix: dealt out fairly, the same everywhere, and a map that cuts none of them."""

import itertools

import pytest
from helpers_math import quick
from hypothesis import given
from hypothesis import strategies as st

from distmuon.sharding.layout import FLAT, Bucket, Layout, ParamSpec, Range, plan
from distmuon.sharding.ownership import MAX_PADDING, Owner, balance, owners, owners_of, padding_warning, plan_owned

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
    assert [dealt[i] for i in range(6)] == [Owner(d, t) for t in range(2) for d in range(3)]


def owned_buckets(layout: Layout, costs: dict[int, float]) -> list[Bucket]:
    return [bucket for bucket in layout.buckets if set(bucket.params) & costs.keys()]


@given(worlds())
@quick(150)
def test_no_matrix_is_cut_and_every_element_has_one_owner(drawn: tuple) -> None:
    specs, costs, dp, tp, bucket_size = drawn
    layout = plan_owned(specs, costs, dp, tp, bucket_size)
    dealt = owners_of(layout, costs, tp)
    assert dealt.keys() == costs.keys()
    for bucket in owned_buckets(layout, costs):
        assert set(bucket.params) <= costs.keys()  # no bucket mixes them
        assert bucket.numel == sum(specs[index].numel for index in bucket.params)
        filled = [sum(specs[i].numel for i in bucket.params if dealt[i].dp == rank) for rank in range(dp)]
        assert bucket.padded == dp * max(filled)  # no longer than the longest of the equal shards
        for index in bucket.params:
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
def test_parameters_lie_one_behind_the_other_from_the_beginning_of_a_shard(drawn: tuple) -> None:
    specs, costs, dp, tp, bucket_size = drawn
    layout = plan_owned(specs, costs, dp, tp, bucket_size)
    for buffer in layout.buffers:
        end = 0
        for bucket in buffer.buckets:
            assert bucket.offset == end
            ends = {bucket.offset}
            for index in bucket.params:
                where = layout.global_ranges[index]
                begins = {bucket.shard(rank).start for rank in range(dp)} if index in costs else set()
                assert where.start in ends | begins
                assert where.start >= max(ends)
                ends = {where.end}
            end = bucket.range.end
            assert max(ends) <= end
    assert sorted(i for bucket in layout.buckets for i in bucket.params) == list(range(len(specs)))


@given(worlds())
@quick(100)
def test_matrices_come_in_the_order_of_the_backward_pass_bucket_after_bucket(drawn: tuple) -> None:
    """And a bucket holds what it should, the last one apart."""
    specs, costs, dp, tp, bucket_size = drawn
    layout = plan_owned(specs, costs, dp, tp, bucket_size)
    for number, _ in enumerate(layout.buffers):
        runs = [bucket.params for bucket in owned_buckets(layout, costs) if bucket.buffer_idx == number]
        assert all(min(earlier) > max(later) for earlier, later in itertools.pairwise(runs))
        for run in runs[:-1]:
            assert sum(specs[index].numel for index in run) >= bucket_size


def layers(number: int, width: int = 4) -> tuple[list[ParamSpec], dict[int, float]]:
    """Return a transformer's matrices, four [m, m] and two of four times the size in each layer, and their work."""
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    specs = [ParamSpec(f"{layer}.{n}", s, "float32") for layer in range(number) for n, s in enumerate(shapes)]
    return specs, {index: float(spec.numel) for index, spec in enumerate(specs)}


@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (4, 2), (32, 1)])
def test_a_transformer_is_dealt_in_buckets_of_as_many_layers_as_it_takes_to_pad_little(dp: int, tp: int) -> None:
    specs, costs = layers(64)
    layout = plan_owned(specs, costs, dp, tp, 1)
    assert len(layout.buckets) > 2
    for bucket in layout.buckets[:-1]:
        assert bucket.padded <= (1 + MAX_PADDING) * bucket.numel
    assert layout.padding <= MAX_PADDING


def test_too_few_matrices_for_their_ranks_are_one_bucket_as_long_as_the_largest_on_every_rank() -> None:
    specs, costs = layers(2)
    layout = plan_owned(specs, costs, 16, 1, 1)
    (bucket,) = layout.buckets
    assert bucket.shard_size == 64
    assert layout.padding == 16 * 64 / (2 * 12 * 16) - 1


def test_a_short_last_run_joins_the_one_before_where_that_pads_less() -> None:
    specs = [ParamSpec(f"w{i}", (8, 8), "float32") for i in range(11)]
    for costs, lengths in ((dict.fromkeys(range(9), 1.0), [4, 4, 1]), (dict.fromkeys(range(7), 1.0), [4, 3])):
        layout = plan_owned(specs[: len(costs)], costs, 4, 1, 1)
        assert [len(bucket.params) for bucket in layout.buckets] == lengths
    small = [ParamSpec("small", (4, 8), "float32"), *specs[:3], ParamSpec("other", (4, 8), "float32")]
    layout = plan_owned(small, {0: 0.5, 1: 1.0, 2: 1.0, 3: 1.0, 4: 0.5}, 2, 1, 128)
    assert [len(bucket.params) for bucket in layout.buckets] == [5]  # 4, 3, 2 and then 1, 0 would pad by a half each


def test_of_ranks_that_have_equally_little_the_next_matrix_goes_to_the_one_that_has_done_least() -> None:
    assert owners({0: 1.0}, 3, 1, earlier=[2.0, 1.0, 3.0]) == {0: Owner(1, 0)}
    specs = [ParamSpec(f"w{i}", (8, 8), "float32") for i in range(6)]
    layout = plan_owned(specs, dict.fromkeys(range(6), 1.0), 4, 1, FLAT)
    dealt = owners_of(layout, dict.fromkeys(range(6), 1.0), 1)
    assert sorted(owner.dp for owner in dealt.values()) == [0, 0, 1, 1, 2, 3]


def test_a_user_hears_of_much_padding_and_what_to_do_about_it() -> None:
    specs = [ParamSpec("up", (4096, 4096), "bfloat16"), ParamSpec("down", (4096, 4096), "bfloat16")]
    words = padding_warning(plan_owned(specs, {0: 1.0, 1: 1.0}, 8, 1, FLAT))
    assert words is not None
    assert words.startswith("owners' shards are padded by 300% on 8 DP ranks, which is 0.6 GB of weights and gradients")
    assert padding_warning(plan_owned(specs, {0: 1.0, 1: 1.0}, 2, 1, FLAT)) is None
    assert padding_warning(plan_owned(*layers(2), 16, 1, 1)) is None  # much as a share, but a few kilobytes
    assert padding_warning(plan(specs, 8)) is None


def test_a_model_without_matrices_gets_the_ordinary_map() -> None:
    specs = [ParamSpec("a", (5,), "float32"), ParamSpec("b", (7,), "bfloat16")]
    assert plan_owned(specs, {}, 3, 2, 4) == plan(specs, 3, 4)
