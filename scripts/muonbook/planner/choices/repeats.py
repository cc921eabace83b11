"""Which ranks of a planned grid have to do with one matrix: all that do its Newton–Schulz, algorithm by algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distmuon.sharding.layout import ParamSpec
from muonbook.planner.algorithms import ALGORITHMS
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.owned_worlds import OwnedWorld
from muonbook.planner.parts.every_rank import Zero1Part
from muonbook.planner.planned_worlds import specs_of


class Repeats(NamedTuple):
    """An algorithm's ranks. busy: [T, D] bool, those that orthogonalize the matrix; mean: of all matrices, how many
    ranks do the same one, weighted by operations."""

    title: str
    busy: np.ndarray
    mean: float

    @property
    def ranks(self) -> int:
        return int(self.busy.sum())

    @property
    def dp_ranks(self) -> int:
        """How many DP ranks hold a piece of the matrix, or own it."""
        return int(self.busy.any(axis=0).sum())


def repeats(model: str, dp: int, tp: int, matrix: str, algorithms: Sequence[str]) -> list[Repeats]:
    """Lay a model out by some of `ALGORITHMS` and look one of its matrices up.

    Raises ValueError, naming the matrix, where Muon has none of that name.
    """
    specs, indices = specs_of(MODELS[model], tp)
    named = [index for index in indices if specs[index].name == matrix]
    if not named:
        raise ValueError(f"Muon has no matrix {matrix!r} in {model}; its first is {specs[min(indices)].name!r}.")
    return [_repeats(name, specs, indices, dp, tp, named[0]) for name in algorithms]


def _repeats(name: str, specs: Sequence[ParamSpec], indices: frozenset[int], dp: int, tp: int, index: int) -> Repeats:
    part = ALGORITHMS[name].lay_out(specs, indices, dp, tp)
    assert isinstance(part, Zero1Part)
    world, busy = part.world, np.zeros((tp, dp), bool)
    if isinstance(world, OwnedWorld):
        owner = world.owner_of[index]
        assert owner.tp is not None, "planned matrices are whole ones"
        busy[owner.tp, owner.dp] = True
    else:
        (found,) = (row for _, rows in world.matrices for row in rows if row.place == index)
        busy[:, found.slice] = True
    return Repeats(ALGORITHMS[name].title, busy, world.redundancy[0])
