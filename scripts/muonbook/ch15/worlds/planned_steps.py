"""How long a step of a planned world takes by the alpha-beta model, on assumed links, and which T makes it shortest.

    passes                  forward, again, and backward: 8 FLOPs per active parameter and token, over all ranks, for
                            activations are recomputed (6 where they are not); attention's scores left out
    activations             all-reduces over TP, sequence by sequence: `StageActivations.messages`
    FSDP2's gathers         of parameters and gradients, for every sequence

and the update, as the planner's parts have it. Nothing overlaps, as in this book's optimizer. Every algorithm stands
beside AdamW, which is laid out alike on the same grid. Pipeline and expert parallelism: `WorldPlan` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from muonbook.planner.algorithms import Algorithm, Part
from muonbook.planner.fabrics import DEVICES, Fabric
from muonbook.planner.model_shapes import MODELS, Shape
from muonbook.planner.parts.activations import StageActivations
from muonbook.planner.parts.fsdp_worlds import FsdpPart
from muonbook.planner.planned_worlds import grids, specs_of
from muonbook.planner.stages import Degrees, stages

MEMORY_BYTES = DEVICES["h100"].memory_bytes


class Step(NamedTuple):
    """Seconds of one step, part by part. gathers: FSDP2's. update, plain_update: Muon's, and AdamW's laid out alike."""

    computation: float
    activations: float
    gathers: float
    update: Mapping[str, float]
    plain_update: Mapping[str, float]

    @property
    def muon(self) -> float:
        return self._passes + sum(self.update.values())

    @property
    def adamw(self) -> float:
        return self._passes + sum(self.plain_update.values())

    @property
    def communication(self) -> float:
        """All that the optimizer sends: what a sweet spot of communication alone would be about."""
        return self.gathers + sum(self.update.values()) - self.newton_schulz

    @property
    def newton_schulz(self) -> float:
        return self.update["Newton–Schulz"]

    @property
    def extra(self) -> float:
        """What Muon adds to AdamW's step, over the passes."""
        return (self.muon - self.adamw) / (self.computation + self.activations)

    @property
    def optimizer(self) -> float:
        """All that is not the passes, over the passes."""
        return self.muon / (self.computation + self.activations) - 1

    @property
    def _passes(self) -> float:
        return self.computation + self.activations + self.gathers


@dataclass(frozen=True, eq=False)
class TimedWorld:
    """A model on a grid by one algorithm, and by AdamW beside it: time it on any fabric, for any batch.

    fits: the fullest rank's model states and the activations of a sequence fit a device. has_room: so does what a step
    allocates, when activations are gone. recompute: of a layer, keep the input alone; see `WorldSetting`.
    """

    shape: Shape
    dp: int
    tp: int
    muon: Part
    adamw: Part
    fits: bool
    has_room: bool
    recompute: bool = True
    known: dict[Fabric, Step] = field(default_factory=dict)

    @classmethod
    def of(cls, shape: Shape, dp: int, tp: int, algorithm: Algorithm, recompute: bool = True) -> TimedWorld:
        """Plan it. Raises ValueError for a T that the model cannot take."""
        specs, indices = specs_of(shape, tp)
        muon, adamw = (each.lay_out(specs, indices, dp, tp) for each in (algorithm, algorithm.adamw))
        left = MEMORY_BYTES - int(np.sum(list(muon.states().values()), axis=0).max())
        passes = _activations(shape, dp, tp, recompute).held_bytes(1) + muon.passing_bytes
        return cls(shape, dp, tp, muon, adamw, left >= passes, left >= max(passes, muon.update_bytes), recompute)

    def admits(self, tokens: int) -> bool:
        """Say whether every DP rank gets at least one whole sequence of a batch of `tokens`."""
        return self.dp * self.shape.context <= tokens

    def step(self, fabric: Fabric, tokens: int) -> Step:
        """Return the seconds of one step over `tokens`, of all ranks together."""
        if fabric not in self.known:
            self.known[fabric] = self._of_a_sequence(fabric)
        sequences, found = tokens / self.shape.context / self.dp, self.known[fabric]
        passes = {name: sequences * getattr(found, name) for name in ("computation", "activations", "gathers")}
        return found._replace(**passes)

    def _of_a_sequence(self, fabric: Fabric) -> Step:
        """Return the step if every DP rank had one sequence."""
        links = fabric.links(self.dp, self.tp)
        flops = fabric.flops_per_second
        per_token = (8 if self.recompute else 6) * self.shape.active
        computation = per_token * self.shape.context / self.tp / flops
        activations = _activations(self.shape, self.dp, self.tp, self.recompute).messages().seconds(links)
        gathers = self.muon.pass_seconds(links["dp"]) if isinstance(self.muon, FsdpPart) else 0.0
        updates = (part.update_seconds(links, flops) for part in (self.muon, self.adamw))
        return Step(computation, activations, gathers, *updates)


def _activations(shape: Shape, dp: int, tp: int, recompute: bool) -> StageActivations:
    (whole,) = stages(shape, 1, 1)
    return StageActivations(shape, whole, Degrees(dp, tp), recompute, sequence_parallel=False)


# ---- Which T? ----------------------------------------------------------------------------------------------

Grids = Mapping[int, TimedWorld]  # by T
AIMS: dict[str, Callable[[Step], float]] = {
    "step": lambda step: step.muon,
    "communication": lambda step: step.communication,
}


def timed_grids(model: str, ranks: int, algorithm: Algorithm, recompute: bool = True) -> dict[int, TimedWorld]:
    """Return the model's grids of so many ranks by this algorithm, by T."""
    shape = MODELS[model]
    return {tp: TimedWorld.of(shape, dp, tp, algorithm, recompute) for dp, tp in grids(shape, ranks)}


def seconds(by_t: Grids, fabric: Fabric, tokens: int, aim: str) -> dict[int, float]:
    """Return what `aim` takes, by T."""
    return {tp: AIMS[aim](timed.step(fabric, tokens)) for tp, timed in by_t.items()}


def best(took: Mapping[int, float]) -> int:
    """Return the T that takes least; of equals, the smallest."""
    return min(took, key=lambda tp: (took[tp], tp))


def square_cost(by_t: Grids, took: Mapping[int, float]) -> float | None:
    """Return by how much "DP = TP" takes longer than the best T; None where no grid has D and T within a factor of 2.

    Of D = 2 T and T = 2 D, if D = T cannot be, the better one.
    """
    near = [tp for tp, timed in by_t.items() if timed.dp <= 2 * tp <= 4 * timed.dp]
    square = [tp for tp in near if by_t[tp].dp == tp] or near
    return min(took[tp] for tp in square) / min(took.values()) - 1 if square else None
