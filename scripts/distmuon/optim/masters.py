"""What is kept of parameters that stay where PyTorch has placed them; float32 masters of narrow ones among it.

A bf16 number has 8 binary digits, so a weight W can only change by steps of W/128 to W/256: what is less than half of
that, and a decay of lr * weight_decay nearly always is, is lost. If decay and update are rounded together, the update
carries the decay over. For an update that is itself that small, nothing helps but digits: a float32 master weight,
which remembers what the rounding takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from distmuon.optim.options import check_flag
from distmuon.optim.states import (
    MASTER_WEIGHT,
    UNPLACED,
    CheckedState,
    check_kept,
    check_maker,
    check_same_algorithm,
    in_own_order,
    names_of,
    rows_kept,
)
from distmuon.sharding.boxes import matrices_of
from distmuon.sharding.buffers import follow_writes_
from distmuon.sharding.local_views import LocalView, everything, local
from distmuon.sharding.matrices import rows_in
from distmuon.sharding.meshes import common_mesh, is_first_replica
from distmuon.sharding.precision import is_narrow
from distmuon.sharding.warning import warn_user

Feeds = Callable[[dict[str, Any], Tensor], torch.dtype | None]


@contextlib.contextmanager
def rounded_once(weight: Tensor, master: Tensor | None = None) -> Iterator[Tensor]:
    """Yield what is to be written to, in float32 or wider; in the end the weight is that, rounded.

    master: that of a narrow weight, for which otherwise a copy stands in. Any other weight is yielded itself.
    """
    if not is_narrow(weight):
        yield weight
        return
    wide = weight.float() if master is None else master
    yield wide
    weight.copy_(wide)


class MasterWeights(CheckedState):
    """The part of an optimizer that keeps, of each parameter, tensors of the parameter's own shape and placement.

    For narrow parameters, if that is wanted, a float32 `master_weight` is among them, and all else in the state is
    float32 then. What is written to a parameter between two steps counts, and its master follows.
    """

    master_weights: bool | None = None
    KEPT: ClassVar[tuple[str, ...]] = ("master_weights",)  # by copies and pickles, besides what torch keeps
    _warned = False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: self.__dict__[name] for name in self.KEPT if name in self.__dict__}

    def keeps_master(self, p: Tensor) -> bool:
        """Return whether a parameter has a float32 master here."""
        return bool(self.master_weights) and is_narrow(p)

    def master(self, p: Tensor) -> Tensor | None:
        """Return the master of what this rank holds of a parameter, as it is now; None if the parameter has none."""
        if not self.keeps_master(p):
            return None
        state = self.state[p]
        if MASTER_WEIGHT not in state:
            state[MASTER_WEIGHT] = p.detach().float()
        else:
            follow_writes_(local(state[MASTER_WEIGHT]), local(p.detach()))
        return local(state[MASTER_WEIGHT])

    def kept_dtype(self, p: Tensor) -> torch.dtype:
        """Return in which dtype the state has what it keeps of a parameter, but for counts."""
        return torch.float32 if self.keeps_master(p) else p.dtype

    @torch.no_grad()
    def scale_rows_(self, factors: Mapping[Tensor, Tensor]) -> None:
        """Multiply parameters row by row, between two steps, and master weights with them.

        factors: {parameter: of each of the rows that this rank holds}.
        """
        for p, rows in factors.items():
            weight, master = local(p), self.master(p) if p in self.state else None
            (weight if master is None else master).mul_(rows.view(-1, *[1] * (p.ndim - 1)))
            if master is not None:
                weight.copy_(master)

    def choose_masters(self, master_weights: bool | None) -> None:
        """Keep masters from the first step on, or not; None: not, and warn once where decay cannot act."""
        if master_weights is not None:
            check_flag("master_weights", master_weights)
        self.master_weights = master_weights

    def warn_of_lost_decay(self) -> None:
        """Warn, once, if the decay of a group's weights is less than half of their last digit."""
        if self._warned or self.master_weights is not None:
            return
        for group in self.param_groups:
            for name, p in zip(names_of(group), group["params"], strict=True):
                if not is_narrow(p) or p.grad is None:
                    continue
                decay = float(group["lr"]) * float(group["weight_decay"])
                if 0 < decay < torch.finfo(p.dtype).eps / 2:
                    self._warned = True
                    warn_user(
                        f"parameter {name!r} is {p.dtype}, in which a decay of lr * weight_decay = {decay:.1e} a step "
                        "is rounded away unless an update carries it over, as small updates are; pass "
                        "master_weights=True for float32 masters, or False if this is what you want.",
                    )
                    return

    def _in_order(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "place" in state_dict:
            raise ValueError(
                "this state is one rank's shard of a sharded optimizer's; save and load such a training by "
                "distmuon.checkpoint, which knows where the parts belong."
            )
        check_maker(state_dict["param_groups"], self.MADE_BY)
        groups, lacking = in_own_order(self.param_groups, state_dict["param_groups"]), list[str]()
        for own, saved in zip(self.param_groups, groups, strict=True):
            algorithm = check_same_algorithm(self, own, saved)
            for name, p, number in zip(names_of(own), own["params"], saved["params"], strict=True):
                state = state_dict["state"].get(number, {})
                check_kept(name, p, state, algorithm, rows_kept(p, saved))
                _check_placed(name, p, state)
                if MASTER_WEIGHT in state and not self.keeps_master(p):
                    raise ValueError(
                        f"this state has a {MASTER_WEIGHT} for {name!r}, which is {p.dtype} here and keeps none; make "
                        "the optimizer with master_weights=True and the model as it was, or remove the masters from "
                        "the state."
                    )
                if state and MASTER_WEIGHT not in state and self.keeps_master(p):
                    lacking.append(name)
        if lacking:
            warn_user(lacks_masters("state", lacking))
        return groups

    def _put_in(self, states: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p, state in zip(parameters, states, strict=True):
            for key, value in state.items():
                dtype = value.dtype if key in UNPLACED else self.kept_dtype(p)
                device = value.device if key == "step" else p.device
                self.state[p][key] = value.to(device, dtype, copy=True)


def _check_placed(name: str, parameter: Tensor, state: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the parameter, unless its state is placed as it is, but for what is whole everywhere."""
    for key in state.keys() - UNPLACED:
        theirs, ours = (getattr(tensor, "placements", None) for tensor in (state[key], parameter))
        if theirs != ours:
            placed = [f"placed as {where}" if where else "a plain tensor" for where in (theirs, ours)]
            raise ValueError(
                f"{key} of {name!r} is {placed[0]} in this state, the parameter {placed[1]}; load it by "
                "torch.distributed.checkpoint.state_dict or distmuon.checkpoint, which place it anew."
            )


def local_views(optimizer: torch.optim.Optimizer) -> Iterable[LocalView]:
    """Return what this rank holds of an optimizer's parameters: as its own method says, or where they are."""
    own = getattr(optimizer, "local_views", None)
    return views_in_place(optimizer) if own is None else own()


def views_in_place(optimizer: torch.optim.Optimizer, feeds: Feeds | None = None) -> list[LocalView]:
    """Return what this rank holds where PyTorch has placed parameters, as tensors or DTensors; no collective.

    feeds(group, parameter): in which dtype Newton–Schulz sees the parameter's matrices; None: it does not see them.
    Raises ValueError, naming the parameter, for a DTensor on other ranks than the others.
    """
    members = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group{number}.{i}" for i, _ in enumerate(group["params"])]
        members += [(group, name, p) for name, p in zip(names, group["params"], strict=True)]
    mesh = common_mesh([(name, p) for _, name, p in members])
    found = []
    for group, name, p in members:
        more: dict[str, Any] = {"counted": mesh is None or is_first_replica(p, mesh)}
        if isinstance(optimizer, MasterWeights):
            more["dtype"] = optimizer.kept_dtype(p)
            if optimizer.keeps_master(p) and MASTER_WEIGHT in optimizer.state.get(p, {}):
                more["values"] = optimizer.master(p)
        if feeds is not None and (ns_dtype := feeds(group, p)) is not None:
            more |= {"matrices": matrices_of(group["matrices"], tuple(p.shape)), "ns_dtype": ns_dtype}
            more["row_boxes"] = everything((rows_in(group["matrices"], tuple(p.shape)),))
        found.append(LocalView.in_place(name, p, **more))
    return found


def lacks_masters(what: str, names: Sequence[str]) -> str:
    """Return a sentence on a state or checkpoint without masters of these parameters, which are to have some."""
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return (
        f"this {what} has no {MASTER_WEIGHT} of {names[0]!r}{more}; the masters begin in the next step, as the "
        "parameters are then."
    )
