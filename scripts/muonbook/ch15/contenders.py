"""Who is timed in chapter 15: AdamW on DDP and ZeRO-1, and Muon by algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from muonbook.measure.baselines import BASELINES, Trainer
from muonbook.measure.muon_variants import MUON_VARIANTS, Place
from muonbook.measure.workload import Workload


class TimedContender(NamedTuple):
    """One way to train.

    make: (workload, grid) -> Trainer; collective. predict: (workload, dp, tp, place) -> Ledger of one step with one
    micro-batch. ddp_alone: sends what DDP sends, and nothing else.
    """

    make: Callable[[Workload, Grid], Trainer]
    predict: Callable[[Workload, int, int, Place], Ledger]
    ddp_alone: bool = False


def contender(name: str) -> TimedContender:
    """Return one by its name in LAID_OUT or, of those that send what can be predicted, in BASELINES."""
    if name in MUON_VARIANTS:
        algorithm = MUON_VARIANTS[name]
        return TimedContender(algorithm.make, algorithm.predict)
    baseline = BASELINES[name]
    return TimedContender(baseline.make_whole, baseline.predict_at, baseline.ddp_alone)
