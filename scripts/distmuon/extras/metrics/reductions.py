"""The numbers of one observation: one all-reduce, in float64 where the device has it; the same record on every rank.

    sums    [5, P]    of squares and counts of elements, for P parameters; each element is counted by one rank
    table   [W, K]    K numbers of every rank in a row of its own: seconds, bytes, and what the user has recorded

A row for every rank, because an all-reduce adds: so maxima travel in it, too. W rows of zeros but for one add exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distmuon.extras.metrics.matrix import update_of
from distmuon.extras.metrics.stopwatch import STEP
from distmuon.extras.metrics.watched import WatchedOptimizer
from distmuon.sharding.collectives import Group
from distmuon.sharding.hooks import COMMUNICATION, NEWTON_SCHULZ
from distmuon.sharding.local_views import LocalView
from distmuon.sharding.precision import widest

SUMS = ("update", "weight", "momentum", "gradient", "moved")  # four of squares; elements that have a gradient
REDUCTIONS = ("max", "sum", "mean")
OWN = (STEP, COMMUNICATION, NEWTON_SCHULZ, "sent_bytes", "first_of_tp")  # columns that are ours

Numbers = dict[str, float | None]


def update(
    before: Tensor,
    after: Tensor,  # both as `LocalView.values`
    group: Mapping[str, Any],
) -> Tensor:  # the same, float32 or wider
    """Return by what a step has moved this rank's values, decay and learning rate taken out. lr: not 0."""
    wide = torch.promote_types(before.dtype, torch.float32)
    return update_of(before.to(wide), after.to(wide), float(group["lr"]), float(group.get("weight_decay", 0.0)))


def local_sums(
    watched: WatchedOptimizer,
    views: Sequence[LocalView],
    updates: Mapping[int, Tensor],  # by parameter; of those that were moved
) -> Tensor:  # [5, P], in the widest dtype of the device
    """Return this rank's contribution, after a step."""
    wide = widest(watched.device)
    sums = torch.zeros(len(SUMS), len(views), dtype=wide, device=watched.device)
    for index, view in enumerate(views):
        if view.counted and view.values is not None:
            found = (updates.get(index), view.values, watched.momentum_of(view), view.gradient)
            for row, values in enumerate(found):
                if values is not None:
                    sums[row, index] = torch.linalg.vector_norm(values, dtype=wide).square()
            sums[-1, index] = 0 if view.gradient is None else view.values.numel()
    return sums


def all_reduce(
    world: Group,
    sums: Tensor,  # [5, P]
    row: Sequence[float],  # K numbers of this rank
) -> tuple[Tensor, Tensor]:  # [5, P], [W, K], on the CPU
    """Return the sums over all ranks, and the rows of all. Collective."""
    table = sums.new_zeros(world.size, len(row))
    table[world.rank] = sums.new_tensor(list(row))
    both = world.all_reduce(torch.cat([sums.flatten(), table.flatten()]), "metrics").cpu()
    total, rows = both.split([sums.numel(), table.numel()])
    return total.view_as(sums), rows.view_as(table)


def row_of(
    watched: WatchedOptimizer,
    seconds: Mapping[str, float],
    sent_bytes: int,
    recorded: Sequence[float | None],
) -> list[float]:  # K
    """Return this rank's row: what is ours, then two columns for each scalar: whether it is there, and its value."""
    times = [seconds.get(kind, 0.0) for kind in OWN[:3]]
    scalars = [number for value in recorded for number in (float(value is not None), value or 0.0)]
    return [*times, sent_bytes, float(watched.first_of_tp), *scalars]


def of_table(
    table: Tensor,  # [W, K]
    reductions: Mapping[str, str],  # of the scalars, in the order of the columns
) -> dict[str, Any]:
    """Return {"seconds", "communication", "newton_schulz", "sent_bytes", "scalars"} of all ranks.

    Seconds and bytes are means over ranks; the two kinds are shares of the seconds.
    """
    seconds, communication, newton_schulz, sent_bytes, first_of_tp = table[:, : len(OWN)].unbind(1)
    scalars: Numbers = {}
    for number, (name, how) in enumerate(reductions.items()):
        first = len(OWN) + 2 * number
        present, values = table[:, first : first + 2].unbind(1)
        scalars[name] = _reduced(values, present > 0, first_of_tp > 0, how)
    return {
        "seconds": seconds.mean().item(),
        COMMUNICATION: (communication.sum() / seconds.sum()).item(),
        NEWTON_SCHULZ: (newton_schulz.sum() / seconds.sum()).item(),
        "sent_bytes": sent_bytes.mean().item(),
        "scalars": scalars,
    }


def norms(
    views: Sequence[LocalView],
    sums: Tensor,  # [5, P]
    group_of: Sequence[int],  # the number of each parameter's group
    groups: Sequence[Mapping[str, Any]],
    measured: Sequence[bool],  # of each group, whether its updates could be measured
) -> dict[str, Any]:
    """Return {"totals", "groups", "parameters"}: RMS of update and weight, norms of momentum and gradient."""
    rows = [dict(zip(SUMS, column, strict=True)) for column in sums.T.tolist()]
    members = [[i for i, mine in enumerate(group_of) if mine == number] for number in range(len(groups))]
    found = partial(_norms, views, rows, [measured[number] for number in group_of])
    of_groups = [
        {"algorithm": group.get("algorithm"), "lr": float(group["lr"]), **found(indices)}
        for group, indices in zip(groups, members, strict=True)
    ]
    parameters = {view.name: found([i]) for i, view in enumerate(views)}
    return {"totals": found(range(len(views))), "groups": of_groups, "parameters": parameters}


def _norms(
    views: Sequence[LocalView], rows: Sequence[Mapping[str, float]], measured: Sequence[bool], indices: Sequence[int]
) -> Numbers:
    def total(name: str, among: Sequence[int] = indices) -> float:
        return sum(rows[i][name] for i in among)

    known = [i for i in indices if measured[i]]
    moved, numel = total("moved", known), sum(math.prod(views[i].shape) for i in indices)
    return {
        "update_rms": math.sqrt(total("update", known) / moved) if moved else None,
        "weight_rms": math.sqrt(total("weight") / numel) if numel else None,
        "momentum_norm": math.sqrt(total("momentum")),
        "gradient_norm": math.sqrt(total("gradient")) if total("moved") else None,
    }


def _reduced(
    values: Tensor,  # [W]
    present: Tensor,  # [W], bool
    first_of_tp: Tensor,  # [W], bool
    how: str,
) -> float | None:
    """Return one number of the ranks that have recorded it; NaN where one of theirs is, None where there are none."""
    chosen = values[present & first_of_tp] if how == "sum" else values[present]
    if not len(chosen):
        return None
    return getattr(chosen, how)().item()
