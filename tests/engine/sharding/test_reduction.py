"""Shards of unequal length: added up in as many pieces as a rank likes, and in no more room than it says; gathered."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import reduction_workers as work
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from distmuon import launch
from distmuon.sharding import collectives
from distmuon.sharding.collectives import MAX_CHUNK_NUMEL, MAX_CHUNKS, chunk_numel, reduce_scatter_workspace_numel

every_case = pytest.mark.parametrize("name", work.LENGTHS)


@cache
def both() -> list[tuple[dict[work.Case, work.Reduced], dict[work.Way, work.Gathered]]]:
    return launch.run(work.work, dp=work.RANKS)


def found() -> list[dict[work.Case, work.Reduced]]:
    return [reduced for reduced, _ in both()]


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
    assert chunk_numel([10, 20]) == 20
    assert reduce_scatter_workspace_numel([10, 20], 0) == 20
    assert reduce_scatter_workspace_numel([10, 20], 1) == 40
    for ranks in (2, 128, 4096):
        for longest in (10**4, 10**7, 10**9):
            lengths = [longest] * ranks
            assert reduce_scatter_workspace_numel(lengths, 0) <= max(2 * MAX_CHUNK_NUMEL, sum(lengths) / 8)
            assert -(-longest // chunk_numel(lengths)) <= MAX_CHUNKS


@every_case
@pytest.mark.parametrize("started", [False, True], ids=["at once", "started"])
def test_shards_that_travel_by_way_of_the_host_arrive_as_all_do_and_are_counted_alike(name: str, started: bool) -> None:
    lengths = work.LENGTHS[name]
    for rank, (_, ways) in enumerate(both()):
        straight, via_host = ways[name, False, started], ways[name, True, started]
        assert straight.whole == via_host.whole == straight.wanted, rank
        sent = (work.RANKS - 1) * lengths[rank] * work.ITEM
        assert straight.traffic == via_host.traffic == (1, sum(lengths) * work.ITEM, sent), rank
        assert straight.dispatched == via_host.dispatched, rank
        assert via_host.dispatched.sent_bytes == sent, rank


class OnGpu:
    """As much of a GPU's tensor as is looked at."""

    is_cuda, device = True, torch.device("cuda")


@pytest.mark.parametrize(
    ("backend", "by_host"), [("gloo", True), ("nccl", False), ("cpu:gloo,cuda:nccl", False), ("cuda:gloo", True)]
)
def test_only_a_gpus_tensor_over_gloo_takes_the_way_by_the_host(
    monkeypatch: pytest.MonkeyPatch, backend: str, by_host: bool
) -> None:
    config = str(BackendConfig(Backend(backend)))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    group: Any = None
    gpus: Any = OnGpu()
    assert collectives.is_gpu_over_gloo(group, gpus) == by_host
    assert not collectives.is_gpu_over_gloo(group, torch.ones(1))
