"""Memory of models that nobody trains here: what their layouts alone say about one rank, AdamW beside Muon.

Both as ours are built: bf16 parameters whole on every rank, float32 gradients, masters and state in 1/D shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE, plan
from distmuon.verify.model_states import Kept, predict_shards
from distmuon.verify.prediction import predict_transient
from muonbook.measure.model_shapes import Shape


@dataclass(frozen=True)
class Plan:
    """The rank whose update takes most memory, in bytes.

    adamw, muon: what it keeps, per kind. adamw_transient, muon_transient: bounds of what the update takes besides,
    under NCCL, whose reduce-scatter needs no room, and with Newton–Schulz in bf16.
    """

    adamw: Kept
    muon: Kept
    adamw_transient: int
    muon_transient: int

    @property
    def saved(self) -> int:
        """What Muon does not keep: one of AdamW's two moments, for the hidden matrices."""
        return sum(self.adamw.values()) - sum(self.muon.values())

    def eaten(self, loosest: float) -> str:
        """Say whether Muon's update takes more, beyond AdamW's, than was saved: "yes", "no" or "perhaps".

        loosest: by what factor a bound of Muon's update was found to exceed the measurement. "no" follows from the
        bound; "yes" supposes that the update takes at least bound / loosest.
        """
        if self.muon_transient <= self.saved:
            return "no"
        return "yes" if self.muon_transient / loosest - self.adamw_transient > self.saved else "perhaps"


def plan_memory(model: Shape, dp: int, tp: int = 1, bucket_size: int = DEFAULT_BUCKET_SIZE) -> Plan:
    """Return the plan for a published model on a dp x tp grid. Raises ValueError where `tp` does not cut its heads."""
    specs, muon = model.specs(tp)
    layout, matrices = plan(specs, dp, bucket_size), frozenset(muon)

    def transient(rank: int, muon: frozenset[int]) -> int:
        return predict_transient(layout, tp, rank, muon, compute_dtype="bfloat16", native_reduce_scatter=True)

    worst = max(range(dp), key=lambda rank: transient(rank, matrices))
    kept = [predict_shards(layout, worst, chosen) for chosen in (frozenset(), matrices)]
    return Plan(kept[0], kept[1], transient(worst, frozenset()), transient(worst, matrices))


def share_of_matrices(model: Shape) -> float:
    """Return which share of a model's parameters Muon moves."""
    return sum(math.prod(weight.shape) for weight in model.weights() if weight.muon) / model.parameters
