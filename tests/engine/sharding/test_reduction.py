"""A reduction that adds up itself: the same sum in as many pieces as it likes, and no more room than it says."""

from __future__ import annotations

from functools import cache

import pytest
import reduction_workers as work

from distmuon import launch
from distmuon.sharding.collectives import ADDED_AT_ONCE, MOST_PIECES, adding_takes, piece_size

every_case = pytest.mark.parametrize("name", work.LENGTHS)


@cache
def found() -> list[dict[work.Case, work.Reduced]]:
    return launch.run(work.reduce_all, dp=work.RANKS)


@every_case
@pytest.mark.parametrize("at_once", work.AT_ONCE)
def test_in_pieces_as_at_once_the_sum_is_taken_in_rank_order_and_the_rest_stays(name: str, at_once: int) -> None:
    for rank, cases in enumerate(found()):
        assert cases[name, at_once].right, rank
        assert cases[name, at_once].rest_stayed, rank


@every_case
def test_pieces_send_the_same_bytes_as_one_reduction(name: str) -> None:
    lengths = work.LENGTHS[name]
    for rank, cases in enumerate(found()):
        for at_once in work.AT_ONCE:
            sent = (sum(lengths) - lengths[rank]) * work.ITEM
            assert cases[name, at_once].traffic == (1, sum(lengths) * work.ITEM, sent), (rank, at_once)


@every_case
def test_no_more_is_alive_than_what_adding_takes(name: str) -> None:
    for rank, cases in enumerate(found()):
        alive = [cases[name, at_once].alive for at_once in work.AT_ONCE]
        for at_once, bytes_ in zip(work.AT_ONCE, alive, strict=True):
            assert bytes_ <= cases[name, at_once].bound, (rank, at_once)
        if work.LENGTHS[name][rank] > 2:
            assert max(alive[:2]) <= 2 * work.RANKS * work.ITEM < alive[-1], rank


def test_what_is_added_at_a_time_grows_neither_with_ranks_nor_beyond_an_eighth_of_all() -> None:
    assert piece_size([10, 20]) == 20
    assert adding_takes([10, 20], 0) == 20
    assert adding_takes([10, 20], 1) == 40
    for ranks in (2, 128, 4096):
        for longest in (10**4, 10**7, 10**9):
            lengths = [longest] * ranks
            assert adding_takes(lengths, 0) <= max(2 * ADDED_AT_ONCE, sum(lengths) / 8)
            assert -(-longest // piece_size(lengths)) <= MOST_PIECES
