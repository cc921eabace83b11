"""The algorithms that a plan can be made of: an optimizer, how it lets Newton–Schulz see matrices, how it is laid out.

    bucketed   the public proof of concept: `gather_all` in Megatron-LM's buckets
    flat       the same on one flat buffer per dtype, as Megatron-LM lays out where nothing is reduced during backward
    flat_cut   the paper's own layout: flat, and only matrices that a shard boundary cuts are gathered, by their owners
    owner      flat, and every matrix has one owner
    muonw      MuonW on FSDP2: parameters are sharded too

The paper's author on layouts: NVIDIA/Megatron-LM, PR 1428, 27 February 2025.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from distmuon.sharding.layout import ParamSpec
from muonbook.planner.owned_worlds import plan_part
from muonbook.planner.parts.every_rank import Zero1Part
from muonbook.planner.parts.fsdp_worlds import FsdpPart
from muonbook.planner.planned_worlds import BUCKET_RULES
from muonbook.planner.stages import units_of

Part = Zero1Part | FsdpPart


class Algorithm(NamedTuple):
    """optimizer: "adamw", "muon", "muonw", or "adamw_fsdp2". strategy, rule: of KINDS and BUCKET_RULES, where FSDP2
    does not shard the parameters."""

    title: str
    optimizer: str
    strategy: str = "gather_all"
    rule: str = "megatron"

    @property
    def adamw(self) -> Algorithm:
        """AdamW for everything, sharded in the same way: what Muon adds is told by the difference."""
        if self.optimizer == "muonw":
            return Algorithm("AdamW, FSDP2", "adamw_fsdp2")
        return Algorithm("AdamW, ZeRO-1", "adamw", "gather_all", self.rule)

    def lay_out(
        self, specs: Sequence[ParamSpec], muon: Collection[int], dp: int, tp: int, micro_batches: float = 1.0
    ) -> Part:
        """Return these TP-local parameters as this algorithm has them on dp ranks. muon: indices of Muon's."""
        if self.optimizer in ("muonw", "adamw_fsdp2"):
            units = units_of(specs)
            mine = frozenset(muon if self.optimizer == "muonw" else ())
            return FsdpPart(specs, mine, dp, tp, units, micro_batches)
        with_muon = self.optimizer == "muon"
        strategy = self.strategy if with_muon else "gather_all"
        return Zero1Part(plan_part(specs, muon, dp, tp, BUCKET_RULES[self.rule](dp), strategy), with_muon)


ALGORITHMS = {
    "bucketed": Algorithm("bucketed", "muon"),
    "flat": Algorithm("flat", "muon", rule="flat"),
    "flat_cut": Algorithm("flat + cut", "muon", "gather_cut", "flat"),
    "owner": Algorithm("owner", "muon", "owner", "flat"),
    "muonw": Algorithm("MuonW, FSDP2", "muonw"),
}
