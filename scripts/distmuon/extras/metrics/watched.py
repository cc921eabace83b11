"""Whom metrics watch: the local views of an optimizer, and the ranks over which sums of them are sums over the model.

DTensors                            all ranks of their mesh
an optimizer with a grid            all ranks of the grid
others that keep parts alone        all ranks there are
whole parameters                    every rank for itself

An observation is one all-reduce, in float64 where the device has it:

    sums    [5, P]    of squares and counts of elements, for P parameters; each element is counted by one rank
    table   [W, K]    K numbers of every rank in a row of its own: seconds, bytes, and what the user has recorded

A row for every rank, because an all-reduce adds: so maxima travel in it, too. W rows of zeros but for one add exactly.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.optim.masters import local_views
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.hooks import COMMUNICATION, NEWTON_SCHULZ, around_kinds
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.local_views import LocalView, local
from distmuon.sharding.meshes import common_mesh, group_of
from distmuon.sharding.precision import widest

MOMENTA = ("momentum_buffer", "exp_avg")  # under which optimizers keep it
PLACED_BY_TORCH = (torch.optim.Muon, torch.optim.AdamW)
SUMS = ("update", "weight", "momentum", "gradient", "moved")  # four of squares; elements that have a gradient
REDUCTIONS = ("max", "sum", "mean")
STEP = "step"  # all of its time
OWN = (STEP, COMMUNICATION, NEWTON_SCHULZ, "sent_bytes", "first_of_tp")  # columns that are ours


class WatchedOptimizer:
    """An optimizer, its views, and `world`: the ranks that hold the rest. Collective where these have no group yet.

    Raises TypeError for an optimizer whose step is not decay and an update times the learning rate, as far as we know;
    ValueError where its views leave out a parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not hasattr(optimizer, "local_views") and not isinstance(optimizer, PLACED_BY_TORCH):
            raise TypeError(
                f"Metrics cannot watch a {type(optimizer).__name__}, whose decay and learning rate it does not know; "
                "it takes Muon, MuonW, DistributedMuon, Zero1AdamW, torch's Muon and AdamW, and optimizers of your own "
                "that have the method local_views() and move weights by lr times an update, decay apart."
            )
        self.optimizer = optimizer
        self.group_of = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        views = self.views()
        self.names = [view.name for view in views]
        self.world, self.device, self.first_of_tp = _ranks_of(optimizer, views)

    def views(self) -> list[LocalView]:
        """Return the views of this moment, in the order of the groups."""
        found = {id(view.parameter): view for view in local_views(self.optimizer)}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for p in parameters:
            if id(p) not in found:
                raise ValueError(
                    f"local_views() of {type(self.optimizer).__name__} leaves out a parameter of shape "
                    f"{list(p.shape)}; let it return a view of each, with values=None where this rank keeps nothing."
                )
        return [found[id(p)] for p in parameters]

    def momentum_of(self, view: LocalView) -> Tensor | None:  # as `view.values`
        """Return what the state has of a parameter's momentum; None before its first step."""
        state = self.optimizer.state.get(view.parameter, {})
        return next((local(state[name]) for name in MOMENTA if name in state), None)

    @property
    def sent_bytes(self) -> int:
        """What the optimizer's ledger says has been sent; 0 for one that keeps none."""
        ledger = getattr(getattr(self.optimizer, "grid", self.optimizer), "ledger", None)
        return ledger.total().sent_bytes if isinstance(ledger, Ledger) else 0

    def all_reduce(
        self,
        views: Sequence[LocalView],
        updates: Mapping[int, Tensor],  # by parameter; of those that were moved
        seconds: Mapping[str, float],
        sent_bytes: int,
        recorded: Sequence[float | None],  # the user's scalars on this rank
    ) -> tuple[Tensor, Tensor]:  # [5, P], [W, K], on the CPU
        """Return the sums over all ranks after a step, and the rows of all. Collective.

        Gradients are those from before clipping, where the optimizer clips.
        """
        sums = torch.zeros(len(SUMS), len(views), dtype=widest(self.device), device=self.device)
        for index, view in enumerate(views):
            if view.counted and view.values is not None:
                found = (updates.get(index), view.values, self.momentum_of(view), view.gradient)
                for number, values in enumerate(found):
                    if values is not None:
                        sums[number, index] = torch.linalg.vector_norm(values, dtype=sums.dtype).square()
                sums[-1, index] = 0 if view.gradient is None else view.values.numel()
        row = [*(seconds.get(kind, 0.0) for kind in OWN[:3]), sent_bytes, float(self.first_of_tp)]
        for value in recorded:  # two columns for each: whether it is there, and its value
            row += [float(value is not None), value or 0.0]
        table = sums.new_zeros(self.world.size, len(row))
        table[self.world.rank] = sums.new_tensor(row)
        both = self.world.all_reduce(torch.cat([sums.flatten(), table.flatten()]), "metrics").cpu()
        total, rows = both.split([sums.numel(), table.numel()])
        total = total.view_as(sums)
        if (statistics := getattr(self.optimizer, "statistics", None)) is not None:
            total[SUMS.index("gradient")] = statistics.squared_norms
        return total, rows.view_as(table)

    def norms(
        self,
        views: Sequence[LocalView],
        sums: Tensor,  # [5, P]
        measured: Sequence[bool],  # of each group, whether its updates could be measured
    ) -> dict[str, Any]:
        """Return {"totals", "groups", "parameters"}: RMS of update and weight, norms of momentum and gradient."""
        rows = dict(zip(SUMS, sums.tolist(), strict=True))

        def of(indices: Sequence[int]) -> dict[str, float | None]:
            def total(name: str, among: Sequence[int] = indices) -> float:
                return sum(rows[name][i] for i in among)

            known = [i for i in indices if measured[self.group_of[i]]]
            moved, numel = total("moved", known), sum(math.prod(views[i].shape) for i in indices)
            return {
                "update_rms": math.sqrt(total("update", known) / moved) if moved else None,
                "weight_rms": math.sqrt(total("weight") / numel) if numel else None,
                "momentum_norm": math.sqrt(total("momentum")),
                "gradient_norm": math.sqrt(total("gradient")) if total("moved") else None,
            }

        groups = []
        for number, group in enumerate(self.optimizer.param_groups):
            members = [i for i, mine in enumerate(self.group_of) if mine == number]
            groups.append({"algorithm": group.get("algorithm"), "lr": float(group["lr"]), **of(members)})
        parameters = {view.name: of([i]) for i, view in enumerate(views)}
        return {"totals": of(range(len(views))), "groups": groups, "parameters": parameters}


def of_table(
    table: Tensor,  # [W, K]
    reductions: Mapping[str, str],  # of the scalars, in the order of the columns
) -> dict[str, Any]:
    """Return {"seconds", "communication", "newton_schulz", "sent_bytes", "scalars"} of all ranks.

    Seconds and bytes are means over ranks; the two kinds are shares of the seconds. A scalar is NaN where it is on one
    rank, None where no rank has recorded it.
    """
    seconds, communication, newton_schulz, sent_bytes, first_of_tp = table[:, : len(OWN)].unbind(1)
    scalars: dict[str, float | None] = {}
    for number, (name, how) in enumerate(reductions.items()):
        first = len(OWN) + 2 * number
        present, values = table[:, first : first + 2].unbind(1)
        counts = (present > 0) & (first_of_tp > 0) if how == "sum" else present > 0
        scalars[name] = getattr(values[counts], how)().item() if counts.any() else None
    return {
        "seconds": seconds.mean().item(),
        COMMUNICATION: (communication.sum() / seconds.sum()).item(),
        NEWTON_SCHULZ: (newton_schulz.sum() / seconds.sum()).item(),
        "sent_bytes": sent_bytes.mean().item(),
        "scalars": scalars,
    }


def _ranks_of(optimizer: torch.optim.Optimizer, views: list[LocalView]) -> tuple[Group, torch.device, bool]:
    """Return whose sums are added up, where, and whether this rank is the first of its TP group."""
    grid = getattr(optimizer, "grid", None)
    if isinstance(grid, Grid):
        return replace(grid.world, ledger=Ledger()), grid.device, grid.tp.rank == 0
    device = next((view.values.device for view in views if view.values is not None), torch.device("cpu"))
    if mesh := common_mesh([(view.name, view.parameter) for view in views]):
        first = "tp" not in (mesh.mesh_dim_names or ()) or mesh.get_local_rank("tp") == 0
        return group_of(mesh, Ledger()), device, first
    everybody = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if everybody is not None and any(not view.is_whole for view in views):
        return Grid.of(everybody).world, device, True
    return Group("mesh"), device, True


# ---- Where the time of a step goes ------------------------------------------------------------------------


class Stopwatch:
    """Times one step, from construction to `stop`, and of it all work of a kind: communication, Newton–Schulz.

    On the CPU by the clock. On a GPU by events in the stream that computes: work is only asked for, and the clock would
    time the asking. A collective that this stream waits for counts from the asking to the end of the waiting; what runs
    beside the computation is hidden, and counts nothing. Waiting for slower ranks is communication, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._spans = device.type == "cuda", list[tuple[str, Any, Any]]()
        self._open = contextlib.ExitStack()
        self._open.enter_context(self._span(STEP))
        self._open.enter_context(around_kinds(self._span))

    def stop(self) -> None:
        """End the step, finished or not; twice does no harm."""
        self._open.close()

    def seconds(self) -> dict[str, float]:
        """Return {STEP or kind: seconds}; a kind of which there was nothing is missing. Waits for a GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for kind, begin, end in self._spans:
            taken = begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
            found[kind] = found.get(kind, 0.0) + taken
        return found

    @contextlib.contextmanager
    def _span(self, kind: str) -> Iterator[None]:
        begin = self._now()
        try:
            yield
        finally:
            self._spans.append((kind, begin, self._now()))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
