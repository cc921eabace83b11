"""The baselines that a plan can be made of: an optimizer, its strategy, and whether its buffer has buckets.

One is in Megatron-LM's buckets; the others are flat, as Megatron-LM lays out where nothing is reduced during backward.
MuonW shards the parameters, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from distmuon.sharding.layout import ParamSpec
from muonbook.baselines import BASELINES, TITLES
from muonbook.planner.owned_worlds import plan_part
from muonbook.planner.parts.every_rank import Zero1Part
from muonbook.planner.parts.fsdp_worlds import FsdpPart
from muonbook.planner.planned_worlds import BUCKET_RULES
from muonbook.planner.stages import units_of

Part = Zero1Part | FsdpPart


class PlannedBaseline(NamedTuple):
    """optimizer: "adamw", "muon", "muonw", or "adamw_fsdp2". strategy: a name or a file. rule: of BUCKET_RULES.
    Both where FSDP2 does not shard the parameters."""

    title: str
    optimizer: str
    strategy: str = "gather_all"
    rule: str = "megatron"

    @property
    def adamw(self) -> PlannedBaseline:
        """AdamW for everything, sharded in the same way: what Muon adds is told by the difference."""
        if self.optimizer == "muonw":
            return PlannedBaseline(TITLES["adamw_fsdp2"], "adamw_fsdp2")
        return PlannedBaseline(TITLES["zero1"], "adamw", "gather_all", self.rule)

    @property
    def shards_parameters(self) -> bool:
        """Whether FSDP2 has them, which gathers a layer's for every pass."""
        return self.optimizer in ("muonw", "adamw_fsdp2")

    def lay_out(
        self, specs: Sequence[ParamSpec], muon: Collection[int], dp: int, tp: int, micro_batches: float = 1.0
    ) -> Part:
        """Return these TP-local parameters as this baseline has them on dp ranks. muon: indices of Muon's."""
        if self.shards_parameters:
            units = units_of(specs)
            mine = frozenset(muon if self.optimizer == "muonw" else ())
            return FsdpPart(specs, mine, dp, tp, units, micro_batches)
        with_muon = self.optimizer == "muon"
        strategy = self.strategy if with_muon else "gather_all"
        return Zero1Part(plan_part(specs, muon, dp, tp, BUCKET_RULES[self.rule](dp), strategy), with_muon)


RULES = {"muon": "megatron", "muon_flat": "flat", "muon_cut": "flat", "muon_owner": "flat"}  # name in BASELINES -> rule
PLANNED_BASELINES = {
    **{name: PlannedBaseline(TITLES[name], "muon", BASELINES[name].strategy, rule) for name, rule in RULES.items()},
    "muonw": PlannedBaseline(TITLES["muonw"], "muonw"),
}
