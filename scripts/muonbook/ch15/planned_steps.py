"""How long a step of a planned world takes by the alpha-beta model, on assumed links, and which T makes it shortest.

    forward and backward    6 FLOPs per active parameter and token, over all ranks; attention's scores left out
    activations             4 all-reduces over TP per layer and 2 for embedding and head, sequence by sequence

and the optimizer's moves, as `step_parts` has them. Nothing overlaps, as in this book's optimizer. Without momentum
and orthogonalizing it is the step of ZeRO-1 AdamW on the same grid.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from muonbook.planner.fabrics import Fabric, Factors
from muonbook.planner.model_shapes import Shape
from muonbook.planner.parts.step_parts import Messages, activation_messages, orthogonalizing_seconds, outer_messages
from muonbook.planner.planned_worlds import Load, PlannedWorld

MEMORY_BYTES = 80e9  # of a device: NVIDIA H100 SXM datasheet


class Step(NamedTuple):
    """Seconds of one step of Muon, part by part; `tp_gather` is a part of `orthogonalizing`."""

    computation: float
    activations: float
    gradients: float
    momentum: float
    orthogonalizing: float
    tp_gather: float
    parameters: float
    summary: float

    @property
    def muon(self) -> float:
        return self.adamw + self.momentum + self.orthogonalizing

    @property
    def adamw(self) -> float:
        """ZeRO-1 AdamW on the same grid."""
        return self.computation + self.activations + self.gradients + self.parameters + self.summary

    @property
    def overlapped(self) -> float:
        """Muon where gradients and parameters travel behind forward and backward, as far as those last."""
        hidden = min(self.computation + self.activations, self.gradients + self.parameters)
        return self.muon - hidden

    @property
    def communication(self) -> float:
        """All that the optimizer sends: what a sweet spot of communication alone would be about."""
        return self.gradients + self.momentum + self.tp_gather + self.parameters + self.summary

    @property
    def newton_schulz(self) -> float:
        return self.orthogonalizing - self.tp_gather

    @property
    def extra(self) -> float:
        """What Muon adds to the step of ZeRO-1 AdamW, over forward and backward."""
        return (self.momentum + self.orthogonalizing) / (self.computation + self.activations)

    @property
    def optimizer(self) -> float:
        """All that is not forward and backward, over forward and backward."""
        return self.muon / (self.computation + self.activations) - 1


@dataclass(frozen=True, eq=False)
class TimedWorld:
    """A planned world, reduced to what its seconds need: time it on any fabric, for any batch.

    parts: gradients, momentum, parameters, summary. bucket_groups: as in `PlannedWorld`. fits: Muon's state and
    transient bytes fit a device; adamw_fits: AdamW's state does. Activations are not counted in either.
    """

    shape: Shape
    dp: int
    tp: int
    parts: dict[str, Messages]
    bucket_groups: Counter[tuple[Load, ...]]
    fits: bool
    adamw_fits: bool
    known: dict[Fabric, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, world: PlannedWorld) -> TimedWorld:
        assert world.shape is not None
        parts = outer_messages(world)
        fits = world.state_bytes + world.transient_bytes <= MEMORY_BYTES
        adamw_fits = world.adamw_state_bytes <= MEMORY_BYTES
        return cls(world.shape, world.dp, world.tp, parts, world.bucket_groups, fits, adamw_fits)

    def admits(self, tokens: int) -> bool:
        """Say whether every DP rank gets at least one whole sequence of a batch of `tokens`."""
        return self.dp * self.shape.context <= tokens

    def step(self, fabric: Fabric, tokens: int) -> Step:
        """Return the seconds of one step over `tokens`, of all ranks together."""
        computation = 6 * self.shape.active * tokens / (self.dp * self.tp) / fabric.flops_per_second
        if fabric not in self.known:
            self.known[fabric] = self._whatever_the_batch(fabric)
        sequences = tokens / self.shape.context / self.dp
        each, rest = self.known[fabric]["sequence"], {k: v for k, v in self.known[fabric].items() if k != "sequence"}
        return Step(computation, sequences * each, **rest)

    def _whatever_the_batch(self, fabric: Fabric) -> dict[str, float]:
        links = fabric.links(self.dp, self.tp)
        found = {name: messages.seconds(links) for name, messages in self.parts.items()}
        found["sequence"] = activation_messages(self.shape, self.tp, 4 * self.shape.layers + 2).seconds(links)
        return found | orthogonalizing_seconds(self.bucket_groups, self.tp, links["tp"], fabric.flops_per_second)


# ---- Which T? ----------------------------------------------------------------------------------------------

Grids = Mapping[int, TimedWorld]  # by T
AIMS: dict[str, Callable[[Step], float]] = {
    "step": lambda step: step.muon,
    "communication": lambda step: step.communication,
    "adamw": lambda step: step.adamw,
    "overlapped": lambda step: step.overlapped,
}


def seconds(grids: Grids, fabric: Fabric, tokens: int, aim: str) -> dict[int, float]:
    """Return what `aim` takes, by T."""
    return {tp: AIMS[aim](timed.step(fabric, tokens)) for tp, timed in grids.items()}


def best(took: Mapping[int, float]) -> int:
    """Return the T that takes least; of equals, the smallest."""
    return min(took, key=lambda tp: (took[tp], tp))


class Robustness(NamedTuple):
    """holds: share of other assumptions under which the same T wins. regret: by how much it takes longer than the best
    where it does not, at worst (0.1: a tenth)."""

    holds: float
    regret: float


def robustness(grids: Grids, fabric: Fabric, tokens: int, aim: str, scales: Iterable[Factors]) -> Robustness:
    """Return how far the winning T depends on assumptions that may be wrong by a factor of two."""
    chosen = best(seconds(grids, fabric, tokens, aim))
    took = [seconds(grids, fabric.scaled(scale), tokens, aim) for scale in scales]
    longer = [each[chosen] / min(each.values()) - 1 for each in took]
    return Robustness(sum(best(each) == chosen for each in took) / len(took), max(longer))


def square_cost(grids: Grids, took: Mapping[int, float]) -> float | None:
    """Return by how much "DP = TP" takes longer than the best T; None where no grid has D and T within a factor of 2.

    Of D = 2 T and T = 2 D, if D = T cannot be, the better one.
    """
    near = [tp for tp, timed in grids.items() if timed.dp <= 2 * tp <= 4 * timed.dp]
    square = [tp for tp in near if grids[tp].dp == tp] or near
    return min(took[tp] for tp in square) / min(took.values()) - 1 if square else None


def sweet_spot(ranks: int, gradient: int = 4, parameter: int = 2, momentum: int = 2, spread: float = 1.0) -> float:
    """Return the T at which gather_all sends least if every rank has one link, for DP and TP alike: a closed form.

        N ((g + w + m) (1/T - 1/R) + m s (T - 1) / R)  is least at  T = sqrt(R (g + w + m) / (m s))

    bytes per rank: R ranks, N elements in matrices, s as in `PlannedWorld.spread`; so T / D = (g + w + m) / (m s).
    """
    return math.sqrt(ranks * (gradient + parameter + momentum) / (momentum * spread))
