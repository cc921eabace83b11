"""Distributed Muon of `muonbook.ways`, for what counts and weighs it: a strategy, and how long its buckets are."""

from __future__ import annotations

from dataclasses import dataclass

from distmuon.optim import strategies
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import FLAT, Layout
from distmuon.sharding.ledger import Ledger
from distmuon.verify.prediction import predict_step
from muonbook.measure.baselines import Trainer, make_strategy, predict_activations
from muonbook.measure.workload import Workload
from muonbook.ways import WAYS

Place = tuple[int, int]  # (dp_rank, tp_rank)


@dataclass(frozen=True)
class MuonVariant:
    """A strategy and its map. title: how the book calls it. elements: of a bucket; FLAT: one bucket for all; None: as
    the workload asks.
    """

    title: str
    strategy: str
    elements: int | None = None

    @property
    def flat(self) -> bool:
        return self.elements == FLAT

    def bucket_size(self, workload: Workload) -> int:
        return workload.bucket_size if self.elements is None else self.elements

    def plan(self, workload: Workload, dp: int, tp: int) -> tuple[Layout, list[int]]:
        """Return the map as the strategy's own planner lays it out, and the indices of Muon's matrices in it."""
        layout, muon, _ = workload.plan(dp, tp)
        planner = strategies.planner(self.strategy)
        return planner(layout.specs, muon, dp, tp, self.bucket_size(workload)), muon

    def make(self, workload: Workload, grid: Grid) -> Trainer:
        """Return a model with this Muon. Collective."""
        return make_strategy(workload, grid, self.strategy, self.bucket_size(workload))

    def predict(self, workload: Workload, dp: int, tp: int, place: Place) -> Ledger:
        """Return what a rank will send in a step with one micro-batch."""
        _, _, model = workload.plan(dp, tp)
        ledger = predict_activations(model, workload, dp, tp)
        ledger.add(self.predict_optimizer(workload, dp, tp, place))
        return ledger

    def predict_optimizer(self, workload: Workload, dp: int, tp: int, place: Place) -> Ledger:
        """Return what the optimizer's step sends, without the model's activations."""
        layout, muon = self.plan(workload, dp, tp)
        return predict_step(layout, tp, place[0], muon, self.strategy, workload.gather_dtype, place[1])


MUON_VARIANTS = {
    "muon_single": MuonVariant(*WAYS["muon_single"], 1),
    "muon": MuonVariant(*WAYS["muon"]),
    "muon_flat": MuonVariant(*WAYS["muon_flat"], FLAT),
    "muon_cut": MuonVariant(*WAYS["muon_cut"], FLAT),
    "muon_owner": MuonVariant(*WAYS["muon_owner"]),
}
