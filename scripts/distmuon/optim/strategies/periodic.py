"""periodic: whole matrices every so many steps, blocks in between. Another optimizer than Muon: MuonBP.

A group's `whole_every` is k: its matrices are whole in steps k, 2 k, 3 k, ..., as in `owner`, on the same map and with
the same bytes. In all other steps every rank orthogonalizes the block that it holds, as in `blockwise`, and TP sends
nothing. Where k or T is 1, it is Muon.

A matrix [A, B] in T blocks of its longer side has updates of up to sqrt(T) times the RMS, since Newton–Schulz makes the
RMS of a semi-orthogonal [a, b] 1 / sqrt(max(a, b)). So block steps want a smaller learning rate, from 1 / sqrt(T) to 1
times that of whole ones. By default (`block_lr_ratio="shape"`) the factor on a block's update is that of the block's
own shape, which keeps the RMS; a number is a ratio of learning rates by itself, 1 what `blockwise` does. Decay is that
of the group's learning rate in every step.

A step that is skipped is none: the optimizer's own count of updates, saved with its state and compared between ranks,
says which step this is. Work is balanced for whole steps.

Source: MuonBP (Khaled, Ozkara, Yu, Hong, Park 2025, arXiv 2510.16981), whose theory asks for the two learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from distmuon.optim.muon import scale
from distmuon.optim.strategies import blockwise, owner
from distmuon.optim.strategies.costs import StrategyCosts
from distmuon.optim.strategies.owner import OneOwner
from distmuon.optim.strategies.strategy import Shape, refuse_row_moments

OPTIONS: dict[str, Any] = {"whole_every": 5, "block_lr_ratio": "shape"}


def is_whole(steps: int, every: int) -> bool:
    """Say whether the step after `steps` updates is one that takes whole matrices: every `every`-th is."""
    return (steps + 1) % every == 0


class PeriodicOwner(OneOwner):
    """One owner per matrix in whole steps; in block steps every rank takes its blocks for whole matrices."""

    @staticmethod
    def options(given: Mapping[str, Any]) -> dict[str, Any]:
        """Return whole_every and block_lr_ratio of a group, as given or by default; ValueError for nonsense."""
        refuse_row_moments(given, "periodic")
        found = {name: given.get(name, default) for name, default in OPTIONS.items()}
        every, ratio = found["whole_every"], found["block_lr_ratio"]
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"whole_every is {every!r}; give a number of steps, 1 or more.")
        if ratio != "shape" and not (isinstance(ratio, int | float) and 0 < ratio < math.inf):
            raise ValueError(f"block_lr_ratio is {ratio!r}; give 'shape' or a positive number.")
        return found

    def owns_full(self, index: int) -> bool:
        """Say whether this step takes that matrix whole."""
        return is_whole(self.context.steps(), self.context.groups[index]["whole_every"])

    def lr_ratio(self, index: int, block: Shape, whole: Shape) -> float:
        """Return 1 for a matrix that is whole, cut or not, and `block_lr_ratio` for one in blocks."""
        group = self.context.groups[index]
        if block == whole or self.owns_full(index):
            return 1.0
        if group["block_lr_ratio"] != "shape":
            return group["block_lr_ratio"]
        return scale(block, group["scale"]) / scale(whole, group["scale"])


# ---- What it costs ----------------------------------------------------------------------------------------


# owner's bound for any mixture of whole matrices and blocks: groups may have periods of their own
allocates = partial(owner.allocates, blocks_too=True)


STRATEGY = PeriodicOwner
# With the default period.
COSTS = StrategyCosts(
    owner.sends, allocates, owner.by_one_owner, others=[(OPTIONS["whole_every"] - 1, blockwise.COSTS)]
)
