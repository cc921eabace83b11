"""A bucket's two collectives: the sum is taken in rank order, the shards come in rank order, and both are counted."""

from __future__ import annotations

from functools import cache

import reduction_workers as work

from distmuon import launch
from distmuon.sharding.ledger import ring_bytes


@cache
def found() -> list[dict[int, work.Found]]:
    return launch.run(work.work, dp=work.RANKS)


def test_the_sum_is_taken_in_rank_order_and_the_rest_stays() -> None:
    for rank, cases in enumerate(found()):
        for length, case in cases.items():
            assert case.sum_right, (rank, length)
            assert case.rest_stayed, (rank, length)


def test_shards_arrive_in_rank_order_waited_for_at_once_or_later() -> None:
    for rank, cases in enumerate(found()):
        for length, case in cases.items():
            assert case.gathered == [True, True], (rank, length)


def test_both_count_what_a_ring_sends() -> None:
    for cases in found():
        for length, case in cases.items():
            whole = work.RANKS * length * work.ITEM
            assert case.reduced == (1, whole, ring_bytes("reduce_scatter", whole, work.RANKS))
            assert case.collected == (2, 2 * whole, 2 * ring_bytes("all_gather", whole, work.RANKS))


def test_adding_up_takes_one_bucket_and_no_more() -> None:
    for cases in found():
        for length, case in cases.items():
            assert case.alive == work.RANKS * length * work.ITEM
