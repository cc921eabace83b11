"""Waves of gather_cut: what is cut first, on every rank; then small matrices together, and every large one alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from distmuon.optim.strategies.gather_all import GatherAll
from distmuon.optim.strategies.gather_cut import GatherCut
from distmuon.optim.strategies.strategy import BucketByBucket, StrategyContext
from distmuon.sharding.layout import FLAT, ParamSpec, plan
from distmuon.verify.strategy_predictions import of_strategy

SMALL, LARGE = (64, 64), (512, 512)  # the second is more than a CPU takes in a batch
SHAPES = [SMALL, LARGE, SMALL, LARGE, LARGE, SMALL, (512, 1024), SMALL, SMALL]
SPECS = [ParamSpec(f"w{n}", shape, "float32") for n, shape in enumerate(SHAPES)]
MUON = frozenset(range(len(SPECS)))


def waves(kind: type[BucketByBucket], dp_rank: int, dp: int = 3, batched: bool = True) -> list[list[int]]:
    """Return the waves of the only bucket on a DP rank that owns pieces of what `plan` gives it."""
    layout = plan(SPECS, dp, FLAT)
    grid: Any = SimpleNamespace(tp=SimpleNamespace(size=1), device=torch.device("cpu"))
    groups = {index: {"batched": batched} for index in MUON}
    strategy = kind(StrategyContext(layout, layout.view(dp_rank), grid, groups, None))
    (bucket,) = layout.buckets
    owned = [index for index in bucket.params if dp_rank in layout.owners(bucket, index)]
    found = [list(wave) for wave in strategy.waves((bucket,), owned)]
    assert sorted(index for wave in found for index in wave) == sorted(owned)
    return found


def test_a_rank_meets_the_others_first_and_then_takes_what_is_whole_here() -> None:
    layout = plan(SPECS, 3, FLAT)
    (bucket,) = layout.buckets
    for dp_rank in range(3):
        first, *others = waves(GatherCut, dp_rank)
        assert all(len(layout.owners(bucket, index)) > 1 for index in first)
        assert all(layout.owners(bucket, index) == range(dp_rank, dp_rank + 1) for wave in others for index in wave)
        for wave in others:
            shapes = [SHAPES[index] for index in wave]
            assert len(shapes) == 1 or set(shapes) == {SMALL}
    assert max(len(waves(GatherCut, rank)) for rank in range(3)) > 2


def test_a_rank_that_nothing_is_cut_on_joins_all_the_same() -> None:
    first, *_ = waves(GatherCut, 0, dp=1)
    assert first == []


def test_matrices_that_must_not_be_batched_are_taken_one_by_one() -> None:
    _, *others = waves(GatherCut, 0, dp=1, batched=False)
    assert others == [[index] for index in sorted(MUON)]


def test_gather_all_takes_a_bucket_at_once() -> None:
    assert [len(waves(GatherAll, rank)) for rank in range(3)] == [1, 1, 1]


def test_with_more_layers_on_as_many_ranks_no_more_is_whole_at_a_time() -> None:
    """What a rank's moves take is that of its largest wave; with gather_all it is that of the whole model."""
    taken: dict[str, list[int]] = {"gather_cut": [], "gather_all": []}
    for layers in (2, 8):
        specs = [ParamSpec(f"w{n}", (2048, 2048), "float32") for n in range(4 * layers)]
        for name, sizes in taken.items():
            sizes.append(of_strategy(name).allocates(plan(specs, 2, FLAT), frozenset(range(len(specs))), 1, 0, None, 4))
    assert taken["gather_cut"][0] == taken["gather_cut"][1]
    assert taken["gather_all"][1] > 3 * taken["gather_all"][0]
